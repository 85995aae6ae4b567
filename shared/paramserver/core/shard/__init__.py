"""Decisions of a shard: what it owns, in which order pushes are applied, and what is stored before an answer."""

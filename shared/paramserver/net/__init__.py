"""Requests to nodes, for clients and services: calls, which are sans I/O, and the two drivers that perform them."""

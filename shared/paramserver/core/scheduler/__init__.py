"""Decisions of the scheduler: who owns what, who is alive, and which iteration of which model is over."""

"""The scheduler: who is alive, who owns what, how far every worker has come.

The decisions are in `paramserver.core.scheduler`; this package gives them HTTP, Redis, time and a disk.
"""

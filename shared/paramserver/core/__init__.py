"""The decision logic of shard and scheduler, and what it shares with the client: no I/O, clocks or randomness."""

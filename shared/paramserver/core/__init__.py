"""The decision logic of shard, scheduler and client: pure objects without I/O, clocks or randomness."""

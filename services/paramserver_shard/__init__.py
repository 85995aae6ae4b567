"""The shard service: owns partitions of models, serves pushes and pulls, and snapshots them to Redis."""

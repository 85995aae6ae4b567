"""The shard service: owns partitions of models, serves pushes and pulls, and snapshots them to Redis."""

import paramserver_node  # noqa: F401  before all else: it says what to install if packages are missing

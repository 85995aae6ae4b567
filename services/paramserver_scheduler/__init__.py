"""The scheduler: tracks live nodes, assigns partitions to shards, and coordinates the workers' clocks.

The decisions are made in `paramserver.core.scheduler`; this package connects them to HTTP, Redis, time and the disk.
"""

import paramserver_node  # noqa: F401  before all else: it says what to install if packages are missing

"""psctl: starts clusters on this machine and controls any cluster through its REST API."""

import paramserver_node  # noqa: F401  before all else: it says what to install if packages are missing

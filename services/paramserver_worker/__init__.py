"""paramserver-worker: a process that runs training functions, as a member of a cluster's pool or one by name."""

import paramserver_node  # noqa: F401  before all else: it says what to install if packages are missing

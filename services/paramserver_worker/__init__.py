"""paramserver-worker: a process that runs training functions, as a member of a cluster's pool or one by name."""

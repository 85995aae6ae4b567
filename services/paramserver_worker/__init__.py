"""paramserver-worker: a process that runs training functions, from the pool of a cluster or one by name."""

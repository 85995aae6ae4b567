"""The client: what its models and workers do, as calls that `paramserver.net` performs."""

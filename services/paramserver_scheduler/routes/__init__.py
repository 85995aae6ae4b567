"""The scheduler's routes, one module per resource."""

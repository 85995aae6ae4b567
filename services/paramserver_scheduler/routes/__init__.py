"""The scheduler's routes, one module for each noun."""

"""Training examples that come with the package; pool workers may run them by default."""

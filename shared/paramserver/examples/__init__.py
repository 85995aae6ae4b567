"""Trainings that come with the package; workers may run them without asking."""

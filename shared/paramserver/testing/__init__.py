"""Runs the cores of paramserver without a network, for tests and simulations."""

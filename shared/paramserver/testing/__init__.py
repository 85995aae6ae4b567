"""Parts of paramserver that run without a network, for tests and simulations."""

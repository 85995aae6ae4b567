"""The client: sans-I/O calls, and two thin drivers that perform them."""

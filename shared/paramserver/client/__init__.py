"""The client: sans-I/O calls, and two thin drivers (blocking, asyncio) that perform their requests."""

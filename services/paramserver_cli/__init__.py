"""psctl: starts clusters on this machine and controls any cluster through its REST API."""

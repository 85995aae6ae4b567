"""psctl: starts clusters on this machine and speaks to any cluster through its REST routes."""

"""What every service shares: settings, servers, problems, negotiation, roles, health, metrics and forwarding."""

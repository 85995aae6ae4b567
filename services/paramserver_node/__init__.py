"""Code shared by the services: settings, servers, problems, negotiation, roles, health, metrics and forwarding."""

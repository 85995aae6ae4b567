"""Code shared by the services: settings, servers, problems, negotiation, roles, health, metrics and forwarding."""

from importlib.util import find_spec

if find_spec("typer") is None:
    raise ModuleNotFoundError(
        "psctl, servers and pool workers need more packages: pip install 'paramserver[server]'", name="typer"
    )

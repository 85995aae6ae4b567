"""Code shared by the services: settings, servers, problems, negotiation, roles, health, metrics and forwarding."""

from importlib.util import find_spec
from typing import Final

NEEDED: Final = (
    "fastapi", "fastapi_offline", "httptools", "httpx", "prometheus_client", "psutil", "pydantic", "redis", "rich",
    "typer", "uvicorn", "yaml",
)  # fmt: skip
"""Modules of the extra `server`.  All are looked for: some of them come with other packages, too."""

if missing := [name for name in NEEDED if find_spec(name) is None]:
    # Not an ImportError: the commands are installed with the client alone, and should not answer with a traceback.
    raise SystemExit(
        f"psctl, servers and pool workers need {', '.join(missing)}: "
        "pip install 'paramserver[server]', or 'paramserver[embedded]' to have a Redis, too"
    )

"""Code shared by the services: settings, servers, problems, negotiation, roles, health, metrics and forwarding."""

import os
import signal
from contextlib import suppress
from importlib.util import find_spec
from typing import Final

if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    # The system keeps from the first process of a container what it does not handle.  Told to stop while it imports the
    # rest, it would join all the same, take partitions, and be killed with them.  What serves has a handler of its own.
    with suppress(ValueError):  # imported by another thread than the main one: the program is not one of the services
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))

NEEDED: Final = (
    "fastapi", "fastapi_offline", "httptools", "httpx", "prometheus_client", "psutil", "pydantic", "redis", "rich",
    "typer", "uvicorn", "yaml",
)  # fmt: skip
"""Modules of the extra `server`.  All are looked for: some of them come with other packages, too."""

if missing := [name for name in NEEDED if find_spec(name) is None]:
    # Not an ImportError: the commands are installed with the client alone, and should not answer with a traceback.
    raise SystemExit(
        f"psctl, servers and pool workers need {', '.join(missing)}: "
        "in a checkout, pip install '.[server]', or '.[embedded]' to have a Redis, too"
    )

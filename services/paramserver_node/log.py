"""Logging to standard error: one line per event, `time level logger event key=value ...`."""

import logging
from urllib.parse import quote

from starlette.types import Scope


def setup(level: str) -> None:
    """Send this process's logs to standard error; those of third parties from WARNING up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("paramserver").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of clients: one for each invalid request


def path_of(scope: Scope) -> str:
    """Return a request's path for a line of the log: percent-encoded, as it may hold line ends and escape sequences."""
    return quote(scope["path"], errors="replace")

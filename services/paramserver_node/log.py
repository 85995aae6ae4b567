"""Logging to standard error: one line per event, `time level logger event key=value ...`."""

import logging
import os
from urllib.parse import quote

from starlette.types import Scope

from paramserver_node.settings import unknown_variables


def setup(level: str) -> None:
    """Send this process's logs to standard error; those of third parties from WARNING up.

    Warns of variables of the environment that look like settings and are none.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("paramserver").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of clients: one for each invalid request
    if names := unknown_variables(os.environ):
        logging.getLogger("paramserver.settings").warning("not settings, so without effect: %s", names)


def path_of(scope: Scope) -> str:
    """Return a request's path for a line of the log: percent-encoded, as it may hold line ends and escape sequences."""
    return quote(scope["path"], errors="replace")

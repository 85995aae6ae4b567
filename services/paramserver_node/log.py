"""Logging to standard error: one line for each event, `time level logger text`.

The time is in UTC, so that lines of several machines can be put in order.
"""

import logging
import os
import time
from urllib.parse import quote

from starlette.types import Scope

from paramserver_node.settings import unknown_variables


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def to_standard_error(level: int) -> None:
    """Send all logs of this process from that level on to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


def setup(level: str) -> None:
    """Send this process's logs to standard error; those of third parties from WARNING up.

    Warns of variables of the environment that look like settings and are none.
    """
    to_standard_error(logging.WARNING)
    logging.getLogger("paramserver").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of clients: one for each invalid request
    if names := unknown_variables(os.environ):
        logging.getLogger("paramserver.settings").warning("not settings, so without effect: %s", names)


def path_of(scope: Scope) -> str:
    """Return a request's path for a line of the log: percent-encoded, as it may hold line ends and escape sequences."""
    return quote(scope["path"], errors="replace")

"""Logging to standard error: one line per event, `time level logger event key=value ...`."""

import logging
import os

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

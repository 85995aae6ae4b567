"""Logging to standard error: one line per event, `time level logger event key=value ...`."""

import logging


def setup(level: str) -> None:
    """Send this process's logs to standard error; those of third parties from WARNING up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("paramserver").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of clients: one for each invalid request

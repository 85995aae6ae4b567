"""Logs are events: one line each, `time level logger event key=value ...`, to standard error."""

import logging


def setup(level: str = "INFO") -> None:
    """Send this process' logs to standard error; third parties only from warnings up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("paramserver").setLevel(level.upper())

"""Crash points: named places where a test can kill a real process; no-ops unless `PARAMSERVER_CRASH_AT` names one.

`PARAMSERVER_CRASH_AT=shard.before_journal` kills the process with SIGKILL the first time it gets there, `…:3` the third
time.  A crash point separates two effects: after a crash there, it must not be assumed that both have happened.
`POINTS` lists them all, and a test crashes at each.
"""

import logging
import os
import signal
from collections.abc import Callable
from typing import Final

from paramserver.errors import problem

log = logging.getLogger("paramserver.crash")

VARIABLE: Final = "PARAMSERVER_CRASH_AT"
POINTS: Final = frozenset(
    {
        "shard.before_apply",
        "shard.after_apply",
        "shard.before_journal",
        "shard.after_journal",
        "shard.before_reply",
        "shard.snapshot_block_stored",
        "shard.snapshot_before_switch",
        "shard.snapshot_after_switch",
        "shard.release_stored",
        "shard.before_load",
        "shard.after_load",
        "scheduler.before_store",
        "scheduler.after_store",
        "scheduler.after_tokens",
        "scheduler.commit_stored",
        "scheduler.commit_published",
        "scheduler.lease_taken",
        "scheduler.state_read",
    }
)
"""All crash points."""


class Fuse:
    """Counts down the passes of one crash point, then kills the process."""

    def __init__(self, setting: str) -> None:
        """`setting` is NAME or NAME:PASSES, or empty for none.  Raises RequestError (`invalid_field`) otherwise."""
        name, _, passes = setting.partition(":")
        if setting and (name not in POINTS or not (passes or "1").isdecimal() or int(passes or "1") < 1):
            raise problem("invalid_field", f"{VARIABLE} must be NAME or NAME:PASSES, with one of {sorted(POINTS)}")
        self.name = name
        self.left = int(passes or "1")

    def passed(self, name: str) -> None:
        """Note that the process has reached the crash point `name`."""
        if name != self.name:
            return
        self.left -= 1
        if self.left == 0:
            log.warning("crash point %s: this process kills itself, as %s says", name, VARIABLE)
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)


def _nothing(name: str) -> None:
    pass


_fuse: Final = Fuse(os.environ.get(VARIABLE, ""))
crash_point: Final[Callable[[str], None]] = _fuse.passed if _fuse.name else _nothing
"""Mark a crash point of that name; does nothing unless the environment says that the process is to die here."""

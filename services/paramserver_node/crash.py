"""Named places where a test lets a real process die: no-ops unless `PARAMSERVER_CRASH_AT` names one.

`PARAMSERVER_CRASH_AT=journal.before_write` kills the process with SIGKILL when it first comes by, `…:3` the third time.
A place lies between two effects that must not both be taken for done; `POINTS` has them all, and a test hits each.
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
"""Every place there is."""


class Fuse:
    """Counts the passes of one place down, and then ends the process."""

    def __init__(self, setting: str) -> None:
        """`setting` is NAME or NAME:PASSES, empty for none.  Raises RequestError (`invalid_field`) for another text."""
        name, _, passes = setting.partition(":")
        if setting and (name not in POINTS or not (passes or "1").isdecimal() or int(passes or "1") < 1):
            raise problem("invalid_field", f"{VARIABLE} must be NAME or NAME:PASSES, with one of {sorted(POINTS)}")
        self.name = name
        self.left = int(passes or "1")

    def passed(self, name: str) -> None:
        """The process has come by that place."""
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
"""A place of that name: nothing happens unless the environment says that the process is to die here."""

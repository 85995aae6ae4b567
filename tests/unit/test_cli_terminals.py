"""What psctl shows at a terminal that can redraw its lines, and at one that cannot."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

import paramserver as ps
from paramserver_cli import moves, up
from paramserver_cli.display import display
from paramserver_cli.state_directory import Cluster
from paramserver_cli.training import Training

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no such terminals")


@contextmanager
def terminal(kind: str) -> Iterator[Callable[[], bytes]]:
    """Make a terminal standard output and error during the block; yields a function that returns what it shows next."""
    ours, theirs = os.openpty()
    with (
        open(theirs, "w") as stream,
        open(ours, "rb", buffering=0) as screen,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TERM", kind)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)

        def shown() -> bytes:
            assert select.select([screen], [], [], 20.0)[0], "it shows nothing more"
            return screen.read(4096)

        yield shown


@pytest.mark.parametrize(
    ("kind", "told"), [("xterm", b"status page http://here"), ("dumb", b"  waiting for workers\r\n")]
)
def test_a_training_is_drawn_only_where_lines_can_be_redrawn(kind: str, told: bytes) -> None:
    """A dumb terminal, as Emacs has, gets a line every few seconds; a picture would never appear there."""
    with terminal(kind) as screen:
        with display("http://here") as show:
            show(Training(cast(ps.Client, None), "m", "m"))
        shown = b""
        while told not in shown:  # it may come in pieces
            shown += screen()
    assert (b"\x1b" in shown) == (kind == "xterm")


def test_moves_are_told_in_lines_where_none_can_be_redrawn() -> None:
    """At a dumb terminal the moves of a drain are lines, as in a file."""
    with terminal("dumb") as screen:
        with moves._progress("partitions moved") as show:
            show(1, 4, "3.0 MiB left on shard-1")
        shown = screen()
    assert shown == b"1 of 4 partitions moved; 3.0 MiB left on shard-1\r\n"


def test_a_path_in_a_list_is_whole_at_a_narrow_terminal() -> None:
    """In 80 columns `psctl list` continues a long state directory, which `down` needs, below; nothing is cut off."""
    folder = "/home/somebody/projects/deep-learning/experiments/.paramserver"
    cluster = Cluster(
        "http://127.0.0.1:8700", [], "redis://127.0.0.1:8799/0", None, {}, folder, ["http://127.0.0.1:8700"]
    )
    with terminal("xterm") as screen, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(up, "_clusters", lambda: [cluster])
        up.list_clusters()
        shown = screen().decode()
    assert "…" not in shown
    assert ".paramserver" in "".join(line.split()[-1] for line in shown.splitlines() if line.strip())

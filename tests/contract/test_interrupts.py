"""Ctrl-C while a shard is silent: what the caller writes to its arrays afterwards is in no push."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt
import pytest

import paramserver as ps

from .machine import lose_sockets
from .processes import eventually, nodes

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by a signal"),
]
LARGE = 4_000_000
"""Elements: more than the buffers between two sockets hold."""


def stream_thread() -> threading.Thread | None:
    """The thread that sends what is put into a stream."""
    return next((t for t in threading.enumerate() if t.name == "push stream"), None)


def within(thread: threading.Thread | None, name: str) -> bool:
    """Whether that thread is in a function of that name."""
    frame: FrameType | None = None if thread is None else sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def ctrl_c() -> None:
    """As a terminal sends it, when the main thread has come to the end of its block."""
    eventually(lambda: within(threading.main_thread(), "join"))
    os.kill(os.getpid(), signal.SIGINT)


def leave(w: ps.Worker, gradient: npt.NDArray[np.float32], own: type[BaseException]) -> None:
    """A stream whose gradient is on its way, by that error."""
    with w.stream() as push:
        push.put("w", gradient)
        eventually(lambda: within(stream_thread(), "_attempt"))
        if own is not KeyboardInterrupt:
            raise own
        threading.Thread(target=ctrl_c).start()


@pytest.mark.parametrize("own", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_written_after_a_stream_that_was_left_is_never_pushed(tmp_path: Path, own: type[BaseException]) -> None:
    """Neither where Ctrl-C comes at the end of its block, nor where the block raises; it waits for no silent shard."""
    with nodes(tmp_path) as cluster, ps.connect(cluster.url) as client:
        model = client.create_model("m", {"w": (LARGE,)}, optimizer=ps.Sum(), partitions=1)
        gradient = np.ones(LARGE, np.float32)
        shard = cluster.processes["shard-0"]
        with model.worker() as w:
            w.pull()
            lose_sockets(model)
            shard.send_signal(signal.SIGSTOP)
            with pytest.raises(own):
                leave(w, gradient, own)
            gradient[...] = 1000.0
            shard.send_signal(signal.SIGCONT)
            eventually(lambda: stream_thread() is None)
            w.push({"w": np.ones(LARGE, np.float32)})
        assert set(model.pull().flat.tolist()) <= {1.0, 2.0}

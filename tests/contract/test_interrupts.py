"""Ctrl-C while a shard is silent: what the caller then writes to its arrays is never pushed."""

import os
import signal
import sys
import threading
from types import FrameType

import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import eventually

import paramserver as ps

from .machine import lose_sockets
from .processes import Nodes, unique

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by a signal"),
]
LARGE = 4_000_000
"""Elements of a gradient that exceeds the socket buffers."""


def stream_thread() -> threading.Thread | None:
    """The thread that sends a stream's gradients, if it is running."""
    return next((t for t in threading.enumerate() if t.name == "push stream"), None)


def within(thread: threading.Thread | None, name: str) -> bool:
    """Whether the thread is inside a function of that name."""
    frame: FrameType | None = None if thread is None else sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def ctrl_c() -> None:
    """Send SIGINT, as a terminal does, once the main thread waits at the end of the stream's block."""
    eventually(lambda: within(threading.main_thread(), "join"))
    os.kill(os.getpid(), signal.SIGINT)


def leave(w: ps.Worker, gradient: npt.NDArray[np.float32], own: type[BaseException]) -> None:
    """Leave a stream with that error while its gradient is being sent."""
    with w.stream() as push:
        push.put("w", gradient)
        eventually(lambda: within(stream_thread(), "_attempt"))
        if own is not KeyboardInterrupt:
            raise own
        threading.Thread(target=ctrl_c).start()


@pytest.mark.parametrize("own", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_written_after_a_stream_that_was_left_is_never_pushed(lone: Nodes, own: type[BaseException]) -> None:
    """After Ctrl-C or an error ends a stream, later writes to its array are never pushed.

    Leaving the stream does not wait for a shard that is silent.
    """
    with ps.connect(lone.url) as client:
        model = client.create_model(unique("m"), {"w": (LARGE,)}, optimizer=ps.Sum(), partitions=1)
        gradient = np.ones(LARGE, np.float32)
        with model.worker() as w:
            w.pull()
            lose_sockets(model)
            with lone.paused("shard-0"):
                with pytest.raises(own):
                    leave(w, gradient, own)
                gradient[...] = 1000.0
            eventually(lambda: stream_thread() is None)
            w.push({"w": np.ones(LARGE, np.float32)})
        assert set(model.pull().flat.tolist()) <= {1.0, 2.0}

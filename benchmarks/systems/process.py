"""Processes of systems without a launcher of their own, and of measurements."""

import multiprocessing as mp
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

START_S = 90.0
STOP_S = 10.0


@contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """Run `target` in a process that is killed at the end of the block."""
    process = mp.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


@contextmanager
def serving(serve: Callable[..., None], *args: Any) -> Iterator[tuple[int, "Answers"]]:
    """Run `serve(*args, pipe)` in a process; yield its pid and its answers.

    `serve` must return once it receives anything or the pipe is closed; otherwise it and its children are killed.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(*args, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield process.pid, Answers(ours)
    finally:
        family = descendants(process.pid)
        ours.close()
        process.join(STOP_S)
        for p in [*family, *([psutil.Process(process.pid)] if process.is_alive() else [])]:
            try:
                p.kill()
            except psutil.NoSuchProcess:
                continue
        process.join(STOP_S)


class Answers:
    """The messages that a server process sends through its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def next(self) -> Any:
        """Return the next message; raises RuntimeError on timeout or if the process has ended."""
        try:
            if self._pipe.poll(START_S):
                return self._pipe.recv()
        except EOFError:
            raise RuntimeError("the server process ended") from None
        raise RuntimeError(f"the server process said nothing for {START_S:g} s")


def attend_each(listener: socket.socket, attend: Callable[[socket.socket], None]) -> None:
    """Call `attend` for each accepted connection in a thread of its own, until the process ends."""

    def until_it_hangs_up(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            attend(connection)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=until_it_hangs_up, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def wait_for_end(pipe: Connection) -> None:
    """Block until the other side closes the pipe."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        return


def descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []

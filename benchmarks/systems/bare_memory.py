"""The floor of one machine: the same bytes in memory that both sides map, and a byte over a Unix socket for a request.

A push is one copy into a slot of the worker's own and one pass that applies it; a pull is a byte there and back, for
there is one version, which changes under its readers.  No ids, no checks.  A thread of the server for each worker.
"""

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from benchmarks.meters import memory_bytes
from benchmarks.systems.bare_socket import APPLIED, PULL, PUSH, descend
from benchmarks.systems.process import serving, wait_for_end
from benchmarks.systems.system import Running
from benchmarks.workloads import Client, Parts, Work

from paramserver.types import F32

SHARED = "/dev/shm"
"""Where the system keeps files in memory."""


def mapped(folder: str, name: str, elements: int) -> F32:
    """The memory of a file there, zeros where it is new."""
    with (Path(folder) / name).open("a+b") as file:
        file.truncate(4 * elements)
        return np.frombuffer(mmap.mmap(file.fileno(), 4 * elements), np.float32)


class Server:
    """One vector."""

    def __init__(self, work: Work, folder: str) -> None:
        self._folder = folder
        self._elements = work.elements
        self._values = mapped(folder, "values", work.elements)
        self._values[:] = work.initial()
        self._sharers = work.workers if work.mode == "sync" else 1
        self._rate = np.float32(work.rate / self._sharers)
        self._pushes, self._changed = 0, threading.Condition()

    def attend(self, connection: socket.socket) -> None:
        """Serve one worker, which says first who it is, until it hangs up."""
        slot = mapped(self._folder, f"slot{connection.recv(1)[0]}", self._elements)
        with connection:
            while verb := connection.recv(1):
                if verb == PUSH:
                    self._apply(slot)
                connection.sendall(APPLIED)

    def _apply(self, gradient: F32) -> None:
        """Each gradient as it comes; in sync the answer waits for those of the others."""
        with self._changed:
            descend(self._values, gradient, self._rate)
            self._pushes += 1
            if self._sharers > 1:
                due = -(-self._pushes // self._sharers) * self._sharers
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pushes >= due)


def serve(work: Work, folder: str, pipe: Connection) -> None:
    """Accept connections until the pipe is closed."""
    descend(np.zeros(2, np.float32), np.zeros(2, np.float32), np.float32(0))
    pipe.send(memory_bytes([os.getpid()], "VmRSS"))
    server = Server(work, folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=server.attend, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    pipe.send(None)
    wait_for_end(pipe)


class MemoryClient:
    """One connection, and the memory of one worker."""

    fused, pairs = False, 1

    def __init__(self, work: Work, folder: str, rank: int) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"{folder}/socket")
        self._connection.sendall(bytes([rank]))
        self._values = mapped(folder, "values", work.elements)
        self._slot = mapped(folder, f"slot{rank}", work.elements)

    def pull(self) -> Parts:
        self._ask(PULL)
        return [self._values]

    def push(self, gradient: F32) -> None:
        self._slot[:] = gradient
        self._ask(PUSH)

    def exchange(self, gradient: F32) -> Parts:
        self.push(gradient)
        return [self._values]

    def _ask(self, verb: bytes) -> None:
        self._connection.sendall(verb)
        if self._connection.recv(1) != APPLIED:
            raise ConnectionError("the other side hung up")

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Connect:
    """Makes the clients."""

    folder: str

    def __call__(self, work: Work, rank: int) -> Client:
        return MemoryClient(work, self.folder, rank)


class BareMemory:
    """The floor as a system; one server."""

    key, label = "memory", "bare shared memory"

    def missing(self) -> str:
        return "" if Path(SHARED).is_dir() else f"needs {SHARED}"

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        with tempfile.TemporaryDirectory(prefix="paramserver-bench-", dir=SHARED) as folder:
            with serving(serve, work, folder) as (pid, answers):
                base = int(answers.next())
                answers.next()
                yield Running([pid], base, Connect(folder))

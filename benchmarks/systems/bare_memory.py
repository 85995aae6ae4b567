"""The floor of shared memory: the same bytes in memory mapped by both sides, a byte over a Unix socket per request.

A push is one copy into the worker's slot, one checksum (a real server recognizes duplicates by it), and one pass that
writes the result to the other one of two versions, so that readers of the current one keep it until the push after.  A
pull is one byte in each direction.  There are no ids and no checks, and the server does not track readers.  It has a
thread for each worker.
"""

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numba
import numpy as np
from benchmarks.meters import memory_bytes
from benchmarks.systems.bare_socket import PULL, PUSH
from benchmarks.systems.process import attend_each, serving, wait_for_end
from benchmarks.systems.system import Running
from benchmarks.workloads import Parts, Work
from zlib_ng import zlib_ng

from paramserver.types import F32

SHARED = "/dev/shm"
"""The in-memory file system (tmpfs)."""


@numba.njit(nogil=True, cache=True)
def step(values: F32, gradients: F32, rate: np.float32, out: F32) -> None:
    """Compute out = values - rate*(sum of the rows of `gradients`) in one pass."""
    for i in range(values.size):
        total = gradients[0, i]
        for k in range(1, gradients.shape[0]):
            total += gradients[k, i]
        out[i] = values[i] - rate * total


def mapped(folder: str, name: str, rows: int, work: Work) -> F32:
    """Map a file of `rows` vectors, created with zeros if it does not exist; returns [rows, elements]."""
    size = 4 * work.elements * rows
    with (Path(folder) / name).open("a+b") as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.float32).reshape(rows, work.elements)


class Server:
    """A server with two versions of one vector."""

    def __init__(self, work: Work, folder: str) -> None:
        self._versions, self._slots = mapped(folder, "versions", 2, work), mapped(folder, "slots", work.workers, work)
        self._versions[0] = work.initial()
        self._sharers = work.workers if work.mode == "sync" else 1
        self._rate = np.float32(work.rate / self._sharers)
        self._present, self._waiting, self._changed = 0, 0, threading.Condition()

    def attend(self, connection: socket.socket) -> None:
        """Serve one worker, which sends its rank first, until it disconnects."""
        rank = connection.recv(1)[0]
        while verb := connection.recv(1):
            if verb == PUSH:
                self._push(rank)
            connection.sendall(bytes([self._present % 2]))

    def _push(self, rank: int) -> None:
        """Apply the gradient by itself; in sync, apply all workers' gradients together when the last one arrives."""
        zlib_ng.crc32(self._slots[rank].data.cast("B"))
        with self._changed:
            self._waiting += 1
            if self._waiting < self._sharers:
                due = self._present + 1
                self._changed.wait_for(lambda: self._present >= due)
                return
            gradients = self._slots if self._sharers > 1 else self._slots[rank : rank + 1]
            step(self._versions[self._present % 2], gradients, self._rate, self._versions[(self._present + 1) % 2])
            self._present, self._waiting = self._present + 1, 0
            self._changed.notify_all()


def serve(work: Work, folder: str, pipe: Connection) -> None:
    """Run the server until the pipe is closed."""
    step(np.zeros(2, np.float32), np.zeros((1, 2), np.float32), np.float32(0), np.zeros(2, np.float32))
    pipe.send(memory_bytes([os.getpid()], "VmRSS"))
    server, listener = Server(work, folder), socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    attend_each(listener, server.attend)
    pipe.send(None)
    wait_for_end(pipe)


class MemoryClient:
    """A client with one connection and one worker's slot."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, folder: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"{folder}/socket")
        self._connection.sendall(bytes([rank]))
        self._versions = mapped(folder, "versions", 2, work)
        self._slot = mapped(folder, "slots", work.workers, work)[rank]

    def pull(self) -> Parts:
        return [self._versions[self._ask(PULL)]]

    def push(self, gradient: F32) -> None:
        self._slot[:] = gradient
        self._ask(PUSH)

    def exchange(self, gradient: F32) -> Parts:
        self._slot[:] = gradient
        return [self._versions[self._ask(PUSH)]]

    def _ask(self, verb: bytes) -> int:
        """Send a request and return the index of the current version, 0 or 1."""
        self._connection.sendall(verb)
        answer = self._connection.recv(1)
        if not answer:
            raise ConnectionError("the other side hung up")
        return answer[0]

    def close(self) -> None:
        self._connection.close()


class BareMemory:
    """The shared-memory floor as a system; one server."""

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
                yield Running([pid], base, partial(MemoryClient, folder=folder))

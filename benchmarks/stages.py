"""Where the time of a round goes: each pass over the bytes alone, and the transport alone, compared with the floor.

    python -m benchmarks.stages                  10 MB, as a Markdown table
    python -m benchmarks.stages --megabytes 100

Each stage is the product's own code, alone on one thread; times are medians of `--repeats` calls.  In a real round some
stages overlap: checks run while the next bytes arrive, and partitions use all CPUs.
"""

import argparse
import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop
from benchmarks.meters import median_s
from benchmarks.systems.process import child
from benchmarks.tables import number, table
from tests.servers import free_port

from paramserver import kernels
from paramserver.client.gradients import Scan, prepare
from paramserver.core.layout import Layout
from paramserver.core.optimizer import SegmentStep
from paramserver.core.spec import ModelSpec
from paramserver.net.calls import Request, Response
from paramserver.net.credentials import Credentials
from paramserver.net.transport import BlockingTransport
from paramserver_node.server import serve_tcp
from paramserver_node.stream import BODY
from paramserver_shard.arriving import checked

MIB = 1 << 20


@dataclass(frozen=True)
class Stage:
    """One step of a round."""

    name: str
    where: str
    """The operations and transports that include the stage."""
    seconds: float
    passes: str
    """Reads and writes of each byte, for the table."""


def passes(elements: int, repeats: int) -> Iterator[Stage]:
    """Measure the stages that touch the bytes, without any transport."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [elements]}}}))
    source, target = np.ones(elements, np.float32), np.ones(elements, np.float32)
    yield Stage(
        "copy the vector (the floor)", "", median_s(lambda: np.copyto(target, source), repeats), "1 read, 1 write"
    )

    gradient = prepare(layout, source)
    content = gradient.selection.parts
    seen = median_s(lambda: gradient.views(content, Scan(exact=False)), repeats)
    yield Stage("worker: gradient tested for NaN where it lies", "push to several shards", seen, "1 look")
    out = np.ones(elements, np.float32).view(np.uint8)
    copied = median_s(lambda: gradient.write(content, out.data, Scan(exact=False, scan_unconverted=False)), repeats)
    yield Stage("worker: gradient into a slot", "push, same host", copied, "1 read, 1 write")

    parts = [np.ones(layout.partition_size(i), np.float32) for i in range(layout.spec.partitions)]
    looked = median_s(lambda: [checked(p, "float32", ((0, p.size),)) for p in parts], repeats)
    yield Stage("shard: finite, and checksum of the push id", "push", looked, "1 read, 1 more in the cache")
    values, results = [np.ones_like(p) for p in parts], [np.ones_like(p) for p in parts]
    optimizer = layout.spec.optimizer

    def apply() -> None:
        for w, g, new in zip(values, parts, results, strict=True):
            kernels.apply(optimizer, [SegmentStep(0, w.size, 2.0**-10)], w, (), g, "float32", new, ())

    yield Stage("shard: apply SGD into the next version", "push", median_s(apply, repeats), "2 reads, 1 write")


def _bare(port: int, size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", port)) as listener:
        peer, _ = listener.accept()
        while kind := peer.recv(1):
            if kind == b"r":
                peer.sendall(buffer)
                continue
            at = 0
            while at < size:
                at += peer.recv_into(buffer[at:])
            peer.sendall(b"k")


def _http(port: int, size: int) -> None:
    """Run an HTTP/2 server that only reads or sends bodies; without transfer threads, as for a single client."""
    sink, chunk = _Into(size), memoryview(bytes(MIB))
    answer = [chunk[: size - at] for at in range(0, size, MIB)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = scope["extensions"][BODY]
        sink.begin()
        await body.into(sink)
        left, length = (answer, size) if scope["path"] == "/pull" else ([chunk[:2]], 2)
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, piece in enumerate(left):
            await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(left)})

    uvloop.run(serve_tcp(app, "127.0.0.1", port, asyncio.Event()))


class _Into:
    """A body sink that writes into preallocated memory."""

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(size))
        self.begin()

    def begin(self) -> None:
        """Restart at the beginning of the memory."""
        self._at = 0

    def room(self) -> memoryview:
        """Return the memory that is not filled yet."""
        return self._memory[self._at :]

    def rest(self) -> list[memoryview]:
        """Return `room()` as a list of buffers."""
        return [self.room()]

    def filled(self, size: int) -> None:
        """Note that `size` more bytes have been received into `room()`."""
        self._at += size

    def feed(self, data: memoryview) -> None:
        """Copy the next bytes into the memory."""
        self._memory[self._at : self._at + len(data)] = data
        self._at += len(data)

    def end(self) -> None:
        """End the body; nothing to do."""


def connected(port: int) -> socket.socket:
    """Connect to a port, waiting up to 30 s until it listens."""
    give_up = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > give_up:
                raise
            threading.Event().wait(0.05)


def transports(size: int, repeats: int) -> Iterator[Stage]:
    """Measure transfers over plain TCP, and over the product's HTTP/2 server and client with nothing behind them."""
    buffer = memoryview(bytearray(size))
    port = free_port()
    with child(_bare, port, size), connected(port) as peer:

        def pull() -> None:
            peer.sendall(b"r")
            at = 0
            while at < size:
                at += peer.recv_into(buffer[at:])

        def push() -> None:
            peer.sendall(b"w")
            peer.sendall(buffer)
            peer.recv(1)

        yield Stage(
            "bytes over plain TCP, pull (the floor)", "pull, HTTP/2", median_s(pull, repeats), "2 in the kernel"
        )
        yield Stage(
            "bytes over plain TCP, push (the floor)", "push, HTTP/2", median_s(push, repeats), "2 in the kernel"
        )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with child(_http, port, size):
        connected(port).close()
        transport = BlockingTransport([url], Credentials.found(None, None, os.environ))
        for name, body, sink in (("pull", b"-", _Into(size)), ("push", buffer, None)):
            request = Request("POST", f"/{name}", body, {}, url, sink)

            def once(request: Request = request) -> None:
                (outcome,) = transport.perform([request])
                if not isinstance(outcome, Response) or outcome.status != 200:
                    raise RuntimeError(f"not moved: {outcome}")

            yield Stage(f"bytes over HTTP/2, {name}", f"{name}, HTTP/2", median_s(once, repeats), "2 in the kernel")
        transport.close()


def profile(megabytes: float, repeats: int) -> str:
    """Return the Markdown table of all stages."""
    elements = round(megabytes * 1e6) // 4
    stages: Sequence[Stage] = [*passes(elements, repeats), *transports(4 * elements, repeats)]
    rows = [[s.name, s.where, f"{s.seconds * 1e3:.2f}", number(4e-9 * elements / s.seconds), s.passes] for s in stages]
    return table([f"{megabytes:g} MB", "part of", "ms", "GB/s", "passes over the bytes"], rows)


def main() -> None:
    """Measure the size given on the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the vector")
    parser.add_argument("--repeats", type=int, default=25, help="calls of which the median is taken")
    options = parser.parse_args()
    if options.megabytes < 0.01 or options.repeats < 1:
        parser.error("--megabytes must be at least 0.01, --repeats at least 1")
    kernels.warm_up()
    print(profile(options.megabytes, options.repeats))


if __name__ == "__main__":
    main()

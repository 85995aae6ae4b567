"""Faulty proxies for whole requests and answers, of the kind that lie between clients and nodes in real networks.

`python -m tests.chaos.middlemen SEED RATE PORT:TARGET ...` serves HTTP/1.1 and HTTP/2 on each PORT of 127.0.0.1, hands
each request on to TARGET, and writes PORT over TARGET in what it hands back, so that clients find no way around it.
RATE of the requests meet one of `FATES`.  When stdin closes, it prints how many met each, as JSON, and ends.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop
from starlette.types import Receive, Scope, Send

from paramserver_node.server import serve_tcp

ROOT = Path(__file__).parents[2]
PAGE: Final = b"<html><body><h1>Sorry</h1><p>Somebody else's page.</p></body></html>"
LATE_S_MAX: Final = 2.0
"""How much later a request may arrive a second time."""
ONCE: Final = (
    "unsent",  # a page in place of the request
    "login",  # a page that wants a password, in place of the request
    "page",  # a page in place of the answer
    "crash",  # a page of a proxy that failed itself, in place of the answer
    "empty",  # an answer without its body
    "lost",  # no answer
    "half",  # half an answer
)
FATES: Final = (
    *ONCE,
    "twice",  # the second of two answers to two requests
    "late",  # its answer, and another one to nobody later
)
REPEATED: Final = ("/push", "/pushpull", "/pull")
"""The POSTs that a proxy may repeat (docs/operations.md, Behind a proxy)."""
LOGINS: Final = (200, 302, 401, 403, 407)
KEPT: Final = ("content-length", "connection", "keep-alive", "transfer-encoding", "host", "date", "server")
"""Headers that belong to one hop."""


class Cut(Exception):
    """Ends an answer before its time."""


class Middleman:
    """The proxy of one node, an ASGI app."""

    def __init__(self, targets: Mapping[int, int], port: int, rng: random.Random, rate: float) -> None:
        self.base = f"http://127.0.0.1:{targets[port]}"
        self._renamed = [(f"127.0.0.1:{target}".encode(), f"127.0.0.1:{p}".encode()) for p, target in targets.items()]
        self._rng, self._rate = rng, rate
        self.met: Counter[str] = Counter()
        self._late: set[asyncio.Task[Any]] = set()
        self._http = httpx.AsyncClient(timeout=60.0, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        else:
            return  # the client has gone
        rng = self._rng
        fates = FATES if scope["method"] != "POST" or scope["path"] in REPEATED else ONCE
        fate = rng.choice(fates) if rng.random() < self._rate else ""
        self.met[fate] += 1
        html = [(b"content-type", b"text/html")]
        if fate == "unsent":
            return await say(send, rng.choice((429, 502, 503, 504)), html, PAGE)
        if fate == "login":
            return await say(send, rng.choice(LOGINS), [*html, (b"location", b"/login")], PAGE)
        try:
            status, headers, answer = await self.hand_on(scope, bytes(body))
            if fate == "twice":
                status, headers, answer = await self.hand_on(scope, bytes(body))
        except httpx.HTTPError:  # the node has gone
            return await say(send, 502, html, PAGE)
        if fate == "late":
            again = asyncio.create_task(self.later(scope, bytes(body), rng.uniform(0.0, LATE_S_MAX)))
            self._late.add(again)
            again.add_done_callback(self._late.discard)
        match fate:
            case "page":
                await say(send, rng.choice((502, 504)), html, PAGE)
            case "crash":
                await say(send, 500, html, PAGE)
            case "empty":
                await say(send, status, headers, b"")
            case "lost" | "half":
                await say(send, status, headers, answer, upto=len(answer) // 2 if fate == "half" else 0)
            case _:
                await say(send, status, headers, answer)

    async def hand_on(self, scope: Scope, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Send the request to the node and return status, headers and body of its answer."""
        headers = [(k, v) for k, v in scope["headers"] if k.decode() not in KEPT and not k.startswith(b":")]
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        url = httpx.URL(self.base).copy_with(raw_path=path)
        async with self._http.stream(scope["method"], url, content=body, headers=headers) as response:
            data = b"".join([chunk async for chunk in response.aiter_raw()])
        kept = [(k.lower(), v) for k, v in response.headers.raw if k.lower().decode() not in KEPT]
        if b"json" in response.headers.get("content-type", "").encode():
            for theirs, ours in self._renamed:
                data = data.replace(theirs, ours)
        return response.status_code, kept, data

    async def later(self, scope: Scope, body: bytes, after_s: float) -> None:
        """Send the request once more, when its sender may have sent others since."""
        await asyncio.sleep(after_s)
        try:
            await self.hand_on(scope, body)
        except httpx.HTTPError:
            pass  # the node has gone

    async def close(self) -> None:
        """Wait for what is still to come, and close the connections."""
        await asyncio.gather(*self._late)
        await self._http.aclose()


async def say(
    send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes, upto: int | None = None
) -> None:
    """Send an answer, or no more than its first `upto` bytes; raises Cut then, which ends the connection or stream."""
    length = (b"content-length", str(len(body)).encode())
    bare = status in (204, 304)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *([] if bare else [length])]})
    if upto is not None:
        if upto:
            await send({"type": "http.response.body", "body": body[:upto], "more_body": True})
        raise Cut
    await send({"type": "http.response.body", "body": body})


async def serve(seed: int, rate: float, targets: Mapping[int, int]) -> None:
    """Serve all of them until stdin closes."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    middlemen = {port: Middleman(targets, port, random.Random(f"{seed} {i}"), rate) for i, port in enumerate(targets)}
    async with asyncio.TaskGroup() as group:
        for port, app in middlemen.items():
            group.create_task(serve_tcp(app, "127.0.0.1", port, stop, grace_s=1.0))
        await orders.read()
        stop.set()
    for app in middlemen.values():
        await app.close()
    print(json.dumps(sum((app.met for app in middlemen.values()), Counter())), flush=True)


def begin(seed: int, rate: float, targets: Mapping[int, int], log: Path) -> subprocess.Popen[str]:
    """Start a process of them, which ends when its stdin is closed."""
    words = [f"{port}:{target}" for port, target in targets.items()]
    argv = [sys.executable, "-m", "tests.chaos.middlemen", str(seed), str(rate), *words]
    with log.open("ab") as err:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, cwd=ROOT, text=True)


if __name__ == "__main__":
    pairs = [word.split(":") for word in sys.argv[3:]]
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), {int(port): int(target) for port, target in pairs}))

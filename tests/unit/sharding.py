"""Two shards and a scheduler in memory that answer a client's calls, without sockets."""

import asyncio
import json
from collections.abc import Callable
from inspect import iscoroutine
from typing import Any, TypeVar

import numpy as np

from paramserver.client.aio import AsyncClient
from paramserver.client.client_base import ClientBase
from paramserver.client.frames import PushTerms
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.net.calls import Call, Outcome, Pause, Request, Response
from paramserver.types import PushId, PushState
from paramserver.wire.frame import MEDIA_TYPE, PullFrame, PullReply, PushFrame, PushReply, decode_header, encode_header
from paramserver.wire.tensor import from_f32, to_f32

T = TypeVar("T")
A, B = "http://a:1", "http://b:1"


class Now:
    """A clock that only the test moves, or the pauses of a call that it drives."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def drive(call: Call[T], answer: Callable[[Request], Outcome], now: Now | None = None) -> T:
    """Run a call and return its result; `answer` replaces the network, and pauses advance `now`, if given."""
    try:
        effect = next(call)
        while True:
            if isinstance(effect, Pause):
                if now is not None:
                    now.s += effect.seconds
                effect = call.send([])
            else:
                effect = call.send([answer(r) for r in effect])
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        call.close()  # as transports do


def answered(kind: type[ClientBase], answer: Callable[[Request], Outcome], now: Now | None = None) -> Any:
    """Return a client of this class, blocking or on asyncio, whose calls `drive` runs."""

    def run(call: Call[T]) -> T:
        return drive(call, answer, now)

    async def run_on_loop(call: Call[T]) -> T:
        return run(call)

    client: Any = kind("http://given:1")  # type: ignore[call-arg, arg-type]  # as its subclasses are made
    client.run = run_on_loop if issubclass(kind, AsyncClient) else run
    return client


def result(of: Any) -> Any:
    """Return what a method of either client returns."""
    return asyncio.run(of) if iscoroutine(of) else of


class Shards:
    """Two shards and a scheduler that hold one model in memory and add pushed gradients to it."""

    def __init__(self, *, partitions: int = 4, clip: bool = False, w: tuple[int, ...] = (10, 5)) -> None:
        params = {"w": {"shape": w}, "b": {"shape": [14]}}
        optimizer = {"name": "sgd", "clip_norm": 1e9} if clip else {"name": "sgd"}
        self.spec = ModelSpec.parse({"name": "m", "params": params, "partitions": partitions, "optimizer": optimizer})
        self.layout = Layout(self.spec)
        self.flat = np.arange(self.layout.size, dtype=np.float32)
        self.versions = [0] * partitions
        self.seen: set[tuple[str, int, int, int]] = set()
        self.owners = ["a" if i % 2 == 0 else "b" for i in range(partitions)]
        self.map_epoch, self.generation = 1, 7
        self.answering = {A, B}
        self.clusters: dict[str, str] = {}
        """Id of the cluster whose shard answers at each address."""
        self.timelines: dict[str | None, list[int]] = {}
        self.log: list[tuple[str | None, str]] = []
        self.pushes: list[PushFrame] = []
        self.pulls: list[PullFrame] = []
        self.trouble: list[Callable[[Request], Outcome | None]] = []

    def __call__(self, request: Request) -> Outcome:
        self.log.append((request.to, request.path))
        if request.path == "/livez":
            cluster = json.dumps({"status": "ok", "cluster": self.clusters.get(request.to or "", "")}).encode()
            return Response(200, {}, cluster) if request.to in self.answering else problem("unreachable", "no")
        for t in list(self.trouble):
            found = t(request)
            if found is not None:
                self.trouble.remove(t)
                return found
        if request.path == "/models/m":
            return Response(200, {}, json.dumps(self.document()).encode())
        assert request.body is not None
        return self.frame(request, bytes(request.body))

    def document(self) -> dict[str, Any]:
        return {
            "name": "m", "generation": self.generation, "timeline": 0, "clock": 0, "map_epoch": self.map_epoch,
            "spec": self.spec.document(), "bounds": list(self.layout.bounds), "state": "ready",
            "partitions": [{"index": i, "shard": o, "incarnation": 9} for i, o in enumerate(self.owners)],
            "shards": {"a": {"addresses": [A]}, "b": {"addresses": [B + "/"]}},
        }  # fmt: skip

    def frame(self, request: Request, data: bytes) -> Outcome:
        pull_only = request.path == "/pull"
        frame: Any
        frame, offset = decode_header(data, PullFrame if pull_only else PushFrame)
        if pull_only:
            self.pulls.append(frame)
        body = memoryview(data)[offset:]
        mine = [p[0] if pull_only else p.partition for p in frame.parts]
        if request.to is not None:
            shard = "a" if request.to == A else "b"
            if frame.map_epoch is None or any(self.owners[p] != shard for p in mine):
                return refusal("wrong_owner", map_epoch=self.map_epoch)
        push = None if pull_only else self.push(frame, body)
        if request.path == "/push":
            assert push is not None
            return Response(200, {"content-type": MEDIA_TYPE}, encode_header(push))
        return self.pull(request, frame if pull_only else frame.pull, push)

    def push(self, frame: PushFrame, body: memoryview) -> PushReply:
        self.pushes.append(frame)
        assert frame.push_id is not None
        itemsize = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[frame.dtype]
        stored = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}[frame.dtype]
        at, duplicate, parts = 0, True, []
        for part in frame.parts:
            lo, hi = self.layout.bounds[part.partition : part.partition + 2]
            new = (frame.push_id.worker, frame.push_id.epoch, frame.push_id.seq, part.partition) not in self.seen
            self.seen.add((frame.push_id.worker, frame.push_id.epoch, frame.push_id.seq, part.partition))
            for start, stop in [(0, hi - lo)] if part.ranges is None else part.ranges.tolist():
                n = stop - start
                if new:
                    raw = np.frombuffer(body[at : at + n * itemsize], stored)
                    self.flat[lo + start : lo + stop] += to_f32(raw, frame.dtype)
                at += n * itemsize
            self.versions[part.partition] += new
            duplicate = duplicate and not new
            parts.append((part.partition, self.versions[part.partition], 9, 0))
        assert at == len(body), "the body has exactly the elements that the header names"
        state: PushState = "staged" if self.spec.consistency.mode == "sync" else "applied"
        return PushReply(state, duplicate, min(p[1] for p in parts), 0, 9, 0, parts)

    def pull(self, request: Request, frame: Any, push: PushReply | None) -> Outcome:
        pieces, parts = [], []
        for partition, ranges in reversed(frame.parts):  # any order is allowed
            lo, hi = self.layout.bounds[partition : partition + 2]
            for start, stop in [(0, hi - lo)] if ranges is None else ranges.tolist():
                pieces.append(from_f32(self.flat[lo + start : lo + stop], frame.dtype).tobytes())
            parts.append((partition, self.versions[partition], 9))
        timelines = self.timelines.get(request.to, [0])
        timeline = timelines.pop(0) if len(timelines) > 1 else timelines[0]
        reply = PullReply("m", 7, timeline, min(p[1] for p in parts), 9, frame.dtype, parts, push)
        raw = encode_header(reply) + b"".join(pieces)
        assert request.sink is not None
        request.sink.begin()
        for i in range(0, len(raw), 13):  # chunks that end inside headers and elements
            request.sink.feed(memoryview(raw[i : i + 13]))
        request.sink.end()
        return Response(200, {"content-type": MEDIA_TYPE})

    def wrong_once(self, path: str, outcome: Outcome) -> None:
        """Give the next request of this path this outcome, without processing the request."""
        self.trouble.append(lambda r: outcome if r.path == path else None)

    def lost_once(self, path: str) -> None:
        """Process the next request of this path, but lose the response."""

        def lose(request: Request) -> Outcome | None:
            if request.path != path:
                return None
            assert request.body is not None
            self.frame(request, bytes(request.body))
            return problem("in_doubt", "the answer was lost")

        self.trouble.append(lose)


def refusal(code: str, said: str = "said the shard", **members: Any) -> Response:
    doc = problem(code, said, **members).document()
    return Response(doc["status"], {"content-type": "application/problem+json"}, json.dumps(doc).encode())


def terms(seq: int = 1, **more: Any) -> PushTerms:
    return PushTerms(PushId("c-1", 1, seq), **more)


def grads() -> dict[str, Any]:
    return {"b": np.full(14, 2.0, np.float32), "w": np.ones((10, 5))}


def expected() -> Any:
    """Return the values of `Shards` after one push of `grads`."""
    return np.arange(64, dtype=np.float32) + np.r_[np.ones(50), np.full(14, 2.0)].astype(np.float32)

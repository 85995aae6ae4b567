"""A typical hand-written gRPC server in Python: `bytes` in a message, one lock, ten threads, no message size limit."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.meters import memory_bytes
from benchmarks.systems.process import serving, wait_for_end
from benchmarks.systems.system import Running, lacking
from benchmarks.workloads import Parts, Work

from paramserver.types import F32

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
THREADS = 10
SERVICE = "bench.Parameters"


@cache
def message() -> Any:
    """Return the class of the only message: the bytes of a vector."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="Vector").field.add(name="value", number=1, type=kind.TYPE_BYTES, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Vector"))


class Held:
    """The values of one server and its RPC methods."""

    def __init__(self, work: Work, index: int) -> None:
        start, stop = work.bounds()[index]
        self._values, self._work = work.initial()[start:stop].copy(), work
        self._changed = threading.Condition()
        self._sum: F32 | None = None
        self._count = self._version = 0

    def pull(self, request: Any, context: Any) -> Any:
        with self._changed:
            return message()(value=self._values.tobytes())

    def push(self, request: Any, context: Any) -> Any:
        """Apply the gradient, in sync the mean of all workers' once they are here; the answer holds the new values."""
        gradient = np.frombuffer(request.value, np.float32)
        with self._changed:
            if self._work.mode == "async":
                self._values -= np.float32(self._work.rate) * gradient
                return message()()
            self._sum = gradient.copy() if self._sum is None else np.add(self._sum, gradient, out=self._sum)
            self._count += 1
            if self._count < self._work.workers:
                before = self._version
                self._changed.wait_for(lambda: self._version != before)
            else:
                self._values -= np.float32(self._work.rate / self._work.workers) * self._sum
                self._sum, self._count, self._version = None, 0, self._version + 1
                self._changed.notify_all()
            return message()(value=self._values.tobytes())


def serve(work: Work, index: int, pipe: Connection) -> None:
    """Serve on a free port until the pipe is closed."""
    import grpc

    pipe.send(memory_bytes([os.getpid()], "VmRSS"))
    held, kind = Held(work, index), message()
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(function, kind.FromString, kind.SerializeToString)
        for name, function in (("pull", held.pull), ("push", held.push))
    }
    server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    wait_for_end(pipe)
    server.stop(None).wait()


class GrpcClient:
    """A client with one channel per server."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, ports: tuple[int, ...]) -> None:
        import grpc

        self._work, kind = work, message()
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{p}", options=OPTIONS) for p in ports]
        how = (kind.SerializeToString, kind.FromString)
        self._pull = [c.unary_unary(f"/{SERVICE}/pull", *how) for c in self._channels]
        self._push = [c.unary_unary(f"/{SERVICE}/push", *how) for c in self._channels]

    @staticmethod
    def _call(methods: list[Any], requests: list[Any]) -> list[Any]:
        if len(methods) == 1:
            return [methods[0](requests[0])]
        futures = [m.future(r) for m, r in zip(methods, requests, strict=True)]
        return [f.result() for f in futures]

    def pull(self) -> Parts:
        answers = self._call(self._pull, [message()()] * len(self._pull))
        return [np.frombuffer(a.value, np.float32) for a in answers]

    def push(self, gradient: F32) -> None:
        self.exchange(gradient)

    def exchange(self, gradient: F32) -> Parts:
        answers = self._call(self._push, [message()(value=p.tobytes()) for p in self._work.split(gradient)])
        return [np.frombuffer(a.value, np.float32) for a in answers]

    def close(self) -> None:
        for c in self._channels:
            c.close()


class GrpcPython:
    """gRPC as a system."""

    key, label = "grpc", "gRPC Python"

    def missing(self) -> str:
        return lacking("grpc") or lacking("google.protobuf")

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        with ExitStack() as stack:
            up = [stack.enter_context(serving(serve, work, i)) for i in range(work.servers)]
            base = sum(int(answers.next()) for _, answers in up)
            connect = partial(GrpcClient, ports=tuple(int(answers.next()) for _, answers in up))
            yield Running([p for p, _ in up], base, connect, versions={"grpcio": version("grpcio")})

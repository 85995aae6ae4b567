"""PyTorch RPC as a parameter server: over the transports TensorPipe chooses on one machine, and over TCP."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from benchmarks.systems.process import serving
from benchmarks.systems.system import Running, lacking
from benchmarks.workloads import Parts, Work
from tests.servers import free_port

from paramserver.types import F32


class TorchClient:
    """A worker in the RPC group."""

    fused, pairs = False, 1

    def __init__(self, work: Work, rank: int, port: int, tcp: bool) -> None:
        import torch
        from benchmarks.systems import torch_state
        from torch.distributed import rpc

        torch_state.prepare()
        torch_state.join(f"worker{rank}", work.servers + rank, work, port, tcp)
        self._work, self._rpc, self._state, self._tensor = work, rpc, torch_state, torch.from_numpy
        self._servers = [f"server{i}" for i in range(work.servers)]

    def _call(self, function: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
        if len(self._servers) == 1:
            return [self._rpc.rpc_sync(self._servers[0], function, args=arguments[0])]
        futures = [self._rpc.rpc_async(s, function, args=a) for s, a in zip(self._servers, arguments, strict=True)]
        return [f.wait() for f in futures]

    def _pieces(self, gradient: F32) -> list[tuple[Any, ...]]:
        # A view of a larger tensor would be sent with the whole memory of that tensor.
        pieces = self._work.split(gradient)
        return [(self._tensor(p if len(pieces) == 1 else p.copy()),) for p in pieces]

    def pull(self) -> Parts:
        return [t.numpy() for t in self._call(self._state.pull, [()] * len(self._servers))]

    def push(self, gradient: F32) -> None:
        self._call(self._state.push, self._pieces(gradient))

    def exchange(self, gradient: F32) -> Parts:
        return [t.numpy() for t in self._call(self._state.exchange, self._pieces(gradient))]

    def close(self) -> None:
        self._rpc.shutdown()


@dataclass(frozen=True)
class TorchRpc:
    """Torch RPC with one choice of transports."""

    key: str
    label: str
    tcp: bool

    def missing(self) -> str:
        return lacking("torch")

    @contextmanager
    def start(self, work: Work) -> Iterator[Running]:
        """See `System.start`."""
        from benchmarks.systems import torch_state

        port = free_port()
        with ExitStack() as stack:
            up = [stack.enter_context(serving(torch_state.serve, work, i, port, self.tcp)) for i in range(work.servers)]
            base = sum(int(answers.next()) for _, answers in up)
            connect = partial(TorchClient, port=port, tcp=self.tcp)
            yield Running([p for p, _ in up], base, connect, versions={"torch": version("torch")})


VARIANTS = (
    TorchRpc("torch", "torch RPC", tcp=False),
    TorchRpc("torch-tcp", "torch RPC, TCP", tcp=True),
)

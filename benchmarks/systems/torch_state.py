"""Server side of the parameter server over torch RPC, as in PyTorch's tutorials: functions on a live tensor.

A separate module, because torch identifies functions by module and this one cannot be imported without torch.
"""

import os
import threading
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from benchmarks.meters import memory_bytes
from benchmarks.workloads import Work
from torch.distributed import rpc

THREADS = 16
TIMEOUT_S = 300
_lock = threading.Lock()
_state: dict[str, Any] = {}


def serve(work: Work, index: int, port: int, tcp: bool, pipe: Connection) -> None:
    """Run one server until every worker has shut down."""
    prepare()
    pipe.send(memory_bytes([os.getpid()], "VmRSS"))
    start, stop = work.bounds()[index]
    _state.update(
        values=torch.from_numpy(work.initial()[start:stop].copy()),
        rate=work.rate,
        workers=work.workers,
        sum=None,
        count=0,
        next=torch.futures.Future(),
    )
    join(f"server{index}", index, work, port, tcp)
    rpc.shutdown()


def prepare() -> None:
    """Use the loopback interface and one compute thread, and silence torch's warnings about itself."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)


def join(name: str, rank: int, work: Work, port: int, tcp: bool) -> None:
    """Join the RPC group; returns when all processes have joined."""
    ways: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=THREADS, rpc_timeout=TIMEOUT_S, init_method=f"tcp://127.0.0.1:{port}", **ways
    )
    rpc.init_rpc(name, rank=rank, world_size=work.servers + work.workers, rpc_backend_options=options)


def pull() -> Any:
    """Return the live tensor; the bytes sent may mix one version with the next."""
    return _state["values"]


def push(gradient: Any) -> None:
    """Apply one gradient."""
    with _lock:
        _state["values"].add_(gradient, alpha=-_state["rate"])


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def exchange(gradient: Any) -> Any:
    """Return a future of the values after the mean of all workers' gradients has been applied."""
    with _lock:
        future = _state["next"]
        _state["sum"] = gradient.clone() if _state["sum"] is None else _state["sum"].add_(gradient)
        _state["count"] += 1
        if _state["count"] == _state["workers"]:
            values = _state["values"].add_(_state["sum"], alpha=-_state["rate"] / _state["workers"])
            _state.update(sum=None, count=0, next=torch.futures.Future())
            future.set_result(values)
    return future

"""paramserver: a parameter server for Python, through plain REST or this client.

>>> import paramserver as ps
>>> client = ps.connect()                      # PARAMSERVER_URL, default http://127.0.0.1:8700

Names are imported when first used, so `import paramserver` is cheap; docs/sdk.md shows how to use them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paramserver import codecs as codecs
    from paramserver import torch as torch
    from paramserver.client.aio import AsyncClient, AsyncModel
    from paramserver.client.aio_worker import AsyncWorker
    from paramserver.client.arrays import Params
    from paramserver.client.client import Client, connect
    from paramserver.client.consistency import SSP, Async, Buffered, Consistency, Sync
    from paramserver.client.control import Point
    from paramserver.client.gradient_arrays import GradientArrays
    from paramserver.client.local import local
    from paramserver.client.model import Model
    from paramserver.client.optimizers import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Constant,
        Cosine,
        Exponential,
        Momentum,
        Nesterov,
        Optimizer,
        RMSprop,
        Schedule,
        StepDecay,
        Sum,
    )
    from paramserver.client.pushed import Pushed
    from paramserver.client.spec_builder import Param
    from paramserver.client.streaming import AsyncPushStream, PushStream
    from paramserver.client.tasks import Task
    from paramserver.client.worker import Worker
    from paramserver.errors import (
        AuthError,
        ConflictError,
        CorruptState,
        FencedError,
        InDoubt,
        InternalError,
        NotFoundError,
        PsError,
        RequestError,
        StaleMapError,
        Unavailable,
        Unreachable,
    )

_HOMES = {
    "client.aio": "AsyncClient AsyncModel",
    "client.aio_worker": "AsyncWorker",
    "client.arrays": "Params",
    "client.client": "Client connect",
    "client.control": "Point",
    "client.consistency": "Async Buffered Consistency SSP Sync",
    "client.gradient_arrays": "GradientArrays",
    "client.local": "local",
    "client.model": "Model",
    "client.optimizers": "Adagrad Adam AdamW Constant Cosine Exponential FTRL Momentum Nesterov Optimizer RMSprop SGD "
    "Schedule StepDecay Sum",
    "client.pushed": "Pushed",
    "client.tasks": "Task",
    "client.spec_builder": "Param",
    "client.streaming": "AsyncPushStream PushStream",
    "client.worker": "Worker",
    "errors": "AuthError ConflictError CorruptState FencedError InDoubt InternalError NotFoundError PsError "
    "RequestError StaleMapError Unavailable Unreachable",
}
_PACKAGES = ("codecs", "torch")
"""Subpackages, imported when first used too; `torch` says what to install if PyTorch is missing."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "FTRL", "SGD", "SSP", "Adagrad", "Adam", "AdamW", "Async", "AsyncClient", "AsyncModel", "AsyncPushStream",
    "AsyncWorker", "AuthError", "Buffered", "Client", "ConflictError", "Consistency", "Constant", "CorruptState",
    "Cosine", "Exponential", "FencedError", "GradientArrays", "InDoubt", "InternalError", "Model", "Momentum",
    "Nesterov", "NotFoundError", "Optimizer", "Param", "Params", "Point", "PsError", "PushStream", "Pushed",
    "RMSprop", "RequestError", "Schedule", "StaleMapError", "StepDecay", "Sum", "Sync", "Task", "Unavailable",
    "Unreachable", "Worker", "connect", "local",
]  # fmt: skip


if not TYPE_CHECKING:  # else a misspelled name would be of type Any

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"paramserver.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'paramserver' has no attribute '{name}'")
        value = getattr(import_module(f"paramserver.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    packages = [p for p in _PACKAGES if p != "torch" or find_spec("torch")]  # completion accesses what is listed
    return sorted([*__all__, *packages, "__version__"])

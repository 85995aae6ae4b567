"""Helpers for tests of clients on the shards' own machine: a model, and the requests that its client makes."""

import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

import paramserver as ps
from paramserver.client.model import Model
from paramserver.net.calls import Outcome, Request

ON_LINUX = [
    pytest.mark.process,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="buffers are mapped in place on Linux"),
]
SIZE = 300_000
_numbers = count()


def made(client: ps.Client, **options: Any) -> Model:
    """Create a model of two parameters that span its partitions, with a learning rate of 1.

    Each of two shards owns half of its four partitions, so none is moved to balance the load.
    """
    shapes: dict[str, tuple[int, ...]] = {"a": (SIZE // 3,), "b": (2, SIZE // 3)}
    options = {"optimizer": ps.SGD(lr=1.0), "partitions": 4, **options}
    return client.create_model(f"m{next(_numbers)}", params=shapes, **options)


def lose_sockets(model: Model) -> None:
    """Make the model's client do without the shards' Unix sockets."""
    cluster = model._client.cluster
    for addresses in cluster._maps[model.name].addresses.values():
        for address in addresses:
            if address.startswith("unix"):
                cluster.lost(address, time.monotonic(), for_good=True)


def requests_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the path of each further request of this model's client."""
    transport, paths = model._client.transport, list[str]()
    perform = transport.perform

    def noted(requests: Sequence[Request], *within: Any) -> list[Outcome]:
        paths.extend(r.path for r in requests)
        return perform(requests, *within)

    monkeypatch.setattr(transport, "perform", noted)
    return paths

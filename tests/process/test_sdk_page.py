"""The Python blocks of docs/sdk.md and docs/codecs.md run as printed."""

import ast
import asyncio
import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import certifi
import numpy as np
import pytest

import paramserver as ps

from .cluster import Cluster

pytestmark = pytest.mark.process
DOCS = Path(__file__).parents[2] / "docs"
ADDRESSES = re.compile(r"https://ps\.example\.org|http://a:8700,http://b:8700|http://localhost:8700")


def blocks() -> Iterator[Any]:
    """Each Python block of the pages, under the heading that it stands below."""
    for page in ("sdk.md", "codecs.md"):
        heading = ""
        for found, text in re.findall(r"^#+ ([^\n]*)$|^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S):
            heading = found or heading
            if text:
                yield pytest.param(text, id=f"{page}: {heading}: {text.splitlines()[0][:40]}")


def names() -> dict[str, Any]:
    """What the reader of a block has already: values, gradients, a loss, data, and a loop that ends."""
    rng = np.random.default_rng(0)
    w, b, layer = (rng.normal(size=s).astype(np.float32) for s in ((64, 10), (10,), (30,)))
    grads = {"w": w, "b": b, "layers.0": layer}
    twice = count()
    return {
        **{"np": np, "ps": ps, "w0": w, "gw": w, "gb": b, "few": b.repeat(13)[:128], "loss": 0.5, "grads": grads},
        "flat_gradient": np.concatenate([g.ravel() for g in grads.values()]),
        "values": None,
        "training": type("Twice", (), {"__bool__": lambda _: next(twice) < 2})(),
        "batches": lambda start, stop: [(start, stop)],
        "loss_and_grads": lambda p, x, y: (0.5, grads),
        "gradients": lambda p: grads,
        "backward": lambda values=None, out=None: list(reversed(grads.items())) if out is None else None,
        "accuracy": lambda p: float(p["b"].mean()),
    }


def torch_names() -> dict[str, Any]:
    """The network, data and loss of the block about PyTorch."""
    import torch

    loader = [(torch.ones(2, 3), torch.zeros(2, 1))]
    return {"net": torch.nn.Linear(3, 1), "loader": loader, "loss_fn": torch.nn.MSELoss()}


@pytest.mark.parametrize("text", list(blocks()))
def test_a_block_runs_as_printed(
    text: str, shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block runs without an error on a model and a worker like those that the page has introduced before."""
    if "ps.torch" in text and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install torch==2.13.0")
    monkeypatch.setenv("PARAMSERVER_URL", shared_cluster.url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    ends = chain([False, False], repeat(True))
    if "ps.local" in text:  # it has tests of its own; what it is called with is checked here
        signature = inspect.signature(ps.local)
        monkeypatch.setattr(ps, "local", lambda *args, **options: signature.bind(*args, **options) and ps.connect())
    if "while not w.draining" in text:
        monkeypatch.setattr(ps.Worker, "draining", property(lambda _: next(ends)))
    spec: dict[str, Any] = {"w": (64, 10), "b": (10,), "layers.0": (30,)}

    with ps.connect() as client, ExitStack() as stack:
        delete(client)  # that of another page
        stack.callback(delete, client)
        given = names() | {"client": client, "model": client.model("demo")}
        if "ps.torch" in text:
            given |= torch_names()
        elif "create_model" not in text:
            model = client.create_model("demo", spec)
            if "w.tasks" in text:
                model.add_tasks("train", size=20, task_size=10)
            for _ in range(7):
                model.push(given["grads"])
            given |= {"model": model, "p": model.pull(), "w": stack.enter_context(model.worker())}
        run(ADDRESSES.sub(shared_cluster.url, text).replace('"…"', '"t"'), given)


def delete(client: ps.Client) -> None:
    """Delete the models that the blocks create."""
    for name in {"demo", "demo2", "demo3"} & set(client.models()):
        client.model(name).delete()


def run(text: str, given: dict[str, Any]) -> None:
    """Run the lines; those that await run in an event loop."""
    code = compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, given)
    if inspect.iscoroutine(result):
        asyncio.run(result)

"""What a newcomer is likely to write, and what the client says to write instead."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import paramserver as ps
from paramserver.client.cluster import Cluster, model_path
from paramserver.client.control import request, run_path
from paramserver.client.gradients import prepare
from paramserver.client.membership import Membership
from paramserver.client.spec_builder import model_document
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.net.addresses import urls_of
from paramserver.net.calls import Deadline

LAYOUT = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [4]}}}))
MASKED: Any = np.ma.masked_equal(np.arange(4.0), 3.0)


def created(optimizer: Any = None, consistency: Any = None, **of_w: Any) -> None:
    """Build the document of a model with one parameter of these settings."""
    model_document("m", {"w": ps.Param(**{"value": (4,)} | of_w)}, optimizer, consistency, {})


def not_joined() -> Any:
    """Return a worker that has not joined."""
    return ps.Client("http://127.0.0.1:1").model("m").worker()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: created(init="ones"), r'write {"kind": "constant", "value": 1}\)$'),
        (lambda: created(init="random"), r'write {"kind": "normal", "std": 0.02}\)$'),
        (lambda: created(init="glorot_uniform"), r'write "xavier_uniform"\)$'),
        (lambda: created(init="he_normal"), r'write "kaiming_normal"\)$'),
        (
            lambda: created(init=0.5),
            r'"zeros" or {"kind": "constant", "value": 0.5}; an array goes in place of the shape',
        ),
        (lambda: created(init=np.ones(4)), "an array goes in place of the shape"),
        (lambda: created(dtype="fp32"), r'write "float32"\)$'),
        (lambda: created(dtype="bf16"), r'write "bfloat16"\)$'),
        (lambda: created(dtype=np.int32), "dtype: 'int32' is not one of float16, bfloat16, float32, float64"),
        (lambda: created(consistency="synchronous"), r'write "sync"\)$'),
        (lambda: created(consistency="asynchronous"), r'write "async"\)$'),
        (lambda: created(consistency="BSP"), r'write "sync"\)$'),
        (lambda: created(consistency=3), r"\(ps.SSP\(3\), ps.Sync\(\) or"),
        (lambda: created(consistency=ps.Sync(2)), r"quorum: .*, not 2 \(quorum_count is a number of workers\)$"),
        (lambda: created(consistency=ps.Sync(0.5, quorum_count=2)), r"quorum: .* beside quorum_count \(.* null\)$"),
        (lambda: created(optimizer=0.1), r"\(ps.Adam\(lr=1e-3\) or"),
        (lambda: created(optimizer=ps.SGD(schedule=cast(Any, "cosine"))), r"schedule: .* ps.Cosine\(t_max=1000\)"),
        (lambda: created(optimizer=ps.SGD(schedule=cast(Any, ps.Cosine))), r"schedule: .* ps.Cosine\(t_max=1000\)"),
        (
            lambda: cast(Any, ps.SGD)(**{"momentum": "0.9"}),
            r"SGD takes lr and by name schedule, .*; not momentum \(.* of ps.Momentum, ps.Nesterov, ",
        ),
        (lambda: cast(Any, ps.SGD)(0.1, 0.9), r"SGD takes lr and by name .*; not 0.9 without a name$"),
        (
            lambda: cast(Any, ps.Momentum)(0.1, 0.9, 0.5),
            r"Momentum takes lr and by name .*; not 0.9",
        ),
        (
            lambda: not_joined().step({}, wieght=0.5),
            r"no option wieght= \(did you mean weight=\? .*report",
        ),
        (
            lambda: not_joined().step({}, wait_s=5),
            r"no option wait_s= \(pull\(\), push\(\) and clock\(\) have all options",
        ),
        (
            lambda: not_joined().exchange({}, rows={"w": [1]}),
            r"no option rows= \(exchange\(\) is of the whole model: step\(\.\.\., rows=\.\.\.\), then pull",
        ),
        (lambda: setattr(not_joined(), "state", [1]), r"the state of a worker is a dict of JSON values, not \[1\]$"),
        (lambda: cast(Any, ps.Cosine)(100), "Cosine takes by name warmup, t_max, eta_min; not 100 without a name$"),
        (lambda: cast(Any, ps.Sync)(staleness=3), r"Sync takes quorum and .*; not staleness \(.* of ps.SSP\)$"),
        (lambda: model_document("m", {"l": {"w": np.ones(4)}}, None, None, {}), r"params.l: .*{'l.w': array}\)$"),
        (lambda: prepare(LAYOUT, {"w": MASKED}), r"'w' has masked elements .*filled\(0\)"),
        (lambda: prepare(LAYOUT, MASKED), r"the flat gradient has masked elements .*filled\(0\)"),
        (lambda: model_document("m", {"w": MASKED}, None, None, {}), r"'w' has masked elements .*filled\(0\)"),
        (lambda: prepare(LAYOUT, cast(Any, [np.ones(4)])), r"arrays by name.*push\({'w': array}\)"),
        (
            lambda: Membership(Cluster(("http://a:1",)), "m", cast(Any, 1), None, 1.0),
            r"text, not 1 \(rank=1 sets its rank",
        ),
        (lambda: next(request("GET", "models", None, Deadline.after(1))), "'models' is not a path .*/models"),
        (lambda: urls_of("8700", {}), "http://127.0.0.1:8700"),
        (lambda: run_path(cast(Any, {"id": "run-1"})), r"a name is text, not {.id.: .run-1.} \(run\[.id.\] of"),
        (lambda: model_path("m", "checkpoints", cast(Any, 3)), "a name is text, not 3$"),
        (lambda: created(optimizer=ps.Cosine(t_max=5)), r"optimizer: .*, not Cosine\(.*ps.Adam\(lr=1e-3\)"),
        (lambda: created(consistency=ps.Adam()), r"consistency: .*, not Adam\(.*ps.Sync\(\)"),
        (lambda: not_joined().evaluate({"accuracy": 0.9}), r"a function .*, not {'accuracy': 0.9} \(w.evaluate"),
    ],
)
def test_a_likely_mistake_is_told_with_what_to_write(call: Callable[[], Any], says: str) -> None:
    """What a newcomer is likely to write instead of the right argument is refused with what to write."""
    with pytest.raises(ps.RequestError, match=says):
        call()


@pytest.mark.parametrize("client", [ps.connect, ps.Client, ps.AsyncClient])
def test_a_token_without_its_name_is_not_printed(client: Any) -> None:
    """Only the URL goes without a name: a token in second place would be taken for the timeout, and be in the error."""
    with pytest.raises(TypeError, match="positional") as e:
        client("http://127.0.0.1:9", "sesame")
    assert "sesame" not in str(e.value)


def test_several_mistakes_are_told_with_the_hint_of_the_first() -> None:
    """An error that lists several says what to write instead of the first one that it spells out."""
    ones = ps.Param((4,), init="ones")
    with pytest.raises(ps.RequestError, match=r'2 parts .* params.a.init.kind.*write {"kind": "constant", "value": 1}'):
        model_document("m", {"a": ones, "b": ones}, None, None, {})


def test_most_names_are_metrics() -> None:
    """Metrics of `step` may have names that options of other calls have in other libraries, such as lr."""
    told = {"lr": 0.1, "val_loss": 1.0, "losses": 2.0, "weights_norm": 3.0, "time": 4.0, "accuracy": 0.5, "d_loss": 0.1}
    assert not_joined()._metrics(told) == told

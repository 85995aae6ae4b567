"""Names, creating a model that exists already, and how long the upload of a new one's values may take."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import RequestError

from .scheduling import SPEC, Driver

NAMED: dict[str, Callable[[int, Any], io.Event]] = {
    "shard": lambda n, name: io.JoinShard(n, name, ["http://s9:1"]),
    "pool member": lambda n, name: io.JoinPool(n, name),
    "run": lambda n, name: io.CreateRun(n, "m", "package.module:function", name),
    "checkpoint": lambda n, name: io.RequestCheckpoint(n, "m", name),
}


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "ä", "a" * 65, 3])
@pytest.mark.parametrize("what", NAMED)
def test_a_name_that_is_not_allowed_is_refused_with_what_is(what: str, name: Any) -> None:
    """A shard, a pool member, a run or a checkpoint of a name that is not allowed is told what a name may be."""
    d = Driver.with_model()
    with refused_with("invalid_field", RequestError, match=r"^name: .* is not allowed.*letters, digits"):
        d.ask(lambda n: NAMED[what](n, name))


def test_a_model_whose_settings_have_changed_is_the_same_to_who_creates_it_again() -> None:
    """Who creates it again names the spec as created, and gets the settings in force; that with those is another."""
    d = Driver.with_model()
    d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}))

    for _ in range(2):
        again = d.send(lambda n: io.CreateModel(n, SPEC, "x"))
        assert d.statuses[again] == 200
        assert d.result(again)["spec"]["optimizer"]["lr"] == 0.5
        patched = SPEC | {"optimizer": {"name": "sgd", "lr": 0.5}}
        with refused_with("model_exists", match=r"optimizer\.lr is 0\.001, not 0\.5"):
            d.ask(lambda n, s=patched: io.CreateModel(n, s, "x"))  # type: ignore[misc]
        d.restart()
        d.beats()


def test_an_upload_lasts_as_long_as_values_keep_coming() -> None:
    """Each value that quotes the upload token renews it: another client gets one only once none has come for 60 s."""
    params: dict[str, Any] = {name: {"shape": [4], "init": {"kind": "upload"}} for name in "abcd"}
    d = Driver()
    d.model(params=params, partitions=2)

    def granted() -> bool:
        other = d.send(lambda n: io.CreateModel(n, SPEC | {"params": params, "partitions": 2}, "another's"))
        return "upload_token" in d.result(other)

    for name in "abc":
        d.wait(limits.UPLOAD_TOKEN_S - 1)
        assert not granted()
        d.ask(lambda n, p=name: io.ParameterUploaded(n, "m", p, "secret", d.given()))  # type: ignore[misc]
        assert not granted()
    d.wait(limits.UPLOAD_TOKEN_S)
    assert granted()

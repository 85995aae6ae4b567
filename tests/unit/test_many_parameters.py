"""What one parameter of a model of thousands costs: nothing that grows with the others, which are not looked at."""

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from paramserver.core.layout import Layout
from paramserver.core.scheduler import io
from paramserver.core.selection import select
from paramserver.core.spec import ModelSpec
from paramserver.errors import ConflictError, NotFoundError

from .scheduling import Driver

UPLOADED = {"shape": [4], "init": {"kind": "upload"}}


class Unwalked(tuple[Any, ...]):
    """Parameters that nobody may go through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all parameters are looked at")


class UnwalkedNames(dict[str, Any]):
    """Parameters by name that nobody may go through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all parameters are looked at")


def test_one_parameter_is_selected_without_a_look_at_the_others() -> None:
    """A selection of one parameter, whole or in part, goes through no others; of several it keeps the model's order."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {f"p{i}": {"shape": [4]} for i in range(9)}}))
    assert select(layout).size == 36
    vars(layout)["by_name"] = UnwalkedNames(layout.by_name)
    object.__setattr__(layout, "spec", replace(layout.spec, params=Unwalked(layout.spec.params)))

    found = select(layout, ["p7", "p2"], {"p3": [(1, 2)]})

    assert [(p.name, found.shape(i)) for i, p in enumerate(found.params)] == [("p2", (4,)), ("p3", (1,)), ("p7", (4,))]
    assert [part.ranges.tolist() for part in found.parts if part.ranges is not None] == [[[8, 12], [13, 14], [28, 32]]]


@pytest.mark.parametrize("names", [["b", "a"], "*", ["a", "?"]])
def test_naming_all_parameters_is_the_selection_of_the_whole_model(names: list[str] | str) -> None:
    """A gradient or pull that names every parameter, in any way, takes the selection that is already made."""
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"a": {"shape": [4]}, "b": {"shape": [2]}}}))

    assert select(layout, names) is select(layout)
    assert select(layout, names, {"a": [(0, 4)]}).shape(0) == (4,)
    assert select(layout, names, {"a": [(1, 3)]}).size == 4


def test_one_upload_is_noted_without_a_look_at_the_others() -> None:
    """What an uploaded parameter costs the scheduler, and the size of its answer, do not grow with the others."""
    d = Driver()
    d.model(params={f"p{i}": UPLOADED for i in range(9)})
    model = d.core._c.models["m"]
    assert len(model.layout.by_name) == 9
    model.spec = replace(model.spec, params=Unwalked(model.spec.params))

    assert d.ask(lambda n: io.ParameterUploaded(n, "m", "p3", "secret", d.given())) is None
    with pytest.raises(NotFoundError):
        d.ask(lambda n: io.ParameterUploaded(n, "m", "p9", "secret", d.given()))
    with pytest.raises(ConflictError):
        d.ask(lambda n: io.ParameterUploaded(n, "m", "p4", "wrong", d.given()))
    assert "p3" not in model.initial.missing
    assert "p4" in model.initial.missing

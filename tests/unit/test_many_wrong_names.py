"""Bounds on error reports: a request with very many errors costs a node little, and its response stays short."""

import difflib
import fnmatch
from typing import Any

import pytest

from paramserver import limits
from paramserver.core import near
from paramserver.core.layout import Layout
from paramserver.core.scheduler.runs import StopRule
from paramserver.core.selection import matched, select
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, RequestError, combined, problem
from paramserver_scheduler import bodies


def model(count: int) -> ModelSpec:
    names = [f"p{i:04}_" + f"layer.{i}.weight_" * 8 for i in range(count)]
    return ModelSpec.parse({"name": "m", "params": {n: {"shape": [1]} for n in names}, "partitions": 1})


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of names that each call of difflib compares."""
    calls: list[int] = []
    original = difflib.get_close_matches

    def counted(word: str, names: list[str], n: int) -> list[str]:
        calls.append(len(names))
        return original(word, names, n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    return calls


def refused(call: Any) -> PsError:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


def test_a_list_of_errors_says_how_many_more_there_are() -> None:
    """A combined error lists 32 errors, its last entry counts the others, and its text has the first three."""
    error = combined([problem("invalid_field", f"f{i}: is wrong", where=f"f{i}") for i in range(100)])

    assert [e.get("where") for e in error.errors[:-1]] == [f"f{i}" for i in range(32)]
    assert error.errors[-1] == {"code": "invalid_field", "detail": "and 68 more"}
    assert error.detail == "100 parts of the request are wrong: f0: is wrong; f1: is wrong; f2: is wrong; ..."
    two = combined([problem("invalid_field", f"f{i}: is wrong") for i in range(2)])
    assert two.detail == "2 parts of the request are wrong: f0: is wrong; f1: is wrong"


def test_near_names_are_looked_for_at_a_bounded_cost(compared: list[int]) -> None:
    """Of 4,096 wrong names only the first few get a hint, for which only a few of 4,096 names are compared."""
    layout = Layout(model(4096))
    wrong = [name.replace("weight", "weihgt") for name in layout.by_name]

    error = refused(lambda: matched(layout, wrong))

    assert error.code == "unknown_parameter"
    assert len(error.errors) == 33
    assert len(compared) <= limits.HINTS_MAX
    assert max(compared) <= near.NEAR_MAX
    assert refused(lambda: matched(layout, wrong[7:8])).hint == f"did you mean '{list(layout.by_name)[7]}'?"


def test_unknown_fields_of_a_spec_are_counted_up_to_a_bound(compared: list[int]) -> None:
    """An object with too many fields is refused by their number, and a spec is checked only up to 1024 errors."""
    body = {"name": "x", "params": {"w": {"shape": [1]}}}
    wrong = {f"field{i}": 1 for i in range(26)}

    assert refused(lambda: ModelSpec.parse(body | {f"{i:x}": 1 for i in range(300_000)})).code == "too_large"
    error = refused(
        lambda: ModelSpec.parse({"name": "x", "params": {f"p{i}": {"shape": [1]} | wrong for i in range(4096)}})
    )

    assert error.detail.startswith("at least 1024 parts")
    assert len(error.errors) == 33
    assert 0 < len(compared) <= limits.HINTS_MAX
    assert refused(lambda: StopRule.check({f"{i:x}": 1 for i in range(300_000)})).code == "too_large"


def test_a_long_value_is_shown_in_part() -> None:
    """An error about a name and a value of a megabyte each quotes only a part of them."""
    error = refused(lambda: ModelSpec.parse({"name": "x", "params": {"n" * (1 << 20): {"shape": "a" * (1 << 20)}}}))

    assert len(str(error.document())) < 4096


def test_patterns_and_names_are_compared_within_a_bound() -> None:
    """Equal patterns count once, and too many different patterns for a large model are refused."""
    layout = Layout(model(4096))

    assert len(matched(layout, ["p*"] * 4096)) == 4096
    assert refused(lambda: matched(layout, [f"p{i}*" for i in range(4096)])).code == "too_large"
    few = Layout(model(8))
    assert len(matched(few, [f"p{i % 8:04}*{'*' * (i // 8)}" for i in range(limits.PATTERNS_MAX)])) == 8
    assert refused(lambda: matched(few, [f"p{i}*" for i in range(limits.PATTERNS_MAX + 1)])).code == "too_large"


def test_patterns_are_compiled_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 long patterns, each slow to compile, none is; those of a request have 8,192 characters at most."""
    one, compiled, translate = Layout(model(1)), list[str](), fnmatch.translate

    def counted(pattern: str) -> str:
        compiled.append(pattern)
        return translate(pattern)

    monkeypatch.setattr(fnmatch, "translate", counted)
    long = [f"{i:04}" + "*a" * 126 for i in range(4096)]

    assert refused(lambda: matched(one, long)).code == "too_large"
    assert refused(lambda: matched(one, long[:33])).code == "too_large"
    assert not compiled
    assert refused(lambda: matched(one, long[:32])).code == "unknown_parameter"
    assert len(compiled) == 32


def test_patterns_that_were_used_are_forgotten() -> None:
    """No cache of the standard library keeps the patterns of clients; one for 32,768 would take 250 MB."""
    before = fnmatch._compile_pattern.cache_info().currsize  # type: ignore[attr-defined]
    one = Layout(model(1))

    assert matched(one, ["p0000*", "p?000_*", "[p]*"]) == list(one.by_name)
    assert fnmatch._compile_pattern.cache_info().currsize == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["p*", "p0000", "?" * 10_000])
def test_ranges_are_of_a_parameter_not_of_a_pattern(name: str) -> None:
    """Ranges of a pattern are refused like those of any name that the model lacks; they had no effect."""
    assert refused(lambda: select(Layout(model(8)), ranges={name: [(0, 1)]})).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("body", "listed"),
    [
        ({"holding": [1] * 100_000, "worker": "w", "epoch": 1}, 0),
        ({"worker": "w", "epoch": 1} | {f"f{i}": 1 for i in range(4000)}, 33),
    ],
)
def test_wrong_bodies_of_control_routes_are_told_in_part(
    body: dict[str, Any], listed: int, compared: list[int]
) -> None:
    """The error for a control body lists 32 unknown fields, with hints for a few, or the first of many wrong items."""
    error = refused(lambda: bodies.check(bodies.Lease, body))

    assert error.code == "invalid_field"
    assert len(error.errors) == listed
    assert len(compared) <= limits.HINTS_MAX


def test_a_control_body_of_too_many_fields_is_refused_by_their_number() -> None:
    """A control body with too many fields is refused by their number alone."""
    assert refused(lambda: bodies.check(bodies.Lease, {f"{i:x}": 1 for i in range(300_000)})).code == "too_large"

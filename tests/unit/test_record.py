"""Records: the immutable values that the core passes around."""

import dataclasses
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import msgspec
import pytest

import paramserver.core
from paramserver.types import ModelKey, PartitionKey, PushId


def test_a_record_is_a_value_that_does_not_change() -> None:
    """Records with equal fields, nested or not, are equal and the same dictionary key, and no field can be changed."""
    key = PartitionKey(ModelKey("m", 1), 2)
    assert {key: "here"}[PartitionKey(ModelKey("m", 1), 2)] == "here"
    assert key != PartitionKey(ModelKey("m", 2), 2)
    assert not hasattr(PushId("w", 1, 1), "__dict__")
    with pytest.raises(AttributeError):
        key.index = 3  # type: ignore[misc]


def records(of: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yield every direct and indirect subclass of that record class."""
    for cls in of.__subclasses__():
        yield cls
        yield from records(cls)


def test_every_record_is_frozen_and_has_defaults_of_its_own_kind() -> None:
    """Every record is frozen, and no default is a `dataclasses.field(...)`.

    Msgspec would take that object for the default itself; neither msgspec nor mypy reports it.
    """
    for module in pkgutil.walk_packages(paramserver.core.__path__, "paramserver.core."):
        import_module(module.name)
    ours = [cls for cls in records(msgspec.Struct) if cls.__module__.startswith("paramserver")]

    assert len(ours) > 90
    for cls in ours:
        assert cls.__struct_config__.frozen, cls
        for field in msgspec.structs.fields(cls):
            assert not isinstance(field.default, dataclasses.Field), (cls, field.name)

"""Records: what the core passes around."""

from typing import TYPE_CHECKING

from paramserver.types import ModelKey, PartitionKey, PushId


def test_a_record_is_a_value_that_type_checkers_refuse_to_change() -> None:
    """Records of equal fields are equal and one key of a dictionary, also within each other; nothing can be added."""
    key = PartitionKey(ModelKey("m", 1), 2)
    assert {key: "here"}[PartitionKey(ModelKey("m", 1), 2)] == "here"
    assert key != PartitionKey(ModelKey("m", 2), 2)
    assert not hasattr(PushId("w", 1, 1), "__dict__")
    if TYPE_CHECKING:
        key.index = 3  # type: ignore[misc]  # which mypy would call unused if it let this pass

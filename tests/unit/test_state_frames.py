"""Frames between nodes that carry whole partitions: what they spell out, the size of their bodies, what is read."""

import msgpack
import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.partition_state import PartitionState
from paramserver.errors import RequestError
from paramserver.wire.frame import decode_header, encode_header
from paramserver.wire.state import SetFrame, SetPart, StateFrame, restore_frame

STATE = StateFrame("m", 4, 2, 7, 5, 3, 2, (6, 1), ("exp_avg", "exp_avg_sq"))
VALUES = np.arange(9, dtype=np.float32)
HELD = PartitionState(VALUES[:3], (VALUES[3:6], VALUES[6:]), (6, 1))


def test_a_state_frame_spells_out_what_a_partition_is() -> None:
    """The header of a state names its kind and every field, and is read back as it was."""
    data = encode_header(STATE)

    assert msgpack.unpackb(data[8 : 8 + int.from_bytes(data[4:8], "little")]) == {
        "kind": "state", "model": "m", "generation": 4, "partition": 2, "version": 7, "clock": 5, "size": 3,
        "slots": 2, "steps": [6, 1], "names": ["exp_avg", "exp_avg_sq"],
    }  # fmt: skip
    assert decode_header(data, StateFrame)[0] == STATE


def test_a_state_is_read_as_values_and_then_slots() -> None:
    """The body of a state is its values and each slot, float32, end to end; a body of another length is refused."""
    state = STATE.read(VALUES.tobytes())

    assert STATE.body_bytes() == 36
    one, bare = (StateFrame("m", 4, 2, 7, 5, 4, slots, (6,), ("momentum_buffer",)[:slots]) for slots in (1, 0))
    assert [a.tolist() for a in one.read(VALUES[:8].tobytes()).slots] == [[4, 5, 6, 7]]
    assert bare.read(VALUES[:4].tobytes()).slots == ()
    assert [a.tolist() for a in (state.values, *state.slots)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert state.steps == (6, 1)
    for wrong in (VALUES.tobytes()[:-1], VALUES.tobytes() + b"\0", b""):
        with pytest.raises(RequestError, match=f"the body has {len(wrong)} bytes, not 36"):
            STATE.read(wrong)


def test_slots_of_the_same_optimizer_are_kept() -> None:
    """A state keeps slots and step counts if the optimizer has the same slots."""
    assert STATE.fitting(HELD, OptimizerSpec("adam")) is HELD


def test_slots_of_another_optimizer_are_left_out() -> None:
    """A state of another optimizer keeps its values alone: it has no slots, and counts no step of any segment."""
    fitting = STATE.fitting(HELD, OptimizerSpec("sgd"))

    assert (fitting.values is HELD.values, fitting.slots, fitting.steps) == (True, (), (0, 0))


def test_a_restored_state_is_written_as_it_is_read() -> None:
    """The frame that restores a state names it whole, and its arrays are the body of that state."""
    frame, arrays = restore_frame("m", 4, 2, HELD, ("exp_avg", "exp_avg_sq"), 7, timeline=3)
    data = encode_header(frame)

    assert msgpack.unpackb(data[8 : 8 + int.from_bytes(data[4:8], "little")]) == {
        "kind": "set", "model": "m", "generation": 4, "restore": True, "timeline": 3,
        "slot_names": ["exp_avg", "exp_avg_sq"],
        "first": False, "term": None,
        "parts": [{
            "partition": 2, "count": 3, "ranges": None, "dtype": "float32", "size": 3, "slots": 2, "steps": [6, 1],
            "expected": None, "version": 7,
        }],
    }  # fmt: skip
    assert decode_header(data, SetFrame)[0] == frame
    assert b"".join(a.tobytes() for a in arrays) == VALUES.tobytes()
    assert frame.body_bytes() == 36
    assert restore_frame("m", 4, 2, HELD, (), 7)[0].timeline is None


def test_a_set_frame_has_a_body_for_each_of_its_parts() -> None:
    """The body of an assignment is, for each part, its elements in the part's dtype, then its slots in float32."""
    frame = SetFrame("m", 4, (SetPart(0, 5, dtype="float16"), SetPart(1, 3, dtype="float64", size=7, slots=2)))

    assert [p.body_bytes() for p in frame.parts] == [10, 24 + 56]
    assert frame.body_bytes() == 90


def test_an_assignment_changes_no_more_than_it_says() -> None:
    """A part that says nothing else keeps slots and steps, expects no version, and may leave the version as it is."""
    data = encode_header({"kind": "set", "model": "m", "generation": 4, "parts": [{"partition": 0, "count": 5}]})
    frame, _ = decode_header(data, SetFrame)

    assert (frame.restore, frame.timeline) == (False, None)
    assert frame.parts == (SetPart(0, 5, None, "float32", 0, 0, None, None, 0),)


@pytest.mark.parametrize("number", [{"version": -1}, {"version": limits.VERSION_MAX + 1}, {"slots": 9}])
def test_a_number_that_cannot_be_is_refused(number: dict[str, int]) -> None:
    """An assignment cannot ask for a version below 0 or above the highest, or bring more slots than any optimizer."""
    part = {"partition": 0, "count": 5, **number}
    with pytest.raises(RequestError, match="frame header"):
        decode_header(encode_header({"kind": "set", "model": "m", "generation": 4, "parts": [part]}), SetFrame)


@pytest.mark.parametrize("ranges", [[], [[3, 3]], [[3, 5], [4, 6]], [[4, 6], [1, 2]]])
def test_ranges_out_of_order_are_refused(ranges: list[list[int]]) -> None:
    """An assignment to no range, an empty one, or ranges that are not sorted and disjoint is refused as it is read."""
    part = {"partition": 0, "count": 5, "ranges": ranges}
    with refused_with("invalid_range"):
        decode_header(encode_header({"kind": "set", "model": "m", "generation": 4, "parts": [part]}), SetFrame)

"""Which parts of a push in pieces go out when."""

import numpy as np
import pytest

from paramserver.client.streaming import BUCKET_BYTES, Pieces
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import NotFoundError, RequestError


def layout(partitions: int, **sizes: int) -> Layout:
    """Of one-dimensional parameters."""
    params = {name: {"shape": [size]} for name, size in sizes.items()}
    return Layout(ModelSpec.parse({"name": "m", "params": params, "partitions": partitions}))


def test_a_partition_goes_out_when_all_of_it_is_here() -> None:
    """One that two parameters share waits for both; what lies whole in one parameter does not."""
    pieces = Pieces(layout(4, a=60, b=40))  # partition 2 is [48, 75) or so: the end of a and the beginning of b
    shared = [i for i, names in enumerate(pieces._missing) if names == {"a", "b"}]
    assert len(shared) == 1

    pieces.put("b", np.ones(40))
    first = pieces.take()
    assert first
    assert not first & set(shared)
    assert pieces.names(first) == ["b"]
    assert pieces.rest() == frozenset(shared)
    pieces.put("a", np.ones(60))
    assert pieces.take() == frozenset(range(4)) - first
    assert pieces.take() == pieces.rest() == frozenset()


def test_the_first_layers_overtake_what_waits() -> None:
    """Of all that is whole the lowest partitions are sent first, a bucket at a time."""
    elements = BUCKET_BYTES // 4
    pieces = Pieces(layout(3, first=elements, second=elements, third=elements))
    for name in ("third", "second"):
        pieces.put(name, None)
    assert pieces.take() == {1}
    pieces.put("first", None)

    assert [pieces.take() for _ in range(3)] == [{0}, {2}, frozenset()]


def test_small_partitions_travel_together() -> None:
    """Many of them make one bucket."""
    pieces = Pieces(layout(16, w=1600))
    pieces.put("w", None)

    assert pieces.take() == frozenset(range(16))


def test_a_wrong_name_and_a_second_gradient_are_refused() -> None:
    """With the nearest name there is; nothing is changed by it."""
    pieces = Pieces(layout(2, weight=10, bias=10))
    with pytest.raises(NotFoundError, match="did you mean 'weight'"):
        pieces.put("weigth", None)
    pieces.put("weight", 1)
    with pytest.raises(RequestError, match="already"):
        pieces.put("weight", 2)

    assert pieces.grads == {"weight": 1}

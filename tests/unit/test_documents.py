"""Checks of JSON values that are stored for clients."""

from typing import Any

import pytest

from paramserver.core.scheduler.documents import TEXT_MAX, check_document
from paramserver.errors import RequestError


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: [s], lambda s: {"k": [1, s]}, lambda s: {s: 1}])
def test_text_is_bounded_wherever_it_stands(wrap: Any) -> None:
    """A value with text beyond the limit is refused wherever the text is, including a dict key."""
    check_document([1, "x" * (TEXT_MAX - 1), "y"], "state")
    with pytest.raises(RequestError, match="state: is too large"):
        check_document(wrap("x" * (TEXT_MAX + 1)), "state")

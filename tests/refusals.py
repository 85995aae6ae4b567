"""What must be refused, and with which code."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paramserver.errors import PsError


@contextmanager
def refused_with(code: str, kind: type[PsError] = PsError, match: str | None = None) -> Iterator[None]:
    """Fail unless the block raises an error of this kind, code and, if given, text (see `pytest.raises`)."""
    with pytest.raises(kind, match=match) as refused:
        yield
    assert refused.value.code == code

"""docs/errors.md lists the same errors as the code."""

import re
from pathlib import Path

from paramserver.errors import CODES

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_page_lists_every_code_as_the_code_has_it() -> None:
    """docs/errors.md and errors.CODES agree on each code, its status, class and whether to retry."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w ]+) \| `(\w+)` \| [^|]+ \| (yes|no) \| [^|]{10,} \|$", PAGE.read_text(), re.M
    )

    listed = {code: (status, cls, retry) for code, status, cls, retry in rows}
    client_only = ("unreachable",)
    assert listed == {
        code: (
            "client only" if code in client_only else str(info.status),
            info.cls.__name__,
            "yes" if info.retryable else "no",
        )
        for code, info in CODES.items()
    }

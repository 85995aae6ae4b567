"""The URLs of a cluster's schedulers: those a client was given, and those the cluster has named since.

A scheduler's answers name all schedulers that run.  They are believed only where the URL that answered is among them:
behind a tunnel, a published port or a proxy the names that hold inside the cluster may be somebody else's out here.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from paramserver.client.calls import Outcome, Response
from paramserver.errors import InDoubt, Unreachable, problem

SCHEDULERS: Final = "x-paramserver-schedulers"
"""On a scheduler's answers: the URLs of all schedulers that run, where there are several."""
NAMED_MAX: Final = 16


class Addresses:
    """Which URLs there are to ask, and which of them answered last.  Its fields are replaced, never half changed.

    Raises RequestError (`malformed`) for a URL that nobody can be at.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(map(_checked, given))
        self._named: tuple[str, ...] = ()
        self._first = self.given[0] if given else ""

    def order(self) -> list[str]:
        """Each URL once, beginning with the one that answered last; those given before those named."""
        urls = [self._first, *self.given, *self._named]
        return list(dict.fromkeys(u for u in urls if u))

    def heard(self, url: str, outcome: Outcome) -> bool:
        """Take note of what `url` answered; whether another URL may do better.

        That is so where nobody was there or the node knew no leader, not where the request may have been done.
        """
        if isinstance(outcome, Response):
            self._learn(url, outcome.headers.get(SCHEDULERS, ""))
            if _knows_no_leader(outcome):
                return True
        elif isinstance(outcome, Unreachable):
            return True
        if not isinstance(outcome, InDoubt):
            self._first = url
        else:  # one that fell silent may stay so: the next request begins with another
            order = self.order()
            at = order.index(url) if url in order else -1  # another thread may have heard that it is none any more
            self._first = order[(at + 1) % len(order)]
        return False

    def _learn(self, url: str, header: str) -> None:
        if header:
            self._named = named(url, header) or self._named


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        wrong = "" if parts.hostname and parts.port != 0 else "it names no host, or port 0"
    except ValueError as e:
        wrong = str(e)
    if wrong:
        raise problem(
            "malformed", f"'{url}' is not a URL of a cluster: {wrong}", hint="something like http://host:8700"
        )
    return url


def named(url: str, header: str) -> tuple[str, ...]:
    """The URLs that `url` named in its answer; none where it is not among them itself."""
    found = tuple(u.strip().rstrip("/") for u in header.split(",")[:NAMED_MAX])
    scheme = urlsplit(url).scheme
    if _place(url) not in map(_place, found):
        return ()
    return tuple(u for u in found if u.startswith(f"{scheme}://"))


def _knows_no_leader(response: Response) -> bool:
    """Whether this node, or something before it, could not pass the request on to a leader."""
    if response.status not in (502, 503, 504):
        return False
    ours = response.headers.get("content-type", "").startswith("application/problem+json")
    return not ours or b'"no_leader"' in response.body or b'"unavailable"' in response.body


def _place(url: str) -> tuple[str, int | None]:
    """Host and port, so that the names of this machine are one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return url, None
    return "127.0.0.1" if host == "localhost" else host, port

"""The URLs of a cluster's schedulers: those a client was given, and those the cluster has announced since.

A scheduler's responses list all running schedulers.  The list is used only if it contains the URL that answered: behind
a tunnel, a published port or a proxy, a name that is valid inside the cluster may be somebody else's host out here.
"""

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from paramserver.core.urls import DEFAULT_URL, is_node_url, listed_urls
from paramserver.errors import InDoubt, Unavailable, problem
from paramserver.net.calls import Outcome, Response, TakenTooSlowly, is_gateway_failure, is_problem

ENV_URL: Final = "PARAMSERVER_URL"
SCHEDULERS: Final = "x-paramserver-schedulers"
"""Response header with the URLs of all running schedulers, sent where there are several."""
NAMED_MAX: Final = 16


def urls_of(url: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the comma-separated base URLs in `url`, else in PARAMSERVER_URL, else the default.

    Raises RequestError (`malformed`) if there is none, or one that cannot be a cluster's.
    """
    text = url or environment.get(ENV_URL) or DEFAULT_URL
    if not isinstance(text, str):
        detail = f"the URL of a cluster is text, not {text!r:.60}"
        raise problem("malformed", detail, hint="several are one text, separated by commas")
    urls = tuple(u if "://" in u else f"http://{u}" for u in listed_urls(text))
    for u in urls:
        if (wrong := _wrong_with(u)) is not None:
            raise problem("malformed", f"'{u}' is not a valid cluster URL: {wrong}", hint=f"for example {DEFAULT_URL}")
    urls = tuple(map(_in_ascii, urls))
    if not urls:
        raise problem("malformed", f"'{text}' contains no URL", hint=f"for example {DEFAULT_URL}")
    return urls


def _in_ascii(url: str) -> str:
    """Return the URL as it is sent: other letters of its host in IDNA, those of its path percent-encoded."""
    if url.isascii():
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.encode("idna").decode(), path=quote(parts.path)).geturl()


def _wrong_with(url: str) -> str | None:
    try:
        if "@" in urlsplit(url).netloc:
            return "it has a user name; a cluster takes a token"
        fits = url.startswith(("http://", "https://")) and is_node_url(_in_ascii(url))
    except ValueError:
        fits = False
    return None if fits else "it must be http(s)://HOST:PORT, with a name or IP address and a port from 1 to 65535"


class Addresses:
    """The URLs to try, and which of them answered last.  Fields are replaced, never modified in place."""

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(given)
        self._named: tuple[str, ...] = ()
        self._first = self.given[0] if given else ""

    def order(self) -> list[str]:
        """Return each URL once: the one that answered last, then the given ones, then the announced ones."""
        urls = [self._first, *self.given, *self._named]
        return list(dict.fromkeys(u for u in urls if u))

    def record(self, url: str, outcome: Outcome) -> bool:
        """Record the outcome of a request to `url`; return whether to try the next URL.

        True if the URL was unreachable, or its node refused the request unseen or knew no leader, or somebody else
        refused it in the node's place; False if the request may have been executed, or its time is over.
        """
        silent = InDoubt | TakenTooSlowly
        lost = is_gateway_failure(outcome) if isinstance(outcome, Response) else isinstance(outcome, silent)
        if isinstance(outcome, Response):
            self._learn(url, outcome.headers.get(SCHEDULERS, ""))
            if (_knows_no_leader(outcome) or is_refused_by_others(outcome)) and not lost:
                return True
        elif isinstance(outcome, Unavailable) and not lost:
            return True
        if not lost:
            self._first = url
        else:  # it may stay silent: the next request starts with the following URL
            order = self.order()
            at = order.index(url) if url in order else -1  # another thread may have dropped it
            self._first = order[(at + 1) % len(order)]
        return False

    def _learn(self, url: str, header: str) -> None:
        if header:
            self._named = named(url, header) or self._named


def named(url: str, header: str) -> tuple[str, ...]:
    """Return the URLs in `header` that have the scheme of `url`; none if the header does not list `url` itself."""
    found = tuple(u.strip().rstrip("/") for u in header.split(",")[:NAMED_MAX])
    scheme = urlsplit(url).scheme
    if _place(url) not in map(_place, found):
        return ()
    return tuple(u for u in found if u.startswith(f"{scheme}://"))


def _knows_no_leader(response: Response) -> bool:
    """Whether this node, or a proxy in front of it, had nobody to forward the request to."""
    if response.status != 503:
        return False
    return not is_problem(response) or b'"no_leader"' in response.body or b'"unavailable"' in response.body


def is_refused_by_others(response: Response) -> bool:
    """Whether this is a refusal or redirection that no node has sent: the proxy of this URL has lost its way to one."""
    return 300 <= response.status < 500 and response.status != 304 and not is_problem(response)


def _place(url: str) -> tuple[str, int | None]:
    """Return host and port, with localhost and 127.0.0.1 as the same host."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return url, None
    return "127.0.0.1" if host == "localhost" else host, port

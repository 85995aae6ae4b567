"""Which scheduler a client tries: given and announced URLs, and those after a dead, silent or leaderless one."""

import pytest

from paramserver.errors import problem
from paramserver.net.addresses import SCHEDULERS, Addresses, named
from paramserver.net.calls import Outcome, Response, TakenTooSlowly

A, B = "http://127.0.0.1:8700", "http://127.0.0.1:8798"
PROBLEM = {"content-type": "application/problem+json"}


def answer(names: str = "") -> Response:
    """Return a successful response that announces these schedulers' URLs."""
    return Response(200, {SCHEDULERS: names} if names else {})


def refusal(code: str, status: int = 503) -> Response:
    """Return a response whose body is a problem document with this code."""
    return Response(status, PROBLEM, b'{"code":"%s"}' % code.encode())


def test_the_others_are_learned_from_an_answer() -> None:
    """A client given one URL moves on to one announced in a response when the first becomes unreachable."""
    addresses = Addresses([A])
    assert addresses.order() == [A]
    assert not addresses.record(A, answer(f"{A},{B}"))
    assert addresses.order() == [A, B]
    assert addresses.record(A, problem("unreachable", "refused"))
    assert not addresses.record(B, answer(f"{B}"))
    assert addresses.order() == [B, A]


@pytest.mark.parametrize(
    ("url", "header", "found"),
    [
        (A, f"{A},{B}", (A, B)),
        ("http://localhost:8700", f"{A},{B}", (A, B)),
        ("http://127.0.0.1:9000", f"{A},{B}", ()),  # a tunnel: the URL that answered is not among the announced ones
        ("https://a:8700", "https://a:8700,http://b:8700", ("https://a:8700",)),
        (A, "", ()),
        (A, "http://[", ()),
    ],
)
def test_names_are_believed_of_themselves_only(url: str, header: str, found: tuple[str, ...]) -> None:
    """Announced URLs count only if the one that answered is among them; over https, http URLs are ignored."""
    assert named(url, header) == found


@pytest.mark.parametrize(
    "outcome",
    [problem("in_doubt", "no answer"), TakenTooSlowly("unavailable", "slow"), Response(502, {}), Response(504, {})],
)
def test_one_that_fell_silent_is_not_asked_first_again(outcome: Outcome) -> None:
    """A request in doubt, or without time left, is not sent to the next URL; the next request starts there."""
    addresses = Addresses([A, B])
    assert not addresses.record(A, outcome)
    assert addresses.order() == [B, A]


@pytest.mark.parametrize(
    ("outcome", "further"),
    [
        (refusal("no_leader"), True),
        (refusal("unavailable"), True),
        (Response(503, {"content-type": "text/html"}, b"no server"), True),
        (Response(502, {"content-type": "text/html"}, b"bad gateway"), False),
        (Response(503, {"content-type": "text/plain"}, b"reset reason: connection termination"), False),
        (Response(504, {"content-type": "text/html"}, b"timeout"), False),
        (refusal("storage_unavailable"), False),
        (refusal("in_doubt"), False),
        (refusal("queue_full"), False),
        (refusal("conflict", 409), False),
        (problem("unavailable", "it is going away"), True),
    ],
)
def test_only_a_node_without_a_leader_sends_one_on(outcome: Outcome, further: bool) -> None:
    """A request is sent to the next URL only if the node or proxy that answered has certainly done nothing with it.

    That is so if it had no leader to forward it to, or refused it unseen.
    """
    assert Addresses([A, B]).record(A, outcome) is further


def test_one_that_fell_silent_may_be_forgotten_already() -> None:
    """A timeout at a URL that is no longer announced does not fail: the next request starts with the first URL.

    Another thread may have dropped the URL while this request was waiting.
    """
    addresses = Addresses([A])
    addresses.record(A, answer(f"{A},{B}"))
    addresses.record(A, answer(f"{A}"))
    assert not addresses.record(B, problem("in_doubt", "no answer"))
    assert addresses.order() == [A]

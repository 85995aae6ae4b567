"""Which scheduler a client asks: those given and those named, after one that is dead, silent or without a leader."""

import pytest

from paramserver.client.addresses import SCHEDULERS, Addresses, named
from paramserver.client.calls import Response
from paramserver.errors import problem

A, B = "http://127.0.0.1:8700", "http://127.0.0.1:8798"
PROBLEM = {"content-type": "application/problem+json"}


def answer(names: str = "") -> Response:
    """A good answer that names these schedulers."""
    return Response(200, {SCHEDULERS: names} if names else {})


def refusal(code: str, status: int = 503) -> Response:
    """A problem document of ours."""
    return Response(status, PROBLEM, b'{"code":"%s"}' % code.encode())


def test_the_others_are_learned_from_an_answer() -> None:
    """A client that was given one URL goes on to the other that its answers named when the first is dead."""
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
        ("http://127.0.0.1:9000", f"{A},{B}", ()),  # a tunnel: what it names is not what answers there
        ("https://a:8700", "https://a:8700,http://b:8700", ("https://a:8700",)),
        (A, "", ()),
        (A, "http://[", ()),
    ],
)
def test_names_are_believed_of_themselves_only(url: str, header: str, found: tuple[str, ...]) -> None:
    """An answer's names count where the URL that answered is one of them, and never lead from TLS to none."""
    assert named(url, header) == found


def test_one_that_fell_silent_is_not_asked_first_again() -> None:
    """A request without an answer may have been done, so it is not repeated here; the next one begins elsewhere."""
    addresses = Addresses([A, B])
    assert not addresses.record(A, problem("in_doubt", "no answer"))
    assert addresses.order() == [B, A]


@pytest.mark.parametrize(
    ("outcome", "further"),
    [
        (refusal("no_leader"), True),
        (refusal("unavailable"), True),
        (Response(502, {"content-type": "text/html"}, b"bad gateway"), True),
        (refusal("storage_unavailable"), False),
        (refusal("in_doubt"), False),
        (refusal("queue_full"), False),
        (refusal("conflict", 409), False),
    ],
)
def test_only_a_node_without_a_leader_sends_one_on(outcome: Response, further: bool) -> None:
    """What the leader itself refused, or may have done, is not asked of another at once."""
    assert Addresses([A, B]).record(A, outcome) is further


def test_one_that_fell_silent_may_be_forgotten_already() -> None:
    """Another thread has heard meanwhile that it is no scheduler any more."""
    addresses = Addresses([A])
    addresses.record(A, answer(f"{A},{B}"))
    addresses.record(A, answer(f"{A}"))
    assert not addresses.record(B, problem("in_doubt", "no answer"))
    assert addresses.order() == [A]

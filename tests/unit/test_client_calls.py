"""What calls are made of: requests, deadlines, and what a client makes of answers that are no paramserver's."""

from typing import Any, cast

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.errors import InDoubt, NotFoundError, PsError, RequestError, Unavailable
from paramserver.net.calls import (
    Deadline,
    Request,
    Response,
    Sink,
    error_of,
    json_bytes,
    json_of,
    json_or_none,
    json_request,
)

from .sharding import Now

ASIDE = "is this the address of a paramserver, and does a proxy in front of it leave the path unchanged?"


def answer(status: int, body: bytes = b"", **headers: str) -> Response:
    """Return an answer of a node at http://n:1."""
    return Response(status, {k.replace("_", "-"): v for k, v in headers.items()}, body, "http://n:1")


@pytest.mark.parametrize(
    "body",
    [
        b"<html>not here</html>",
        b"[]",
        b'{"message":"not here"}',
        b'{"code":404,"status":"Failure","message":"not here"}',
    ],
)
def test_a_refusal_that_is_no_paramservers_asks_for_the_address(body: bytes) -> None:
    """A 404 without an error code, as a proxy sends it, is a NotFoundError that quotes it and asks for the address."""
    error = error_of(answer(404, body))

    assert isinstance(error, NotFoundError)
    assert error.detail == f"http://n:1: HTTP 404: {body.decode()!r}"
    assert error.hint == ASIDE


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 520, 524])
def test_a_proxy_that_has_nobody_behind_it_is_asked_again(status: int) -> None:
    """A refusal of a proxy that is temporary, without an error code, is Unavailable, to be retried when it says."""
    error = error_of(answer(status, b"<html>", retry_after="7"))

    assert isinstance(error, Unavailable)
    assert (error.detail, error.retry_after_s) == (f"http://n:1 answered HTTP {status}", 7.0)
    assert error_of(answer(status, b"<html>", retry_after="Wed, 01 Jan 2025 00:00:00 GMT")).retry_after_s == 1.0


@pytest.mark.parametrize(("status", "doubtful"), [(502, True), (503, False), (504, True), (520, True), (524, True)])
def test_what_a_proxy_lost_may_be_done(status: int, doubtful: bool) -> None:
    """502, 504, 520 and 524, which only proxies send, are InDoubt: the node may have done it; 503 is not."""
    error = error_of(answer(status, b"<html>"))

    assert isinstance(error, InDoubt) == doubtful
    assert error.retryable


@pytest.mark.parametrize(
    ("reason", "doubtful"),
    [
        ("reset reason: connection termination", True),
        ("retried and the latest reset reason: remote reset", True),
        ("reset reason: remote connection failure, transport failure reason: delayed connect error: 111", False),
        ("reset reason: overflow", False),
    ],
)
def test_what_envoy_lost_may_be_done(reason: str, doubtful: bool) -> None:
    """Envoy's 503 is InDoubt if the connection to the node ended after the request was sent, not if none was made."""
    error = error_of(answer(503, f"upstream connect error or disconnect/reset before headers. {reason}".encode()))

    assert isinstance(error, InDoubt) == doubtful


def test_a_failure_of_a_proxy_is_no_wrong_address() -> None:
    """A 500 without an error code is `internal`, without a word about the address."""
    error = error_of(answer(500, b"oops"))

    assert (error.code, error.detail, error.hint) == ("internal", "http://n:1 answered HTTP 500", "")


def test_a_redirection_says_where_to() -> None:
    """A redirection is the caller's to follow, as no node sends one: the error names the target."""
    error = error_of(answer(301, b"", location="https://n/"))

    assert (error.code, error.hint) == (
        "malformed",
        "it refers to https://n/: if that is the paramserver, connect to it",
    )


def test_a_refusal_is_what_its_status_says_whatever_the_document_holds() -> None:
    """A document of another service, with our members in other types, is an error of the answer's status."""
    body = (
        b'{"code":"NoSuchKey","status":"error","errors":null,"retry_after_s":"soon","self":"/x","foreign":"x",'
        b'"detail":"no such key"}'
    )

    error = error_of(answer(404, body))

    assert isinstance(error, NotFoundError)
    assert (error.detail, error.errors, error.retry_after_s) == ("no such key", (), None)
    assert error.members == {"self": "/x"}


def test_how_long_to_wait_is_said_by_the_document_before_the_header() -> None:
    """`retry_after_s` of a problem document is finer than the header Retry-After, which counts whole seconds."""
    body = b'{"code":"unavailable","status":503,"detail":"busy","retry_after_s":0.25}'

    assert error_of(answer(503, body, retry_after="1")).retry_after_s == 0.25


@pytest.mark.parametrize(("status", "raises"), [(199, True), (200, False), (299, False), (300, True), (302, True)])
def test_only_an_answer_of_success_has_a_value(status: int, raises: bool) -> None:
    """The value of a 2xx answer is its JSON; any other answer is raised as an error, a redirection too."""
    if raises:
        with pytest.raises(PsError, match=f"HTTP {status}"):
            json_of(answer(status, b"{}"))
    else:
        assert json_of(answer(status, b'{"a":1}')) == {"a": 1}


def test_an_answer_without_a_body_has_no_value() -> None:
    """A 204 has no value where it may come; elsewhere it is somebody else's answer, as is any body that is not JSON."""
    assert json_or_none(answer(204)) is None
    for read, status in ((json_of, 204), (json_or_none, 200)):
        with pytest.raises(PsError, match=f"HTTP {status}"):
            read(answer(status))
    with pytest.raises(PsError) as raised:
        json_of(answer(200, b"<html>" + b"x" * 100))
    assert raised.value.detail == f"http://n:1: HTTP 200: {'<html>' + 'x' * 74!r}"
    assert raised.value.hint == ASIDE


def test_a_request_has_a_body_if_there_is_something_to_say() -> None:
    """A control request without data has no body and no content type; with data, `{}` too, it has both."""
    bare, full = json_request("GET", "/x", timeout_s=3.0), json_request("POST", "/x", {}, timeout_s=4.0)

    assert (bare.body, dict(bare.headers), bare.timeout_s) == (None, {"accept": "application/json"}, 3.0)
    assert (full.body, full.headers["content-type"], full.timeout_s) == (b"{}", "application/json", 4.0)


class Held:
    """A scalar tensor of another library, or one of several elements, which has no single value."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        """Return the value."""
        if len(self.values) > 1:
            raise RuntimeError("holds several values")
        return self.values[0]


def test_arrays_and_scalars_are_sent_as_numbers() -> None:
    """Arrays of NumPy are sent as lists, its scalars and those of tensors as numbers."""
    said: dict[str, Any] = {"a": np.arange(3), "b": np.float32(0.5), "c": Held(2.0), "d": np.array(7)}

    assert json_bytes(said) == b'{"a":[0,1,2],"b":0.5,"c":2.0,"d":7}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), Held(1.0, 2.0), {1}, {(1, 2): 3}])
def test_what_json_cannot_say_is_not_sent(value: Any) -> None:
    """NaN, infinity, sets, tensors of several elements and keys that are no text are refused as `malformed`."""
    with refused_with("malformed", RequestError, match="cannot be sent as JSON"):
        json_bytes({"x": value})


def test_a_deadline_that_has_passed_still_bounds_a_request() -> None:
    """After the deadline no time is left, and a request gets a millisecond: no native timer takes less."""
    now = Now()
    deadline, request = Deadline.after(2.0, now), Request("POST", "/x", b"a", {"h": "v"}, "http://a:1", rest=[])
    now.s += 0.5
    assert deadline.left_s() == 1.5
    assert deadline.bound(request).timeout_s == 1.5
    now.s += 2.0
    assert deadline.left_s() == 0.0
    assert deadline.bound(request).timeout_s == 0.001


def test_a_bounded_request_is_the_same_request() -> None:
    """A request with a deadline keeps all else, its sink too unless it is given another."""
    sink, other = cast(Sink, object()), cast(Sink, object())
    rest = [memoryview(b"bc")]
    request = Request("POST", "/x", b"a", {"h": "v"}, "http://a:1", sink, 30.0, rest)
    bound = Deadline.after(2.0, Now()).bound(request)

    assert bound == Request("POST", "/x", b"a", {"h": "v"}, "http://a:1", sink, 2.0, rest)
    assert Deadline.after(2.0, Now()).bound(request, other).sink is other
    assert bound.whole == b"abc"
    assert Request("POST", "/x", rest=rest).whole == b"bc"
    assert Request("POST", "/x").whole is None

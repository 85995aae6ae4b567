"""Pushes and pulls of the client when shards move, die, refuse or do not answer; no socket is opened."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.refusals import refused_with

import paramserver as ps
from paramserver.client import control, transfer
from paramserver.client.arrays import Params
from paramserver.client.cluster import Cluster
from paramserver.core.selection import select
from paramserver.errors import (
    ConflictError,
    FencedError,
    InDoubt,
    NotFoundError,
    PsError,
    RequestError,
    Unavailable,
    Unreachable,
    problem,
)
from paramserver.net.calls import Deadline, Outcome, Request, Response, TakenTooSlowly
from paramserver.wire.frame import PullReply, encode_header

from .sharding import A, B, Now, Shards, answered, drive, expected, grads, refusal, result, terms


def test_a_lost_answer_is_asked_for_again_without_a_second_step(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push whose answer was lost is sent again with the same push id and norm, and is applied only once.

    The result is not `duplicate`, because only one shard's part was one.
    """
    shards.lost_once("/push")

    done = drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert shards.flat.tolist() == expected().tolist()
    assert not done.duplicate
    assert len({(f.push_id, f.norm) for f in shards.pushes}) == 1


def test_a_moved_partition_is_followed_at_once(shards: Shards, now: Now, cluster: Cluster) -> None:
    """After 421 the client fetches the new map and pushes the refused parts to their new owners without waiting."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.owners, shards.map_epoch = ["b", "b", "a", "b"], 2
    started = now.s

    done = drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert done.version == 1
    assert shards.flat.tolist() == expected().tolist()
    assert now.s == started
    assert sum(path == "/models/m" for _, path in shards.log) == 2


@pytest.mark.parametrize(("owners", "code"), [("baba", "unavailable"), ("bbab", "in_doubt")])
def test_partitions_that_moved_cannot_be_found_without_a_scheduler(
    shards: Shards, now: Now, cluster: Cluster, owners: str, code: str
) -> None:
    """If no scheduler can tell who owns a partition now, a push ends as unavailable; in doubt, if a part was accepted.

    The map is the client's own, so its caller could do nothing about one that is out of date.
    """
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.owners, shards.map_epoch = list(owners), 2

    def headless(request: Request) -> Outcome:
        return problem("unreachable", "cannot reach it") if request.path == "/models/m" else shards(request)

    with refused_with(code, Unavailable, match="said the shard"):
        drive(transfer.push(cluster, "m", Deadline.after(5, now), grads(), terms()), headless, now)


@pytest.mark.parametrize("code", ["unreachable", "unavailable"])
def test_a_silent_shard_may_own_nothing_any_more(code: str, shards: Shards, now: Now, cluster: Cluster) -> None:
    """If a shard cannot be reached, or serves nobody, the client looks for new owners before it tries again.

    The latter, cut off from the scheduler alone, has lost all it had, and cannot join again to learn who owns it.
    """
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.owners, shards.map_epoch = ["b"] * 4, shards.map_epoch + 1
    shards.log.clear()

    def gone(request: Request) -> Outcome:
        if request.to == A:
            shards.log.append((request.to, request.path))
            return problem(code, "nobody there")
        return shards(request)

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), gone, now)

    assert shards.log == [(A, "/push"), (B, "/push"), (None, "/models/m"), (B, "/push")]
    assert shards.flat.tolist() == expected().tolist()


def test_shards_that_do_not_answer_are_reached_by_the_url(
    shards: Shards, now: Now, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """If no shard address answers, a push is one frame without a map epoch to the given URL; one warning is logged."""
    shards.answering = set()

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(1)), shards, now)
    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(2)), shards, now)

    assert [(to, path) for to, path in shards.log if path == "/push"] == [(None, "/push")] * 2
    assert all(f.map_epoch is None and len(f.parts) == 4 for f in shards.pushes)
    assert sum("route.proxied" in r.getMessage() for r in caplog.records) == 1


def test_a_nearer_address_that_was_silent_is_tried_again(
    shards: Shards, now: Now, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent Unix socket of a shard is probed again after 5 s, even though the shard answers over the network.

    On a busy machine a shard may open its socket late.
    """
    near = f"unix://{tmp_path}/socket"
    plain = Shards.document
    monkeypatch.setattr(
        Shards,
        "document",
        lambda self: plain(self) | {"shards": {"a": {"addresses": [A, near]}, "b": {"addresses": [B]}}},
    )
    model_map = drive(cluster.map_of("m", Deadline.after(30, now)), shards, now)
    assert cluster.route(model_map, 0) == A
    shards.answering.add(near)
    now.s += 4.0
    drive(cluster.map_of("m", Deadline.after(30, now)), shards, now)
    assert cluster.route(model_map, 0) == A
    now.s += 2.0
    drive(cluster.map_of("m", Deadline.after(30, now)), shards, now)
    assert cluster.route(model_map, 0) == near


def test_a_shard_that_was_starting_is_found_later(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A shard address that did not answer is probed again later, and then used."""
    shards.answering = {A}
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.answering, now.s = {A, B}, now.s + 10
    shards.log.clear()

    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert {to for to, path in shards.log if path == "/pull"} == {A, B}


@pytest.mark.parametrize(
    "how", [problem("unreachable", ""), problem("in_doubt", ""), TakenTooSlowly("unavailable", "")]
)
def test_a_shard_that_is_cut_off_from_this_client_alone_is_reached_by_the_url(
    shards: Shards, now: Now, cluster: Cluster, how: PsError
) -> None:
    """A live shard that no longer answers this client gets its parts through the cluster, until it answers again."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.answering = {B}

    def cut(request: Request) -> Outcome:
        if request.to == A and A not in shards.answering:
            shards.log.append((A, request.path))
            now.s += request.timeout_s if request.path == "/livez" else 3.0 if isinstance(how, Unreachable) else 10.0
            return how
        return shards(request)

    def pushed_by(seq: int) -> set[str | None]:
        shards.log.clear()
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(seq)), cut, now)
        return {to for to, path in shards.log if path == "/push"}

    assert pushed_by(1) == {A, B, None}
    for seq in range(2, 12):
        assert pushed_by(seq) == {B, None}
        now.s += 31.0
    shards.answering.add(A)
    assert pushed_by(12) == {A, B}
    assert shards.versions == [12] * 4


def test_a_shard_that_once_did_not_answer_is_still_reached_directly(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A failure now and then, or a shard that restarts at its address, does not send values through the cluster."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    for seq in range(1, 5):
        shards.lost_once("/push")
        shards.log.clear()
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(seq)), shards, now)
        assert {to for to, path in shards.log if path == "/push"} == {A, B}
        now.s += 20.0


@pytest.mark.parametrize(("answering", "ends"), [({A, B}, {(2, 1.0)}), ({A}, {None}), (set[str](), {(1, 1.0)})])
def test_shards_wait_for_no_report_of_one_that_gets_its_part_from_another(
    shards: Shards, now: Now, cluster: Cluster, answering: set[str], ends: set[Any]
) -> None:
    """A part that is forwarded ends no iteration, so the shards that got theirs directly must not wait for a commit."""
    shards.answering = answering

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(commit_wait_s=1.0)), shards, now)

    assert {f.ends for f in shards.pushes} == ends


def test_a_busy_shard_is_waited_for_as_long_as_it_says(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push refused with 503 is sent again, but not before the retry time in the answer."""
    started = now.s
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.wrong_once("/push", refusal("loading"))

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert now.s - started >= 0.5
    assert shards.flat.tolist() == expected().tolist()


@pytest.mark.parametrize(
    ("code", "raised"),
    [("rolled_back", FencedError), ("worker_required", ConflictError), ("outside_window", ConflictError)],
)
def test_refusals_are_raised_at_once(
    shards: Shards, now: Now, cluster: Cluster, code: str, raised: type[PsError]
) -> None:
    """A refusal that a retry cannot change is raised at once, with the members of its problem document."""
    for _ in "ab":
        shards.wrong_once("/push", refusal(code, timeline=4))

    with pytest.raises(raised) as e:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert e.value.members["timeline"] == 4


def test_a_read_is_never_in_doubt(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull without an answer by its deadline raises `unavailable`, not `in_doubt`, because it changes nothing."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    silent = problem("in_doubt", "http://a:1 did not answer within 3 s")
    shards.trouble += [lambda r: silent if r.path == "/pull" else None] * 1000

    with refused_with("unavailable", Unavailable, match="did not answer within 3 s"):
        drive(transfer.pull(cluster, "m", Deadline.after(3, now)), shards, now)


def test_the_deadline_ends_a_call_in_doubt(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push with an attempt in doubt raises InDoubt at its deadline, even if later attempts could not connect."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.lost_once("/push")

    def down(request: Request) -> Outcome:
        if any(path == "/push" for _, path in shards.log):
            return problem("unreachable", "cannot reach it")
        return shards(request)

    with pytest.raises(InDoubt):
        drive(transfer.push(cluster, "m", Deadline.after(3, now), grads(), terms()), down, now)


@pytest.mark.parametrize("way", [transfer.push, transfer.pushpull])
def test_a_push_that_some_shards_have_is_in_doubt(shards: Shards, now: Now, cluster: Cluster, way: Any) -> None:
    """A push that one shard accepted raises InDoubt at its deadline, even if the other was never reached.

    Sent again under another push id it would count twice on the first shard.
    """

    def one_is_away(request: Request) -> Outcome:
        away = request.to == B and request.path.startswith("/push")
        return problem("unreachable", "cannot reach it") if away else shards(request)

    with pytest.raises(InDoubt):
        drive(way(cluster, "m", Deadline.after(5, now), grads(), terms()), one_is_away, now)

    assert len(shards.pushes) == 1


@pytest.mark.parametrize("silent", [A, B])
def test_every_reason_of_several_shards_is_told(shards: Shards, now: Now, cluster: Cluster, silent: str) -> None:
    """At the deadline the error is what a shard has answered, and its text also says why the others failed."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    def fail(request: Request) -> Outcome:
        if request.path != "/push":
            return shards(request)
        answer = refusal("storage_unavailable")
        return problem("unreachable", "cannot reach it") if request.to == silent else answer

    with refused_with("storage_unavailable", Unavailable, match=r"said the shard; cannot reach it"):
        drive(transfer.push(cluster, "m", Deadline.after(1, now), grads(), terms()), fail, now)


def test_every_refusal_of_several_shards_is_told(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push that is refused for several reasons raises the first refusal, with the other reasons in its text."""
    said = iter([refusal("non_finite_result", "would hold NaN"), refusal("too_stale", "is too old")])
    shards.trouble += [lambda r: next(said) if r.path == "/push" else None] * 2

    with refused_with("non_finite_result", RequestError, match="would hold NaN; is too old"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)


def test_a_push_that_was_accepted_but_is_not_yet_kept_is_in_doubt(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push raises InDoubt at its deadline if the error answers say that it was applied but not stored yet."""
    done = {"state": "applied", "duplicate": False, "version": 1}

    def not_kept(request: Request) -> Outcome:
        kept = request.path != "/push"
        return shards(request) if kept else refusal("storage_unavailable", push=done)

    with pytest.raises(InDoubt, match="said the shard"):
        drive(transfer.push(cluster, "m", Deadline.after(3, now), grads(), terms()), not_kept, now)


def test_a_push_in_doubt_never_says_to_send_it_again(shards: Shards, now: Now, cluster: Cluster) -> None:
    """The error of a push in doubt does not repeat the advice of a later attempt that certainly changed nothing."""
    harmless = problem("storage_unavailable", "Redis refuses", hint="nothing was changed; send it again")
    outcomes: list[Outcome] = [problem("in_doubt", "the connection broke")]

    with pytest.raises(InDoubt, match="no answer in time: Redis refuses") as e:
        drive(
            transfer.push(cluster, "m", Deadline.after(3, now), grads(), terms()),
            lambda r: shards(r) if r.path != "/push" else outcomes.pop() if outcomes else harmless,
            now,
        )

    assert "again" not in e.value.hint
    assert "an earlier attempt may have been done" in e.value.hint


def asked_for(call: str, cluster: Cluster, deadline: Deadline) -> Any:
    """Return one of the calls other than push and pull."""
    match call:
        case "fetch":
            return control.fetch("/status", deadline)
        case "create":
            return control.create_model(cluster, {"name": "m"}, {}, deadline, control.Creation(), exist_ok=False)
        case "delete":
            return control.delete_model(cluster, "m", None, deadline)
        case "once":
            return control.post_unrepeatable("/runs", {}, deadline)
    return control.send("PATCH", "/models/m", {}, deadline)


@pytest.mark.parametrize(
    ("call", "code"),
    [("fetch", "storage_unavailable"), *((call, "in_doubt") for call in ("create", "delete", "once", "send"))],
)
def test_the_last_answer_is_the_reason_where_the_last_try_is_silent(
    now: Now, cluster: Cluster, call: str, code: str
) -> None:
    """If the last attempt gets no answer, the error gives the last one that came, and how long the call was tried."""
    until = now.s + 10.0

    def answer(request: Request) -> Outcome:
        now.s = min(now.s + 3.0, until)
        silent = problem("in_doubt", "http://given:1 did not answer within 0.9 s")
        return silent if now.s >= until else refusal("storage_unavailable")

    with refused_with(code, Unavailable, match=r"^said the shard; tried for 10 s, the last time for only [\d.]+ s$"):
        drive(asked_for(call, cluster, Deadline(until, now)), answer, now)


def test_a_last_try_that_was_not_cut_short_is_told(now: Now, cluster: Cluster) -> None:
    """A node that is silent for most of the time is told beside what was said before."""
    until, answers = now.s + 10.0, [refusal("storage_unavailable")]

    def answer(request: Request) -> Outcome:
        if answers:
            return answers.pop()
        now.s = until
        return problem("in_doubt", "http://given:1 did not answer within 9.9 s")

    with refused_with("in_doubt", match=r"said the shard; tried for 10 s, at last http://given:1 did not answer"):
        drive(asked_for("send", cluster, Deadline(until, now)), answer, now)


def test_every_attempt_of_a_create_has_the_same_upload_token_and_no_other_call(now: Now, cluster: Cluster) -> None:
    """A call of `create_model` chooses one upload token for all its attempts; another call chooses another."""

    def tokens() -> set[str]:
        sent: list[str] = []

        def answer(request: Request) -> Outcome:
            sent.append(request.headers["x-upload-token"])
            return problem("in_doubt", "the answer was lost") if len(sent) < 3 else refusal("unknown_model")

        with pytest.raises(NotFoundError):
            drive(asked_for("create", cluster, Deadline.after(10.0, now)), answer, now)
        return set(sent)

    assert len(tokens()) == 1
    assert len(tokens() | tokens()) == 2


@pytest.mark.parametrize("before", [refusal("loading", created=True), problem("in_doubt", "the answer was lost")])
@pytest.mark.parametrize("status", [201, 200])
def test_a_creator_that_asks_again_takes_only_its_own_model(
    shards: Shards, now: Now, cluster: Cluster, before: Outcome, status: int
) -> None:
    """After an answer that was lost or came too early, 201 says that the model is the caller's, 200 that it is not."""
    answers = [before, Response(status, {}, json.dumps(shards.document()).encode())]

    def answer(request: Request) -> Outcome:
        return answers.pop(0) if request.path == "/models" else shards(request)

    create = asked_for("create", cluster, Deadline.after(60.0, now))
    if status == 201:
        drive(create, answer, now)
    else:
        with pytest.raises(ConflictError, match="exists already"):
            drive(create, answer, now)


@pytest.mark.parametrize(("call", "code"), [("fetch", "unavailable"), ("send", "in_doubt")])
def test_silence_tells_how_long_was_tried(now: Now, cluster: Cluster, call: str, code: str) -> None:
    """If no attempt gets an answer, the error says how long the call was tried, besides the last attempt's timeout."""
    until = now.s + 10.0

    def silence(request: Request) -> Outcome:
        now.s = min(now.s + 4.0, until)
        return problem("in_doubt", "http://given:1 did not answer within 0.9 s")

    with refused_with(code, Unavailable, match=r"did not answer within 0\.9 s; tried for 10 s"):
        drive(asked_for(call, cluster, Deadline(until, now)), silence, now)


@pytest.mark.parametrize("call", ["fetch", "send"])
def test_a_call_whose_time_was_nearly_spent_before_its_request_says_so(now: Now, cluster: Cluster, call: str) -> None:
    """If most of the timeout had passed before the silent request was sent, the error says so and names `timeout`."""
    deadline = Deadline.after(10.0, now)
    now.s += 9.0

    def silence(request: Request) -> Outcome:
        now.s += 1.0
        return problem("in_doubt", "http://given:1 did not answer within 1 s")

    said = r"did not answer within 1 s; 9 s of the call's timeout of 10 s had passed before"
    with pytest.raises(Unavailable, match=said) as e:
        drive(asked_for(call, cluster, deadline), silence, now)

    assert "longer timeout" in e.value.hint


def test_a_cluster_that_is_gone_is_unreachable_whatever_it_said_before(now: Now) -> None:
    """A call that was refused and then cannot connect raises Unreachable, not InDoubt, and gives the refusal, too."""
    outcomes: list[Outcome] = [refusal("storage_unavailable")]
    gone = problem("unreachable", "cannot reach it", hint="start it")

    with pytest.raises(Unreachable, match=r"^said the shard; tried for .* s, at last cannot reach it \(start it\)"):
        drive(
            control.send("PATCH", "/models/m", {}, Deadline.after(10.0, now)),
            lambda _: outcomes.pop() if outcomes else gone,
            now,
        )


def test_a_cluster_that_never_answers_is_unavailable(now: Now, cluster: Cluster) -> None:
    """A pull from an unreachable cluster is retried, and raises the last failure no later than its deadline."""
    started = now.s

    with pytest.raises(Unavailable, match="cannot reach"):
        drive(
            transfer.pull(cluster, "m", Deadline.after(5, now)),
            lambda _: problem("unreachable", "cannot reach it"),
            now,
        )

    assert 1.0 < now.s - started <= 5.0


def test_a_cut_answer_is_pulled_again(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull whose response body is truncated is retried, and the retry overwrites all values."""

    def cut(request: Request) -> Outcome | None:
        if request.path != "/pull" or request.sink is None:
            return None
        request.sink.begin()
        reply = PullReply("m", 7, 0, 0, 9, "float32", [(0, 0, 9), (2, 0, 9)])
        request.sink.feed(memoryview(encode_header(reply) + b"\xff" * 60))
        try:
            request.sink.end()
        except PsError as e:
            return e
        raise AssertionError("a short body was accepted")

    shards.trouble.append(cut)
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert p.flat.tolist() == list(range(64))


def test_a_model_created_anew_is_noticed(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A push refused with 409 model_replaced raises FencedError, and the next call fetches the new map."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.wrong_once("/push", refusal("model_replaced"))
    with pytest.raises(FencedError):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    shards.log.clear()

    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert (None, "/models/m") in shards.log


def test_a_pull_never_mixes_timelines(shards: Shards, now: Now, cluster: Cluster) -> None:
    """During a rollback a pull repeats the parts of a shard that is still on the old timeline."""
    shards.timelines = {A: [3], B: [2, 2, 3]}

    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert p.origin.timeline == 3
    assert [to for to, path in shards.log if path == "/pull"].count(B) == 3
    assert [to for to, path in shards.log if path == "/pull"].count(A) == 1


def test_a_pull_that_fails_after_an_accepted_push_leaves_it_in_doubt(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """A pushpull of some parameters raises InDoubt if its push was accepted and the pull after it fails.

    The caller would take `unavailable` for a failed push, and push again.
    """
    shards.trouble = [lambda r: refusal("unavailable") if r.path == "/pull" else None for _ in range(1000)]

    with pytest.raises(InDoubt, match="was accepted"):
        drive(transfer.pushpull(cluster, "m", Deadline.after(5.0, now), {"b": np.ones(14)}, terms()), shards, now)

    assert len(shards.pushes) > 0


def test_what_does_something_anew_each_time_is_not_sent_twice(now: Now) -> None:
    """A POST that is not idempotent is retried after a temporary refusal, but not once it may have been executed."""
    asked: list[Request] = []
    outcomes: list[Outcome] = [refusal("unavailable"), problem("in_doubt", "no answer")]

    def answer(request: Request) -> Outcome:
        asked.append(request)
        return outcomes.pop(0)

    with pytest.raises(InDoubt):
        drive(control.post_unrepeatable("/runs", {}, Deadline.after(300.0, now)), answer, now)

    assert [r.path for r in asked] == ["/runs", "/runs"]
    assert asked[0].timeout_s == 300.0


@pytest.mark.parametrize("kind", [ps.Client, ps.AsyncClient])
@pytest.mark.parametrize(
    ("method", "path", "again"),
    [
        ("POST", "/runs", False),
        ("POST", "/models/clock/checkpoints", False),
        ("POST", "/models/m/clock?pretty=1", True),
        ("POST", "/runs/r/places/0/done", True),
        ("POST", "/pull", True),
        ("PUT", "/shards/a", True),
    ],
)
def test_a_request_in_doubt_is_made_again_only_if_it_cannot_count_twice(
    kind: Any, method: str, path: str, again: bool, now: Now
) -> None:
    """Of the POSTs of `client.request`, only those that change nothing if they come again are sent once more."""
    outcomes: list[Outcome] = [Response(200, {}, b"{}"), problem("in_doubt", "no answer")]
    client = answered(kind, lambda _: outcomes.pop(), now)
    if again:
        assert result(client.request(method, path, {})) == {}
    else:
        with pytest.raises(InDoubt):
            result(client.request(method, path, {}))


def test_a_pull_that_is_not_told_to_wait_does_not(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pull asks for any version, of any clock, at once; unless it is told to wait."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)

    assert {(f.wait_s, f.min_version, f.min_clock) for f in shards.pulls} == {(0.0, 0, 0)}


def test_what_cannot_be_pulled_or_is_another_models_is_refused(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A dtype that is not on the wire cannot be pulled, and a pull of another model is no base; nothing is sent."""
    p = drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    other = Params(select(shards.layout), p.flat, replace(p.origin, model="n"))
    shards.log.clear()

    with pytest.raises(RequestError, match="dtype 'int8' cannot be pulled") as refused:
        drive(transfer.pull(cluster, "m", Deadline.after(30, now), dtype="int8"), shards, now)
    assert refused.value.hint == "one of float16, bfloat16, float32, float64"
    with pytest.raises(RequestError, match="base was pulled from 'n', the push is to 'm'"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(base=other)), shards, now)
    assert shards.log == []

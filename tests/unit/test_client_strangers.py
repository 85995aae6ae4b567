"""Somebody between client and node answers in the node's place; without I/O."""

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.client import control, transfer
from paramserver.client.cluster import Cluster
from paramserver.client.iterations import Iterations
from paramserver.errors import InDoubt, PsError, problem
from paramserver.net.addresses import Addresses
from paramserver.net.calls import Deadline, Outcome, Request, Response, error_of

from .session_node import BEAT, GRAD, Node, deadline, joined, no, ok, opened
from .sharding import Now, Shards, drive, grads, refusal, terms
from .strangers import HTML, PAGE, REPLACED


@pytest.mark.parametrize("answer", REPLACED)
def test_a_push_whose_answer_was_replaced_is_sent_again(answer: Response) -> None:
    """A push that may have been passed on goes out again under the same id, so it counts once."""
    node, session = joined()
    node.script["/push"] = [answer]
    assert drive(session.push(GRAD, deadline()), node).state == "staged"
    assert [p.seq for p in node.pushes] == [1]
    assert [path for _, path, _ in node.sent].count("/push") == 2


@pytest.mark.parametrize("answer", REPLACED)
def test_a_push_whose_answers_are_all_replaced_is_in_doubt(answer: Response) -> None:
    """At the deadline the push is in doubt, the error says who answered, and in sync the next one takes it back."""
    node, session = joined()
    now = Now()
    node.script["/push"] = [answer] * 1000
    with pytest.raises(InDoubt, match=f"HTTP {answer.status}"):
        drive(session.push(GRAD, Deadline.after(5.0, now)), node, now)
    node.script["/push"] = []
    assert drive(session.push(GRAD, deadline()), node).state == "staged"
    assert (node.epoch, [(p.epoch, p.clock) for p in node.pushes]) == (2, [(2, 0)])


@pytest.mark.parametrize("status", [302, 401, 403, 407])
def test_a_page_that_refuses_a_push_is_no_doubt(status: int) -> None:
    """A page that asks for a password was sent in place of the request: the push is refused at once."""
    node, session = joined()
    node.script["/push"] = [Response(status, HTML, PAGE)]
    with pytest.raises(PsError, match=f"HTTP {status}") as e:
        drive(session.push(GRAD, deadline()), node)
    assert not isinstance(e.value, InDoubt)
    assert drive(session.push(GRAD, deadline()), node).state == "staged"
    assert node.epoch == 1


@pytest.mark.parametrize("status", [200, 201, 204, 500])
def test_a_join_whose_answer_was_replaced_is_repeated(status: int) -> None:
    """A worker whose join may have been passed on joins again under the same name of the attempt."""
    node = Node()
    node.script["/models/m/workers"] = [Response(status, HTML, b"" if status == 201 else PAGE)]
    session = opened(node)
    assert session.numbers.epoch == 1
    bodies = node.bodies("/models/m/workers")
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("answer", REPLACED)
def test_a_report_whose_answer_was_replaced_is_repeated(answer: Response) -> None:
    """The report of a clock and a heartbeat are sent again."""
    node, session = joined()
    drive(session.push(GRAD, deadline()), node)
    node.script["/models/m/clock"] = [answer]
    assert drive(Iterations(session).advance(deadline(), None), node) == 1
    node.script[BEAT] = [answer]
    drive(session.beat(deadline()), node)
    assert len(node.bodies("/models/m/clock")) == 2


def assigned(shards: Shards, answers: list[Response], now: Now) -> int:
    """Assign a parameter, to a node whose first answers are these; return how many requests that took."""
    cluster, sent = Cluster(("http://given:1",)), list[str]()

    def node(request: Request) -> Outcome:
        if request.method != "PUT":
            return shards(request)
        sent.append(request.path)
        return answers.pop(0) if answers else ok({"state": "applied"})

    drive(control.assign(cluster, "m", {"b": np.zeros(14)}, Deadline.after(5.0, now)), node, now)
    return len(sent)


@pytest.mark.parametrize("answer", REPLACED)
def test_values_whose_answer_was_replaced_are_sent_again(shards: Shards, answer: Response) -> None:
    """An assignment takes nobody's word but a node's for it that it is done; at the deadline it is in doubt."""
    assert assigned(shards, [answer], Now()) == 2
    with pytest.raises(InDoubt, match=f"HTTP {answer.status}"):
        assigned(shards, [answer] * 1000, Now())


def test_values_that_a_stranger_refuses_after_an_attempt_in_doubt_are_in_doubt(shards: Shards) -> None:
    """A page that says 403 does not say that what an earlier attempt was to assign is not there."""
    with pytest.raises(InDoubt, match=r"no answer from a node: .*HTTP 403"):
        assigned(shards, [Response(504, HTML, PAGE), Response(403, HTML, PAGE)], Now())
    with pytest.raises(PsError, match="HTTP 403") as e:
        assigned(shards, [Response(403, HTML, PAGE)], Now())
    assert e.value.code == "malformed"


@pytest.mark.parametrize("status", [201, 202, 204])
def test_a_success_that_no_node_sends_brings_no_values(shards: Shards, now: Now, cluster: Cluster, status: int) -> None:
    """Values come with a 200 only: any other success in its place fails a pull, and leaves a pushpull in doubt."""
    shards.wrong_once("/pull", Response(status, {}))
    with pytest.raises(PsError, match=f"HTTP {status}"):
        drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    shards.wrong_once("/pushpull", Response(status, {}))
    pushed, _ = drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    assert pushed.state == "applied"
    assert [path for _, path in shards.log].count("/pushpull") == 3


@pytest.mark.parametrize("status", [302, 403])
def test_metrics_outlast_a_page_in_place_of_the_scheduler(status: int) -> None:
    """Reported metrics that a page refuses wait for the next heartbeat."""
    node, session = joined()
    session.reports.note(session.timeline, 0, {"loss": 1.0})
    node.script["/models/m/metrics"] = [Response(status, HTML, PAGE)]
    with pytest.raises(PsError, match=f"HTTP {status}"):
        drive(session.report({"accuracy": 0.5}, deadline()), node)
    drive(session.beat(deadline()), node)
    assert node.bodies(BEAT)[-1]["metrics"] == [[0, {"loss": 1.0}]]


def test_a_page_does_not_cost_a_worker_its_rank() -> None:
    """A worker that joins again gives up its rank for the scheduler's refusal only, not for anybody's 409."""
    node, session = joined()
    node.script[BEAT] = [no("fenced")]
    node.script["/models/m/workers"] = [Response(409, HTML, PAGE)]
    with pytest.raises(PsError, match="HTTP 409"):
        drive(session.beat(deadline()), node)
    assert len(node.bodies("/models/m/workers")) == 2


def test_what_a_stranger_refuses_after_an_attempt_in_doubt_is_in_doubt() -> None:
    """A page that says 404 does not say that what an earlier attempt was to delete is gone."""
    answers = [Response(504, HTML, PAGE), Response(404, HTML, PAGE)]
    now = Now()

    def node(request: Request) -> Outcome:
        return answers.pop(0)

    with pytest.raises(InDoubt, match="404"):
        drive(control.delete("/models/m", Deadline.after(5.0, now)), node, now)


def test_a_document_of_a_gateway_that_lost_the_answer_is_in_doubt() -> None:
    """502 and 504 say that the request may have been carried out, whatever code a gateway's own document names."""
    for body in (b'{"code":"bad_gateway"}', b'{"code":"internal"}', b'{"code":"101504"}'):
        assert isinstance(error_of(Response(504, {"content-type": "application/json"}, body)), InDoubt)


def test_a_url_whose_proxy_lost_its_node_is_not_asked_first() -> None:
    """A refusal or redirection that no node has sent has the next URL tried, and none begin with this one."""
    addresses = Addresses(["http://a:1", "http://b:1"])
    assert addresses.record("http://a:1", problem("unreachable", "nobody"))
    for status in (301, 401, 403, 404):
        assert addresses.record("http://b:1", Response(status, HTML, PAGE))
    assert addresses.order()[0] == "http://a:1"
    ours = Response(404, {"content-type": "application/problem+json"}, b'{"code":"unknown_model"}')
    assert not addresses.record("http://b:1", ours)
    assert addresses.order()[0] == "http://b:1"


@pytest.mark.parametrize("second", [problem("unauthorized", "no"), problem("forbidden", "no")])
def test_a_join_that_is_refused_without_its_rank_leaves_no_doubt(second: PsError) -> None:
    """If another worker has the rank, and the join without it is refused, a higher epoch is somebody else's."""
    node, session = joined()
    node.script["/models/m/workers"] = [no("conflict", where="rank"), no(second.code)]
    node.script[BEAT] = [no("fenced", epoch=1)]
    with pytest.raises(PsError, match="refused"):
        drive(session.beat(deadline()), node)
    node.script[BEAT] = [no("fenced", epoch=7)]
    with refused_with("fenced"):
        drive(session.beat(deadline()), node)
    assert session.replaced


def test_a_heartbeat_that_a_stranger_answers_is_not_the_schedulers_word() -> None:
    """A page in place of a heartbeat neither ends a pause nor has the worker leave out its state."""
    node, session = joined()
    session.status = "paused"
    session.reports.note(session.timeline, 0, {"loss": 1.0})
    node.script[BEAT] = [Response(403, HTML, PAGE)]
    with pytest.raises(PsError, match="HTTP 403"):
        drive(session.beat(deadline()), node)
    assert session.status == "paused"
    drive(session.beat(deadline()), node)
    assert node.bodies(BEAT)[-1]["metrics"]


def test_a_refusal_is_told_with_an_answer_that_is_not_of_a_paramserver(
    shards: Shards, now: Now, cluster: Cluster
) -> None:
    """If one shard's address answers a push with something foreign and another shard refuses, both are told.

    The push is in doubt: whoever answered for the one shard may have passed it on.
    """
    shards.wrong_once("/push", Response(200, {}, b"<html>", "http://a:1"))
    shards.wrong_once("/push", refusal("worker_required"))

    with pytest.raises(InDoubt, match=r"said the shard.*may be applied") as e:
        drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)
    assert e.value.members["refused"] == "worker_required"

"""Pushes and pulls of more elements than one request may have, without I/O: here that is one partition of 16."""

from typing import Any

import numpy as np
import pytest
from tests.refusals import refused_with

from paramserver.client import sends, transfer
from paramserver.client.cluster import Cluster
from paramserver.net.calls import Deadline

from .sharding import A, B, Now, Shards, drive, expected, grads, terms


@pytest.fixture(autouse=True)
def one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound a request to the elements of one partition."""
    monkeypatch.setattr(sends, "REQUEST_ELEMENTS_MAX", 16)


def test_a_push_goes_out_in_rounds_of_one_request_for_each_shard(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Each round has what fits, all under one push id, also if an answer is lost; every element counts once."""
    shards.lost_once("/push")

    done = drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert shards.flat.tolist() == expected().tolist()
    assert (done.state, done.version, done.duplicate) == ("applied", 1, False)
    assert [len(f.parts) for f in shards.pushes] == [1] * len(shards.pushes)
    assert {f.push_id for f in shards.pushes} == {terms().push_id}


def test_a_pushpull_pulls_once_all_is_pushed(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A pushpull whose gradient is too large for one request pushes in rounds, then pulls."""
    _, p = drive(transfer.pushpull(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    assert p.flat.tolist() == expected().tolist()
    assert [path for _, path in shards.log if path.startswith("/pu")] == ["/push"] * 4 + ["/pull"] * 2


def test_a_pull_is_bounded_where_one_shard_collects_for_others(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Owners are asked for all they have at once; through the URL that was given goes what fits, round by round."""
    drive(transfer.pull(cluster, "m", Deadline.after(30, now)), shards, now)
    assert [len(f.parts) for f in shards.pulls] == [2, 2]
    shards.pulls.clear()
    shards.answering = set()

    p = drive(transfer.pull(Cluster(("http://given:1",)), "m", Deadline.after(30, now)), shards, now)

    assert p.flat.tolist() == list(range(64))
    assert [len(f.parts) for f in shards.pulls] == [1] * 4


def test_nothing_is_sent_of_a_gradient_whose_last_element_is_bad(shards: Shards, now: Now, cluster: Cluster) -> None:
    """NaN in what would be sent last is refused before the first request, as one shard could not refuse all."""
    bad: dict[str, Any] = grads()
    bad["b"] = np.array([*[1.0] * 13, np.nan], np.float32)

    with refused_with("non_finite"):
        drive(transfer.push(cluster, "m", Deadline.after(30, now), bad, terms()), shards, now)

    assert not shards.pushes


def test_every_request_has_the_norm_of_the_whole(now: Now) -> None:
    """Where the model clips by norm, all requests of a push say the same norm: that of the whole gradient."""
    shards, cluster = Shards(clip=True), Cluster(("http://given:1",))

    drive(transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms()), shards, now)

    whole = float(np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads().values())))
    assert [f.norm for f in shards.pushes] == [pytest.approx(whole)] * 4


def test_a_push_in_rounds_ends_no_iteration_by_itself(shards: Shards, now: Now, cluster: Cluster) -> None:
    """No shard is told that a push of several requests ends an iteration: it would report the clock too early."""
    call = transfer.push(cluster, "m", Deadline.after(30, now), grads(), terms(clock=0, commit_wait_s=1.0))

    drive(call, shards, now)

    assert {f.ends for f in shards.pushes} == {None}
    assert {to for to, path in shards.log if path == "/push"} == {A, B}

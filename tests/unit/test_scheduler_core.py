"""The scheduler's decisions, event by event: models, their shards, uploads, data, evaluations."""

from typing import Any

import pytest
from tests.refusals import refused_with

from paramserver import limits
from paramserver.core.scheduler import io
from paramserver.errors import ConflictError, FencedError, NotFoundError, PsError, RequestError, Unavailable
from paramserver.types import ModelKey

from .scheduling import SPEC, Driver, beyond_its_cut, code

SYNC = {"consistency": {"mode": "sync"}}


def test_a_model_without_any_shard_is_refused_and_nothing_is_kept() -> None:
    """Creating a model without shards gets `no_shards` and stores nothing; it succeeds once shards have joined."""
    d = Driver()
    with refused_with("no_shards", Unavailable):
        d.ask(lambda n: io.CreateModel(n, SPEC, "x"))
    assert not d.hash
    assert d.model()["served"]


@pytest.mark.parametrize(
    "addresses",
    [["foo"], ["http://s0:1", "foo"], ["ftp://s0:1"], ["http://"], ["http://:1"], ["http://s0:0"], ["http://s0:99999"],
     ["http://s0:x"], ["http://a..b:1"], ["http://s 0:1"], ["http://s0:1?a"], ["http://u@s0:1"], ["http://[::1:1"],
     ["unix:///run/s0"], ["http://s0:1", "unix://run/s0"], ["http://s0:1\n"], ["http://1.2.3:1"]],
)  # fmt: skip
def test_a_shard_that_nobody_can_reach_does_not_join(addresses: list[str]) -> None:
    """A shard is refused if an address is no usable URL or the first is local: its partitions would be unreachable."""
    d = Driver()
    with refused_with("invalid_field", RequestError, match=r"addresses: must be like http://HOST:PORT"):
        d.ask(lambda n: io.JoinShard(n, "s0", addresses))
    assert not d.core.read.map()["shards"]


@pytest.mark.parametrize(
    "address", ["https://s0", "http://s0.of_a-pod.svc.:8701", "http://[fd00::5]:8701", "http://10.0.0.5:1/below/a/path"]
)
def test_a_shard_may_be_reached_in_several_ways(address: str) -> None:
    """A shard may have a host name or IP address, with or without port and path, and a local socket besides."""
    d = Driver()
    assert d.ask(lambda n: io.JoinShard(n, "s0", [address, "unix:///dev/shm/a b/requests"]))["epoch"] == 1


def test_creation_is_answered_when_every_partition_is_served() -> None:
    """Creating a model waits until all owners serve it; the same spec, even without `partitions`, is accepted again."""
    d = Driver("s0", "s1")
    number = d.send(lambda n: io.CreateModel(n, SPEC, "x"))
    d.beat("s0")
    assert number in d.open
    d.beat("s1")
    assert [p["shard"] for p in d.result(number)["partitions"]] == ["s0", "s1", "s0", "s1"]
    assert d.ask(lambda n: io.CreateModel(n, SPEC, "y"))["generation"] == 1
    any_number = {k: v for k, v in SPEC.items() if k != "partitions"}
    assert d.ask(lambda n: io.CreateModel(n, any_number, "y"))["generation"] == 1
    with pytest.raises(ConflictError, match="another spec"):
        d.ask(lambda n: io.CreateModel(n, SPEC | {"partitions": 2}, "z"))


def test_a_model_deleted_and_made_anew_has_a_higher_generation() -> None:
    """Deleting a model answers its waiters and drops its fields; created again, it has a higher generation."""
    d = Driver.with_model(**SYNC)
    a, b = d.join("a"), d.join("b")
    waiting = d.clock(a, 1)
    assert b["rank"] == 1
    d.ask(lambda n: io.DeleteModel(n, "m"))
    assert code(d, waiting) == "unknown_model"
    assert not [k for k in d.hash if k.split(":")[0] in ("model", "worker", "clock", "place")]
    assert [w.concerns(ModelKey("m", 1)) for w in d.work if isinstance(w, io.ForgetOthers)] == [True]
    assert d.model()["generation"] == 2


def test_async_death_of_a_shard_moves_its_partitions_alone() -> None:
    """In async, only a dead shard's partitions move, from snapshots; other tokens and the timeline stay the same."""
    d = Driver()
    before = d.model()["partitions"]
    del d.shards["s1"]
    d.wait(6)
    after = d.core.read.model("m")
    assert {p["shard"] for p in after["partitions"]} == {"s0"}
    kept = [i for i, p in enumerate(before) if p["shard"] == "s0"]
    assert [i for i in range(4) if after["partitions"][i]["incarnation"] == before[i]["incarnation"]] == kept
    assert after["timeline"] == 0
    assert d.published[-1]["source"] == "snapshot"


def test_partitions_without_a_living_shard_wait_for_the_next_one() -> None:
    """After all shards have died, partitions have no owner until another one joins, and no other with it."""
    d = Driver.with_model()
    d.shards.clear()
    d.wait(limits.ALL_SILENT_S + 1)
    assert {p["shard"] for p in d.core.read.model("m")["partitions"]} == {None}
    d.shard("s9")
    d.wait(2)
    assert {p["shard"] for p in d.core.read.model("m")["partitions"]} == {"s9"}


def test_a_shard_that_joins_again_is_a_new_incarnation() -> None:
    """A shard that joins again keeps its partitions under new tokens, and heartbeats of its old epoch are fenced."""
    d = Driver()
    before = d.model()["partitions"]
    d.shard("s1")
    after = d.core.read.model("m")["partitions"]
    assert [p["shard"] for p in after] == [p["shard"] for p in before]
    assert all(
        (a["incarnation"] > b["incarnation"]) == (b["shard"] == "s1") for a, b in zip(after, before, strict=True)
    )
    with pytest.raises(FencedError):
        d.ask(lambda n: io.ShardHeartbeat(n, "s1", 1))


def test_sync_goes_back_to_the_newest_cut_when_a_shard_dies() -> None:
    """When a sync model loses a shard, all partitions go back to the newest cut under new tokens on a new timeline.

    Workers get `rolled_back` with that timeline and the clock of the cut.
    """
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    d.beats()
    assert d.core.read.model("m")["cut"] == 1
    d.clock(a, 2)
    waiting = d.clock(a, 2)
    assert d.result(waiting)["released"]
    tokens = dict(d.tokens)
    d.shard("s1")
    model = d.core.read.model("m")
    assert (model["timeline"], model["clock"], model["cut"]) == (1, 1, 1)
    assert all(d.tokens[k] > tokens[k] for k in tokens)
    document = [p for p in d.published if p["type"] == "model"][-1]
    assert document["source"] == {"cut": 1}
    assert document["commits"] == []
    late = d.clock(a, 3)
    assert code(d, late) == "rolled_back"
    assert d.replies[late].members == {"timeline": 1, "clock": 1}
    assert d.result(d.clock(a, 2))["released"]
    assert [(c["timeline"], c["t"]) for c in d.commits()] == [(0, 0), (0, 1), (1, 1)]


def test_a_leader_that_takes_over_after_a_rollback_makes_no_commit_for_clocks_of_before() -> None:
    """A new leader makes no commit from clocks that a worker reached before a rollback."""
    d, a = beyond_its_cut()
    b = d.join("b")
    assert b["clock"] == 2
    d.shard("s0")
    assert d.core.read.model("m")["clock"] == 1
    d.ask(lambda n: io.LeaveWorker(n, "m", a["worker"], a["epoch"]))
    before = len(d.commits())
    d.restart()
    d.wait(1)
    assert d.core.read.model("m")["clock"] == 1
    assert len(d.commits()) == before


def test_of_all_refusals_only_rolled_back_waits_for_the_stores_before_it() -> None:
    """`rolled_back` names a new timeline, so it waits until that is stored; other refusals say nothing that is not."""
    d, a = beyond_its_cut()
    d.shard("s0")
    clocks = {"rolled_back": 3, "invalid_field": -1}

    for refused, clock in clocks.items():
        event = io.ReportClock(1, "m", a["worker"], a["epoch"], clock, None, 0.0)
        (reply,) = [e for e in d.core.handle(event, d.now) if isinstance(e, io.Reply)]
        assert isinstance(reply.outcome, PsError)
        assert (reply.outcome.code, reply.waits) == (refused, refused == "rolled_back")


def test_a_model_made_synchronous_is_never_taken_for_untouched() -> None:
    """A model that no worker has joined, and of whose pushes no owner has told yet, is recovered from snapshots.

    Taken for untouched, it would draw its initial values again.
    """
    d = Driver.with_model()
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync"}}))
    assert d.document()["timeline"] == 1
    d.ask(lambda n: io.LeaveShard(n, "s1", d.shards.pop("s1")))
    assert (d.document()["timeline"], d.document()["source"]) == (2, "snapshot")


def test_a_death_before_the_first_cut_of_a_sync_phase_goes_back_to_snapshots() -> None:
    """If a shard is lost before a sync phase has a cut, snapshots are loaded and the first commit is made again.

    That commit waits until every partition is served under its new token.
    """
    d = Driver.with_model()
    a = d.join("a")
    d.clock(a, 7)
    d.ask(lambda n: io.PatchModel(n, "m", {"consistency": {"mode": "sync"}}))
    for name in d.shards:
        d.beat(name, stored=False)
    body = d.ask(lambda n: io.JoinShard(n, "s1", ["http://s1:1"]))
    document = [p for p in d.published if p["type"] == "model"][-1]
    assert (document["source"], document["timeline"], document["commits"]) == ("snapshot", 2, [])
    assert len(d.commits()) == 1
    d.shards["s1"] = body["epoch"]
    d.beats()
    first, again = d.commits()
    assert (again["timeline"], again["t"], again["contributions"]) == (2, first["t"] + 2, [])
    d.beats()
    assert d.core.read.model("m")["cut"] == again["t"] + 1


def test_a_shard_whose_redis_is_another_one_is_refused() -> None:
    """A shard joins if its Redis has the leader's term or a later one, or does not answer.

    It is refused if the term is older, or another scheduler's.
    """
    d = Driver("s0")
    stored, term = dict(d.hash), d.core.read.term

    def join(name: str, found: int | None, other: bool = False) -> Any:
        return d.ask(lambda n: io.JoinShard(n, name, ["http://s:1"], "", found, other))

    for found, other in ((0, False), (term - 1, False), (term, True), (term + 1, True)):
        with pytest.raises(ConflictError, match="uses a different Redis than the schedulers"):
            join("s1", found, other)
    assert d.hash == stored
    assert [join(f"ok{later}", later)["epoch"] for later in (None, term, term + 1)] == [1, 1, 1]


def test_join_takes_ids_ranks_and_epochs_as_told() -> None:
    """Names get the model's prefix, ranks are unique among live workers, and epochs are higher than `above`."""
    d = Driver.with_model()
    assert d.ask(lambda n: io.JoinWorker(n, "m"))["worker"] == "m/w0"
    assert d.join("run-1/w3", rank=7)["rank"] == 7
    assert d.join("x", above=41)["epoch"] == 42
    with pytest.raises(ConflictError):
        d.join("y", rank=7)
    for bad in ("", "a b", "a/b/c", "/a", "ä", 3):
        with pytest.raises(RequestError):
            d.join(bad)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        d.ask(lambda n: io.WorkerHeartbeat(n, "m", "m/nobody", 1))


def test_a_model_that_exists_says_in_what_it_differs() -> None:
    """Creating an existing model with another spec is refused with the first differences."""
    d = Driver.with_model()
    other = SPEC | {"optimizer": {"name": "sgd", "lr": 0.9}, "evaluate_every": 7}
    with refused_with("model_exists", match=r"with another spec: optimizer\.lr is 0\.001, not 0\.9; evaluate_every"):
        d.ask(lambda n: io.CreateModel(n, other, "x"))


def test_a_model_beyond_the_limit_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating more models than a cluster may have is a conflict, which no client repeats; existing ones are found."""
    monkeypatch.setattr(limits, "MODELS_MAX", 2)
    d = Driver.with_model()
    d.model(name="n")
    with refused_with("conflict", ConflictError, "the cluster has 2 models, which is the limit"):
        d.model(name="o")
    assert d.model()["name"] == "m"
    d.ask(lambda n: io.DeleteModel(n, "m"))
    assert d.model(name="o")["name"] == "o"


def test_uploads_are_complete_when_every_parameter_is_in() -> None:
    """The upload token is granted again only after it has expired; the model is ready once everything is uploaded."""
    d = Driver()
    up = {"shape": [4], "init": {"kind": "upload"}}
    made = d.model(params={"w": up, "b": up}, partitions=2)
    assert (made["upload_token"], made["state"]) == ("secret", "initializing")
    early = d.send(lambda n: io.CreateModel(n, SPEC | {"params": {"w": up, "b": up}, "partitions": 2}, "first"))
    d.beats()
    assert "upload_token" not in d.result(early)
    with pytest.raises(ConflictError):
        d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "wrong", d.given()))
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    assert d.core.read.model("m")["missing"] == ["b"]
    told = [p["upload"] for p in d.published if p["type"] == "model"]
    assert told[-1] == {"token": "secret", "missing": ["b", "w"], "lost": []}, "shards are told when all are in"
    d.wait(61)
    again = d.send(lambda n: io.CreateModel(n, SPEC | {"params": {"w": up, "b": up}, "partitions": 2}, "second"))
    assert d.result(again)["upload_token"] == "second"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "b", "second", d.given()))
    assert d.core.read.model("m")["missing"] == ["w"], "values of two clients are never mixed"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "second", d.given()))
    assert d.core.read.model("m")["state"] == "ready"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "second", d.given()))  # the answer was lost
    assert d.published[-1]["upload"] is None


def test_a_parameter_uploaded_in_parts_is_complete_once_each_partition_has_its_part() -> None:
    """Parts may come in any order and again; one that an earlier owner of its partition took does not count."""
    d = Driver("s0", "s1")
    d.model(params={"b": {"shape": [8]}, "w": {"shape": [56], "init": {"kind": "upload"}}}, partitions=4)

    def part(*partitions: int) -> list[str]:
        """Upload the parts that lie in these partitions; return what is missing after it."""
        tokens = [p["incarnation"] for p in d.core.read.model("m")["partitions"]]
        given = [[i, tokens[i]] for i in partitions]
        d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", given, partial=True))
        missing: list[str] = d.core.read.model("m")["missing"]
        return missing

    assert [part(3), part(0, 1), part(0)] == [["w"]] * 3
    d.restart()
    d.beats()
    assert part(2) == ["w"], "the new leader knows of no other part"
    assert part(0, 1) == ["w"]
    del d.shards["s0"]
    d.wait(6)
    assert part(3) == ["w"], "the model's values are lost"
    assert part(0, 1) == ["w"]
    assert part(2) == []
    assert d.core.read.model("m")["state"] == "ready"


def test_a_client_deletes_only_what_it_is_still_uploading() -> None:
    """A DELETE with an upload token is refused once the model is complete, or another client has the upload."""
    d = Driver()
    spec = SPEC | {"params": {"w": {"shape": [4], "init": {"kind": "upload"}}}}
    d.model(params=spec["params"])
    d.wait(61)
    d.send(lambda n: io.CreateModel(n, spec, "second"))
    for token in ("secret", "second"):
        if token == "second":
            d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "second", d.given()))
        with refused_with("upload_in_progress", ConflictError):
            d.ask(lambda n, t=token: io.DeleteModel(n, "m", t))  # type: ignore[misc]
    d.ask(lambda n: io.DeleteModel(n, "m"))
    d.model(params=spec["params"])
    d.ask(lambda n: io.DeleteModel(n, "m", "secret"))
    assert not d.core.read.models()


def test_parts_that_another_client_uploaded_before_do_not_count() -> None:
    """A client that takes over an upload sends all parts itself: values of two clients are never mixed."""
    d = Driver("s0", "s1")
    params = {"b": {"shape": [8]}, "w": {"shape": [56], "init": {"kind": "upload"}}}
    d.model(params=params, partitions=4)
    given = [[i, p["incarnation"]] for i, p in enumerate(d.core.read.model("m")["partitions"])]
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", given[:3], partial=True))
    d.wait(61)
    d.send(lambda n: io.CreateModel(n, SPEC | {"params": params, "partitions": 4}, "second"))
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "second", given[3:], partial=True))
    assert d.core.read.model("m")["missing"] == ["w"]
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "second", given[:3], partial=True))
    assert d.core.read.model("m")["state"] == "ready"


def test_values_that_owners_took_who_own_nothing_any_more_do_not_count() -> None:
    """The report of a shard that was given up meanwhile is refused: the new owners have drawn other values."""
    d = Driver("s0", "s1")
    d.model(params={"w": {"shape": [56], "init": {"kind": "upload"}}}, partitions=4)
    given = d.given()
    del d.shards["s0"]
    d.wait(6)
    with refused_with("initializing", Unavailable, match="have lost their values"):
        d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", given))
    assert d.core.read.model("m")["missing"] == ["w"]
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    assert d.core.read.model("m")["state"] == "ready"


def test_a_creator_that_lost_the_answer_is_granted_its_token_again() -> None:
    """The creator's repeated request is granted its token at once, also by a new leader; nobody else's is."""
    d = Driver()
    spec = SPEC | {"params": {name: {"shape": [4], "init": {"kind": "upload"}} for name in "wb"}}
    d.model(params=spec["params"])

    def token(chosen: str) -> str | None:
        number = d.send(lambda n: io.CreateModel(n, spec, chosen))
        d.beats()
        granted: str | None = d.result(number).get("upload_token")
        return granted

    assert (token("another"), token("secret")) == (None, "secret")
    d.restart()
    d.beats()
    assert (token("another"), token("secret")) == (None, "secret")
    d.wait(40)
    assert token("secret") == "secret"
    d.wait(40)
    assert token("another") is None, "repeating the request renews the token"
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    d.ask(lambda n: io.ParameterUploaded(n, "m", "b", "secret", d.given()))
    assert token("secret") is None, "the upload is complete"


def test_a_creator_that_asks_again_is_told_that_it_has_created_the_model() -> None:
    """The request that made a model gets 201 again when it is repeated, also by the next leader; another gets 200."""
    d = Driver()
    d.model()

    def status(nonce: str) -> int:
        number = d.send(lambda n: io.CreateModel(n, SPEC, nonce))
        d.beats()
        return d.statuses[number]

    assert (status("another"), status("secret")) == (200, 201)
    d.restart()
    d.beats()
    assert (status("another"), status("secret")) == (200, 201)
    d.ask(lambda n: io.DeleteModel(n, "m"))
    assert (status("another"), status("secret")) == (201, 200)


def test_a_model_that_is_not_served_in_time_is_told_to_its_creator() -> None:
    """A create request whose model no shard serves in time gets `loading`; `created` says whether it made the model."""
    d = Driver("s0")
    spec = SPEC | {"params": {"w": {"shape": [4]}}}
    first = d.send(lambda n: io.CreateModel(n, spec, "secret"))
    second = d.send(lambda n: io.CreateModel(n, spec, "another"))
    d.shards.clear()
    d.wait(limits.CLIENT_TIMEOUT_S + 1)

    late = [d.replies[n] for n in (first, second)]
    assert [(e.code, e.members.get("created")) for e in late] == [("loading", True), ("loading", False)]


def test_each_uploaded_value_is_stored_without_the_whole_model() -> None:
    """An upload stores one small field, from which a new leader goes on; all go once the model is complete."""
    d = Driver()
    up = {"shape": [4], "init": {"kind": "upload"}}
    d.model(params={"w": up, "b": up, "c": up})
    stored = d.hash["model:m"]
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    assert d.hash["model:m"] == stored
    d.restart()
    d.ask(lambda n: io.ParameterUploaded(n, "m", "b", "secret", d.given()))
    assert d.core.read.model("m")["missing"] == ["c"]
    d.ask(lambda n: io.ParameterUploaded(n, "m", "c", "secret", d.given()))
    assert d.core.read.model("m")["state"] == "ready"
    assert not [k for k in d.hash if k.startswith("filled:")]
    d.restart()
    assert d.core.read.model("m")["state"] == "ready"


@pytest.mark.parametrize("then", ["lost", "deleted"])
def test_uploads_of_values_that_are_gone_are_forgotten(then: str) -> None:
    """If a model loses all its values while they are uploaded, or is deleted, a new leader takes none for given."""
    d = Driver()
    up = {"shape": [4], "init": {"kind": "upload"}}
    d.model(params={"w": up, "b": up})
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    if then == "deleted":
        d.ask(lambda n: io.DeleteModel(n, "m"))
    else:
        d.shards.clear()
        d.wait(limits.ALL_SILENT_S + 1)
    assert not [k for k in d.hash if k.startswith("filled:")]
    d.restart()
    if then == "lost":
        assert d.core.read.model("m")["missing"] == ["b", "w"]


def test_uploaded_values_survive_a_shard_before_the_first_commit() -> None:
    """In sync, uploaded values are the cut of clock 0, so they survive the loss of a shard before the first commit."""
    d = Driver()
    up = {"shape": [4], "init": {"kind": "upload"}}
    d.model(params={"w": up}, consistency={"mode": "sync"})
    d.ask(lambda n: io.ParameterUploaded(n, "m", "w", "secret", d.given()))
    d.beats()
    d.shard("s0")  # restarted

    assert (d.document()["source"], d.document()["timeline"]) == ({"cut": 0}, 1)
    assert d.core.read.model("m")["state"] == "ready"


def test_a_dead_workers_data_comes_back() -> None:
    """The range leased to a dead worker goes to another one that waits for data, so the dataset is finished."""
    d = Driver.with_model()
    a, b = d.join("a"), d.join("b")
    d.ask(lambda n: io.RegisterDataset(n, "m", "train", 20, 10))
    first, second = (d.result(d.lease(w, "train"))["task"] for w in (a, b))
    assert {first["start"], second["start"]} == {0, 10}
    d.ask(lambda n: io.TaskDone(n, "m", b["worker"], 1, second["id"]))
    parked = d.lease(b, "train", 30)
    assert parked in d.open
    d.wait(6)
    assert d.result(parked)["task"] == first
    d.ask(lambda n: io.TaskDone(n, "m", b["worker"], 1, first["id"]))
    assert d.result(d.lease(b, "train")) == {"task": None, "finished": True, "clock": 0, "timeline": 0}


def test_evaluations_are_asked_for_by_clock_and_taken_by_one() -> None:
    """Every `evaluate_every` clocks one worker gets an evaluation task; its result is a metric at that clock."""
    d = Driver.with_model(evaluate_every=5)
    a, b = d.join("a"), d.join("b")
    d.clock(a, 5)
    assert d.result(d.clock(b, 4))["evaluate"] is False
    assert d.result(d.clock(b, 5))["evaluate"] is True
    task = d.result(d.lease(a, "evaluate"))["task"]
    assert task == {"id": "evaluate:5:0", "kind": "evaluate", "clock": 5}
    assert d.result(d.lease(b, "evaluate"))["task"] is None
    d.ask(lambda n: io.TaskDone(n, "m", a["worker"], 1, task["id"], {"accuracy": 0.9}))
    series = d.core.read.metric("m", "accuracy")
    assert series["points"][0][1:] == [5, "m/a", 0.9]


def test_sync_an_evaluation_is_of_the_clock_that_its_worker_has_reached() -> None:
    """sync: a worker that evaluates a clock later than asked has pulled that clock's values, and it is reported so."""
    d = Driver.with_model(**SYNC, evaluate_every=5)
    a = d.join("a")
    d.clock(a, 5)
    d.clock(a, 6)
    task = d.result(d.lease(a, "evaluate"))["task"]
    assert task["clock"] == 5
    d.ask(lambda n: io.TaskDone(n, "m", a["worker"], 1, task["id"], {"accuracy": 0.9}))
    series = d.core.read.metric("m", "accuracy")
    assert series["points"][0][1:] == [6, "m/a", 0.9]
    assert d.result(d.lease(a, "evaluate"))["task"] is None


def test_patch_gives_a_revision_that_the_next_commit_names() -> None:
    """PATCH makes a revision, which the next commit names; a patch of a fixed field is refused and makes none."""
    d = Driver.with_model(**SYNC)
    a = d.join("a")
    d.clock(a, 1)
    assert d.ask(lambda n: io.PatchModel(n, "m", {"optimizer": {"lr": 0.5}}))["revision"] == 1
    with pytest.raises(RequestError):
        d.ask(lambda n: io.PatchModel(n, "m", {"partitions": 9}))
    d.clock(a, 2)
    assert [c["revision"] for c in d.commits()] == [0, 1]


def test_a_commit_brings_the_settings_of_a_revision_that_the_one_before_does_not_name() -> None:
    """The first commit of a revision has its settings, under another leader, too; the commits after it do without."""
    d = Driver.with_model(consistency={"mode": "sync"})
    a = d.join("a")
    d.clock(a, 1)
    d.clock(a, 2)
    for lr in (0.5, 0.25):
        d.ask(lambda n, lr=lr: io.PatchModel(n, "m", {"optimizer": {"lr": lr}}))  # type: ignore[misc]
    d.clock(a, 3)
    d.restart()
    d.clock(a, 4)
    for lr in (0.125, 0.0625):
        d.ask(lambda n, lr=lr: io.PatchModel(n, "m", {"optimizer": {"lr": lr}}))  # type: ignore[misc]

    brought = [c["settings"]["optimizer"]["lr"] if "settings" in c else None for c in d.document("m")["commits"]]
    assert brought == [0.001, None, 0.25, None]
    assert [c["revision"] for c in d.document("m")["commits"]] == [0, 0, 2, 2]


def test_linear_scaling_makes_a_revision_of_each_join() -> None:
    """With linear scaling each join makes a revision, because live workers belong to the revision (semantics 8)."""
    d = Driver.with_model(optimizer={"name": "sgd", "linear_scaling": True})
    d.join("a")
    d.join("b")
    model = d.core.read.model("m")
    assert (model["revision"], model["live_workers"]) == (2, 2)


def test_a_worker_may_ask_for_a_longer_lease() -> None:
    """A worker may ask for a longer lease, such as for a person at a shell; a new leader honors it."""
    d = Driver.with_model(**SYNC)
    joined = d.ask(lambda n: io.JoinWorker(n, "m", "anna", lease_s=60))
    assert joined["lease_s"] == 60
    d.join("ben")

    d.wait(10.0)
    d.restart()
    d.wait(10.0)

    assert [(w["worker"], w["alive"]) for w in d.core.read.workers("m", d.now)] == [("m/anna", True), ("m/ben", False)]


def test_a_scheduler_that_stood_still_declares_nobody_dead_for_it() -> None:
    """After the scheduler itself was paused, shards and workers have the rest of their lease, and no more."""
    d = Driver.with_model()
    d.join("a")

    d.now += 60.0
    d.do(io.Tick())
    assert all(w["alive"] for w in d.core.read.workers("m", d.now))
    assert all(s["alive"] for s in d.core.read.map()["shards"].values())

    d.wait(6.0, shards=False)
    assert not any(w["alive"] for w in d.core.read.workers("m", d.now))

"""Replay compared with the live partition: any prefix of the journal, on any snapshot, gives the same bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paramserver.codecs.codec import Codec
from paramserver.codecs.parts import encode_partition
from paramserver.core.commit import Contribution
from paramserver.core.layout import Layout
from paramserver.core.partition_state import HeldPart, LoadedState
from paramserver.core.ranges import of_pairs
from paramserver.core.shard.effects import LoadPartition
from paramserver.core.shard.events import AssignPart, PushPart, PushReceived, RosterChanged, SetReceived, WorkerAnswered
from paramserver.core.shard.initial import first_state
from paramserver.core.shard.journal import JournalEntry
from paramserver.core.shard.replay import Replay, replay
from paramserver.core.spec import ModelSpec
from paramserver.errors import CorruptState, PsError
from paramserver.testing.shard_driver import InMemoryStore, ShardDriver, perform
from paramserver.types import F32, ModelKey, PartitionKey, PushId
from paramserver.wire.tensor import slice_crc
from paramserver_shard.journal import decode, encode

SIZE = 6
WORKERS = ("r/w0", "r/w1")
ROSTER = dict.fromkeys(WORKERS, 1)
KEY = PartitionKey(ModelKey("m", 1), 0)


def spec(optimizer: str = "adam", mode: str = "async") -> ModelSpec:
    return ModelSpec.parse(
        {
            "name": "m",
            "params": {"a": {"shape": [2], "init": {"kind": "normal"}}, "b": {"shape": [4], "lr_scale": 0.5}},
            "optimizer": {"name": optimizer},
            "consistency": {"mode": mode},
            "partitions": 1,
            "ack": "journaled",
        }
    )


KINDS = ("push", "hold", "commit", "flush", "config", "set", "drop")
"""All kinds of entries."""


class Recorder(InMemoryStore):
    """A store that also keeps every entry ever appended, as it is read back from what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[JournalEntry] = []

    def append(self, entry: JournalEntry) -> bool:
        head, data = encode(entry)
        self.written.append(decode(entry.key, entry.lsn, {b"h": head, b"d": bytes(data)}))
        return super().append(entry)


def ranges_of(part: HeldPart) -> Any:
    return None if part.ranges is None else part.ranges.tolist()


def held(part: HeldPart) -> tuple[Any, ...]:
    return (part.worker, part.epoch, part.clock, part.seq, part.base, part.scale, ranges_of(part), part.dtype,
            part.data.tobytes())  # fmt: skip


def fingerprint(state: LoadedState) -> dict[str, Any]:
    """Return the whole state of a partition in comparable form."""
    return {
        "values": state.state.values.tobytes(),
        "slots": [s.tobytes() for s in state.state.slots],
        "steps": state.state.steps,
        "version": state.version,
        "clock": state.clock,
        "memory": state.memory,
        "buffered": [held(h) for h in state.buffered],
        "staged": [held(h) for h in state.staged],
        "settings": state.settings,
        "lsn": state.lsn,
    }


@dataclass
class Recording:
    """The journal of one partition, and its states along the way."""

    spec: ModelSpec
    first: LoadedState
    entries: list[JournalEntry]
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """lsn -> fingerprint of the live partition right after that entry, where one was taken."""
    snapshots: list[LoadedState] = field(default_factory=list)

    def check(self) -> None:
        """Replay from the initial values and from every snapshot; compare wherever there is a fingerprint."""
        assert [e.lsn for e in self.entries] == list(range(1, len(self.entries) + 1))
        for base in (self.first, *self.snapshots):
            run = Replay(KEY, base, self.spec, Layout(self.spec), perform)
            for entry in (None, *self.entries):
                if entry is not None:
                    run.add(entry)
                if run.lsn in self.states:
                    assert fingerprint(run.result()) == self.states[run.lsn], f"after lsn {run.lsn}"
            assert run.lsn == len(self.entries)


class Session:
    """Executes commands on a live partition and takes a fingerprint after each."""

    def __init__(self, start: ModelSpec) -> None:
        self.store = Recorder()
        self.driver = ShardDriver(self.store)
        self.driver.roster = lambda ask: WorkerAnswered(ask.request, ROSTER[ask.worker], live=True)
        self.driver.serve(start, workers=ROSTER)
        self.seq = 0
        effect = LoadPartition(KEY, 1, "init", start, Layout(start))
        self.recording = Recording(start, first_state(effect, lambda n: np.empty(n, np.float32)), self.store.written)
        self.look()

    @property
    def partition(self) -> Any:
        return self.driver.core.models["m"].partitions[0]

    def look(self) -> None:
        """Take a fingerprint of the live partition."""
        capture = LoadedState.of(self.partition.capture())
        self.recording.states[capture.lsn] = fingerprint(capture)

    def gradient(self, n: int = SIZE) -> F32:
        self.seq += 1
        return np.random.default_rng(self.seq).standard_normal(n).astype(np.float32)

    def do(self, command: tuple[Any, ...]) -> None:
        """Execute one command; it may be refused with one of the expected codes."""
        name, *args = command
        code = ""
        try:
            getattr(self, name)(*args)
        except PsError as error:
            code = error.code
        assert code in ("", "invalid_field", "outside_window", "id_reused", "non_finite_result", "worker_required")
        self.look()

    def push(self, worker: int, ahead: int, ranged: bool, lagging: bool, again: bool) -> None:
        seq = max(0, self.seq - 3) if again else self.seq + 1
        if again:
            self.seq -= 1
        ranges = ((1, 3), (4, 5)) if ranged else None
        base = (max(0, self.partition.version - 2), 1) if lagging else None
        data = self.gradient(3 if ranged else SIZE)
        push_id = PushId(WORKERS[worker], 1, seq)
        clock = max(0, self.partition.clock + ahead)
        ranged_by = None if ranges is None else {0: ranges}
        self.driver.push({0: data}, push_id, ranges=ranged_by, base=base, clock=clock, weight=1.0 + worker)

    def keyed(self, key: str) -> None:
        self.driver.push({0: self.gradient().astype(np.float16).astype(np.float32)}, None, key=key)

    def encoded(self, codec: str) -> None:
        data, _ = encode_partition(Codec.parse(codec), self.gradient(), None, None)
        coding = Codec.parse(codec).coding
        part = PushPart(0, data, coding, slice_crc(coding, ((0, SIZE),), data), True)
        request, push_id = self.driver.request(), PushId(WORKERS[0], 1, self.seq)
        self.driver.send(PushReceived("m", (part,), push_id=push_id, clock=self.partition.clock, request=request))
        self.driver.outcome(request)

    def big(self) -> None:
        self.driver.push({0: np.full(SIZE, 3e38, np.float32)}, PushId(WORKERS[0], 1, self.seq + 1), clock=0)
        self.seq += 1

    def commit(self, both: bool) -> None:
        t = self.partition.clock
        workers = WORKERS if both else WORKERS[:1]
        self.driver.commit(t, *(Contribution(w, 1, i, t) for i, w in enumerate(workers)))

    def wait(self, seconds: float) -> None:
        self.driver.advance(seconds)

    def patch(self, change: dict[str, Any]) -> None:
        self.driver.patch(change, clock=self.driver.core.models["m"].clock)

    def begin(self, later: int) -> None:
        """Begin a new timeline of a synchronous model, that many clocks later."""
        view = self.driver.view
        assert view is not None
        clock = self.partition.clock + later
        self.driver.view = replace(view, timeline=view.timeline + 1, clock=clock, began=clock)
        self.driver.send(self.driver.view)

    def assign(self, ranged: bool, restore: bool) -> None:
        data = self.gradient(2 if ranged else SIZE)
        slots = tuple(np.abs(self.gradient()) for _ in self.partition.state.slots) if restore else None
        steps = (3, 4) if restore else None
        version = (
            2 * self.partition.version % 7 if restore else 0
        )  # a checkpoint's version: above the present one or not
        ranges = ((2, 4),) if ranged else None
        part = AssignPart(0, data, "float32", True, ranges and of_pairs(ranges), slots, steps, version=version)
        self.driver.send(SetReceived("m", (part,), restore=restore, request=self.driver.request()))

    def roster(self, gone: bool) -> None:
        assert self.driver.view is not None
        self.driver.send(RosterChanged(self.driver.view.model, {} if gone else ROSTER))

    def snapshot(self) -> None:
        self.recording.snapshots.append(LoadedState.of(self.partition.capture()))


def mode(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return ("patch", {"consistency": {"mode": name, **fields}})


COMMANDS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 1), st.integers(-1, 1), st.booleans(), st.booleans(), st.booleans()),
    st.tuples(st.just("push"), st.integers(0, 1), st.just(0), st.booleans(), st.booleans(), st.just(False)),
    st.tuples(st.just("keyed"), st.sampled_from(("k1", "k2"))),
    st.just(("big",)),
    st.tuples(st.just("encoded"), st.sampled_from(("int8", "topk:0.5"))),
    st.tuples(st.just("commit"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from((0.4, 1.1, 6.0))),
    st.tuples(st.just("assign"), st.booleans(), st.booleans()),
    st.tuples(st.just("roster"), st.booleans()),
    st.just(("snapshot",)),
    st.sampled_from(
        (
            mode("async", lag="scale"),
            mode("buffered", count=3, lag="scale"),
            mode("buffered", count=2),
            mode("sync", late="fold", lag="scale"),
            mode("sync", late="drop"),
            ("patch", {"optimizer": {"lr": 0.3}}),
            ("patch", {"optimizer": {"name": "momentum", "momentum": 0.9}}),
            ("patch", {"optimizer": {"name": "sum"}}),
            ("patch", {"optimizer": {"name": "ftrl", "lr": 0.1}}),
            ("patch", {"optimizer": {"schedule": {"kind": "step", "step_size": 2, "gamma": 0.5}}}),
            ("patch", {"params": {"b": {"trainable": False, "lr_scale": 2.0}}}),
        )
    ),
)


@settings(max_examples=120, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
@given(
    st.sampled_from(("adam", "sum", "ftrl", "adagrad")),
    st.sampled_from(("async", "buffered", "sync")),
    st.lists(COMMANDS, max_size=40),
)
def test_any_prefix_on_any_snapshot_gives_the_live_partition(
    optimizer: str, start: str, commands: list[tuple[Any, ...]]
) -> None:
    """Replaying any prefix of the journal on any snapshot gives the state that the live partition had.

    Compared are values, optimizer state, versions, clocks, windows, keys, staged and buffered parts, and settings.
    """
    session = Session(spec(optimizer, start))

    for command in commands:
        session.do(command)

    session.recording.check()


SCRIPT: tuple[tuple[Any, ...], ...] = (
    ("push", 0, 0, False, False, False),
    ("push", 1, 0, True, True, False),
    ("keyed", "k1"),
    ("encoded", "int8"),
    ("assign", True, False),
    ("snapshot",),
    mode("buffered", count=3, lag="scale"),
    ("push", 0, 0, False, True, False),
    ("push", 1, 0, True, True, False),
    ("push", 1, 0, False, True, False),
    ("push", 0, 0, True, False, False),
    mode("sync", late="fold"),
    ("push", 0, 0, False, False, False),
    ("push", 1, 0, True, False, False),
    ("encoded", "topk:0.5"),
    ("commit", True),
    ("push", 1, -1, False, False, False),
    ("snapshot",),
    ("patch", {"optimizer": {"lr": 0.5}}),
    ("commit", False),
    ("roster", True),
    ("roster", False),
    ("push", 0, 0, False, False, False),
    ("begin", 3),
    ("push", 0, 0, False, False, False),
    mode("async"),
    ("push", 0, 0, False, False, False),
)


def recorded() -> Recording:
    """Return the recording of `SCRIPT`, which has every kind of journal entry."""
    session = Session(spec())
    for command in SCRIPT:
        session.do(command)
    return session.recording


@pytest.mark.parametrize("ready", [True, False])
def test_a_restore_to_a_later_version_is_replayed(ready: bool) -> None:
    """A restore brings the partition to its version or, where that is not beyond, to the next one, in a replay too."""
    session = Session(spec())
    assert session.driver.view is not None
    session.driver.send(replace(session.driver.view, ready=ready))
    for version in (0, 25, 3):
        part = AssignPart(0, session.gradient(), "float32", True, version=version)
        session.driver.send(SetReceived("m", (part,), restore=True, request=session.driver.request()))
        session.look()
    recording = session.recording

    assert [e.head["version"] for e in recording.entries if e.kind == "set"] == [int(ready), 25, 26]
    recording.check()


def test_a_phase_of_sync_begins_at_its_clock_in_the_replay_too() -> None:
    """A model that enters `sync` at a later clock than the partition's is at that clock after a replay."""
    session = Session(spec())
    session.do(("push", 0, 0, False, False, False))
    session.driver.patch({"consistency": {"mode": "sync"}}, clock=7, began=7)
    session.look()

    assert session.partition.clock == 7
    session.recording.check()


def test_the_script_has_every_kind_of_command() -> None:
    """The script makes every kind of journal entry and a snapshot with held parts, which the faults below need."""
    recording = recorded()

    assert {e.kind for e in recording.entries} == set(KINDS)
    assert any(s.buffered for s in recording.snapshots) or any(s.staged for s in recording.snapshots)
    recording.check()


def changed(kind: str, name: str, change: Callable[[Any], Any]) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        for i, entry in enumerate(recording.entries):
            if entry.kind == kind and entry.head.get(name) is not None:
                recording.entries[i] = replace(entry, head={**entry.head, name: change(entry.head[name])})

    return plant


def without(kind: str) -> Callable[[Recording], None]:
    """Return a fault after which replay ignores the entries of a kind."""

    def plant(recording: Recording) -> None:
        for i, entry in enumerate(recording.entries):
            if entry.kind == kind:
                head = {"version": entry.head["version"], "slots": []}
                recording.entries[i] = replace(entry, kind="drop", head=head, arrays=())

    return plant


PLANTED: dict[str, Callable[[Recording], None]] = {
    "another learning rate": changed("push", "rate", lambda x: x * 1.001),
    "another weight": changed("push", "scale", lambda x: x * 2.0),
    "another checksum": changed("push", "crc", lambda x: x ^ 1),
    "another seq": changed("push", "id", lambda x: [x[0], x[1], x[2] + 1]),
    "the ranges forgotten": changed("push", "ranges", lambda x: of_pairs([(0, 3)])),
    "a key forgotten": changed("push", "key", lambda x: "other"),
    "another clock": changed("hold", "clock", lambda x: x + 1),
    "another base": changed("hold", "base", lambda x: [x[0] + 1, x[1]]),
    "another lag factor": changed("flush", "weights", lambda x: [w * 0.5 for w in x]),
    "another divisor": changed("commit", "contributions", lambda x: [*x, ["idle", 1, 2, 0]]),
    "another commit": changed("commit", "t", lambda x: x + 1),
    "another version": changed("push", "version", lambda x: x + 1),
    "settings that do not count": changed("config", "settings", lambda x: x | {"revision": 99}),
    "staged parts kept": changed("config", "unstage", lambda x: False),
    "values elsewhere": changed("set", "ranges", lambda x: of_pairs([(3, 5)])),
    **{f"no {kind}": without(kind) for kind in KINDS if kind not in ("config", "drop")},
    "no drop": changed("drop", "slots", lambda x: []),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_noticed(name: str) -> None:
    """If entries have a wrong number or are ignored, replay raises CorruptState or differs from the live partition."""
    recording = recorded()
    before = list(recording.entries)
    PLANTED[name](recording)
    assert any(a is not b for a, b in zip(recording.entries, before, strict=True)), "nothing was planted"

    with pytest.raises((AssertionError, CorruptState)):
        recording.check()


def test_an_entry_that_is_missing_is_told_by_its_number() -> None:
    """A gap in the journal raises CorruptState with the missing numbers, unless the snapshot contains those entries."""
    recording = recorded()
    layout = Layout(recording.spec)
    del recording.entries[4]

    with pytest.raises(CorruptState, match="entries 5 to 5 are missing"):
        replay(KEY, recording.first, recording.entries, recording.spec, layout, perform)
    later = recording.snapshots[0]
    assert later.lsn >= 5
    assert replay(KEY, later, recording.entries, recording.spec, layout, perform).lsn == recording.entries[-1].lsn


@pytest.mark.parametrize("kind", [*KINDS, "merge"])
def test_a_damaged_head_is_corrupt_state(kind: str) -> None:
    """An entry of an unknown kind or with an incomplete head raises CorruptState, which names the entry."""
    recording = recorded()
    layout = Layout(recording.spec)
    at = next(i for i, e in enumerate(recording.entries) if e.kind == kind) if kind != "merge" else 3
    recording.entries[at] = replace(recording.entries[at], kind=kind, head={"version": 1})

    with pytest.raises(CorruptState, match=f"journal entry {at + 1} "):
        replay(KEY, recording.first, recording.entries, recording.spec, layout, perform)


def test_what_was_replayed_is_durable_and_counted() -> None:
    """A partition without a snapshot counts as stored once entries are replayed, and their bytes are counted."""
    recording = recorded()
    layout = Layout(recording.spec)

    none = replay(KEY, recording.first, (), recording.spec, layout, perform)
    some = replay(KEY, recording.first, recording.entries[:2], recording.spec, layout, perform)

    assert (none.stored, none.replayed_bytes, none.settings) == (False, 0, None)
    assert some.stored
    assert some.replayed_bytes == sum(e.nbytes for e in recording.entries[:2])

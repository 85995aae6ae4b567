"""Sends the parts of one push or pull to all their shards at once, and retries until every part is done.

A shard that no longer owns a partition, or that cannot be reached, only delays the parts that were for it: the map is
fetched again, and the parts that are not done are sent to their current owners, under the same push id.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Final, TypeVar

from msgspec.structs import replace

from paramserver.client.arrays import Origin
from paramserver.client.cluster import Cluster, ModelMap
from paramserver.client.encoding import Draft
from paramserver.client.frames import Incoming, Outgoing, lacks_norm
from paramserver.client.same_host import Leased, Slot, is_same_host
from paramserver.core.selection import Part, Selection
from paramserver.errors import InDoubt, PsError, StaleMapError, Unreachable, problem
from paramserver.limits import BODY_BYTES_MAX, RANGES_PER_REQUEST_MAX
from paramserver.net.calls import (
    Call,
    Deadline,
    Outcome,
    Pause,
    Response,
    TakenTooSlowly,
    error_of,
    json_of,
    json_request,
)
from paramserver.net.retry import NOT_AGAIN, Backoff, is_temporary, may_be_done, result_of, together
from paramserver.types import ITEMSIZE, DType
from paramserver.wire.frame import PullReply, PushReply

T = TypeVar("T")

REQUEST_ELEMENTS_MAX: Final = BODY_BYTES_MAX // max(ITEMSIZE.values())
"""Elements of one request, which fit into a body in any element type; what a partition has always fits."""
REFRESH_S: Final = 2.0
"""How long a call waits for a newer map before it retries with the old one."""
REFRESH_AGAIN_S: Final = 1.0
"""How often a call asks for a newer map, at most, while a shard cannot be reached or serves nobody: another has its
partitions only once its lease has expired, and every worker asks."""
GONE: Final = ("model_replaced", "unknown_model")

Groups = list[tuple[str | None, list[Part]]]
"""Parts by route: a shard's address, or None for the URLs that the client was given."""
Failed = tuple[str | None, list[Part], PsError]
"""A group of parts that were sent, and why they are not done."""


class Transfer:
    """The state of one pull or push while its parts are sent."""

    def __init__(
        self, cluster: Cluster, model_map: ModelMap, selection: Selection, deadline: Deadline, *, reads: bool = True
    ) -> None:
        self.cluster, self.model_map, self.selection, self.deadline = cluster, model_map, selection, deadline
        self._backoff = Backoff(deadline, reads=reads)
        self._moved = 0
        """How often some part could not be done where it was sent."""
        self._refresh_at = 0.0
        """When a newer map may be asked for again."""

    def groups(self, parts: list[Part]) -> tuple[Groups, list[Part]]:
        """Group parts by route; also return those that must wait, because a request has all that it may have."""
        out: dict[str | None, list[Part]] = {}
        has: dict[str | None, tuple[int, int]] = {}
        """Elements and ranges of each request so far."""
        waiting: list[Part] = []
        for part in parts:
            to = self.cluster.route(self.model_map, part.partition)
            size, ranges = has.get(to, (0, 0))
            size, ranges = size + part.stop - part.start, ranges + part.range_count
            bounded = to is None or not self._backoff.reads  # a pull from the owner, who has the values anyway, is not
            if to in out and ((size > REQUEST_ELEMENTS_MAX and bounded) or ranges > RANGES_PER_REQUEST_MAX):
                waiting.append(part)
            else:
                out.setdefault(to, []).append(part)
                has[to] = size, ranges
        return list(out.items()), waiting

    def fits(self) -> bool:
        """Whether one request on each route may have everything."""
        return self.selection.size <= REQUEST_ELEMENTS_MAX or not self.groups(list(self.selection.parts))[1]

    def again(self, failed: Sequence[Failed], waiting: Sequence[Part]) -> Call[list[Part]]:
        """Return the parts to send next, the `waiting` ones and those to send again; backs off first if needed.

        Raises what the shards have refused for good, or the error of `Backoff.final` at the deadline.
        """
        if not failed:
            return in_order(waiting)
        errors = [error for _, _, error in failed if error.code != "slot_gone"]  # retried at once, with another slot
        failures = [e for e in errors if is_temporary(e) or self._is_outdated(e)]
        silence = Unreachable | InDoubt | TakenTooSlowly
        silent = [(to, e) for to, _, e in failed if to is not None and isinstance(e, silence)]
        for to, error in silent:
            if isinstance(error, Unreachable) or not is_same_host(to):
                self.cluster.lost(to, self.deadline.clock())
        self._backoff.in_doubt |= any(map(may_be_done, failures))
        if refusals := [e for e in errors if e not in failures]:
            self._refused(refusals)
        if errors:
            self._moved += 1
            if self._moved > 1 or any(map(is_temporary, errors)):  # an outdated map needs no pause the first time
                yield self._backoff.pause(*failures, *refusals)
            # A shard that serves nobody may have lost all it had, and not be able to join again, or to say so.
            waits = silent or any([e.code == "unavailable" for e in errors])
            told = refusals or any(map(self._is_outdated, errors))
            if told or (waits and self.deadline.clock() >= self._refresh_at):
                self._refresh_at = self.deadline.clock() + REFRESH_AGAIN_S
                yield from self._refresh()
        return in_order([*waiting, *(part for _, parts, _ in failed for part in parts)])

    def _is_outdated(self, error: PsError) -> bool:
        """Whether the request was made from a map that is older than what the shard knows."""
        return isinstance(error, StaleMapError)

    def _refused(self, refusals: Sequence[PsError]) -> None:
        """Raise what the shards' refusals say together."""
        refused = together(refusals)
        if refused.code in GONE:
            self.cluster.forget(self.model_map.name)
        raise refused

    def without_memory(self, lenders: Collection[str]) -> list[Part]:
        """Reach the lenders by their other addresses, because their memory cannot be mapped; return all parts."""
        for address in lenders:
            self.cluster.lost(address, self.deadline.clock(), for_good=True)
        return list(self.selection.parts)

    def of_one_timeline(self, replies: list[PullReply]) -> Call[tuple[list[PullReply], list[Part]]]:
        """Return the replies of the newest timeline, and the parts to pull again because theirs was older.

        During a rollback of a synchronous model, some shards learn of the new timeline before others.
        """
        newest = max(r.timeline for r in replies)
        kept = [r for r in replies if r.timeline == newest]
        have = {p for r in kept for p, _, _ in r.parts}
        older = [p for p in self.selection.parts if p.partition not in have]
        if older:
            yield self.pause(problem("unavailable", "the model is going back to an earlier clock"))
        return kept, older

    def pause(self, error: PsError) -> Pause:
        """Return the pause before everything is tried again, or raise the call's final error: see `Backoff.pause`."""
        return self._backoff.pause(error)

    def _refresh(self) -> Call[None]:
        """Adopt a newer map if a scheduler answers soon; without one, the shards still serve.

        Whatever else answers in its place is no news either, of a push that some shards may have.
        """
        soon = Deadline.after(min(REFRESH_S, self.deadline.left_s()), self.deadline.clock)
        try:
            fresh = yield from self.cluster.map_of(self.model_map.name, soon, newer_than=self.model_map)
        except PsError as e:
            if e.code in GONE:
                raise
            return
        if fresh.generation != self.model_map.generation:
            raise problem("model_replaced", f"model '{fresh.name}' was deleted and created again", hint="pull again")
        self.model_map = fresh


class PushTransfer(Transfer):
    """The state of one push, alone or with a pull in its answers."""

    def __init__(
        self, cluster: Cluster, model_map: ModelMap, outgoing: Outgoing, deadline: Deadline, draft: Draft | None
    ) -> None:
        super().__init__(cluster, model_map, outgoing.selection, deadline, reads=False)
        self._outgoing = outgoing
        self._accepted: list[int] = []
        """Partitions that have accepted their part."""
        self._states: set[str] = set()
        """What they have made of it: `Pushed.state`."""
        self._modes = {model_map.spec.consistency.mode}
        """All modes that the model is known to have been in during this call."""
        # In sync a push counts on all partitions or on none, so the draft cannot settle parts one by one.
        self._draft = draft if draft is not None and model_map.spec.consistency.mode != "sync" else None

    def accepted(self, parts: Sequence[Part], state: str) -> None:
        """Note that a shard has accepted these parts, as applied, staged or buffered."""
        partitions = [p.partition for p in parts]
        self._accepted += partitions
        self._states.add(state)
        self._backoff.in_doubt = True
        if self._draft is not None:
            self._draft.accepted(partitions)

    def _is_outdated(self, error: PsError) -> bool:
        return super()._is_outdated(error) or self._outgoing.may_add_norm(error)

    def _refresh(self) -> Call[None]:
        yield from super()._refresh()
        self._modes.add(self.model_map.spec.consistency.mode)

    def _refused(self, refusals: Sequence[PsError]) -> None:
        """Raise what the shards' refusals say together, unless the push can go on in spite of them."""
        if self._became_sync(refusals):
            self._outgoing.go_on_in(refusals[0])
            return
        refused = together(refusals)
        gone = refused.code in GONE
        if gone or any(map(lacks_norm, refusals)):
            self.cluster.forget(self.model_map.name)
        self._outgoing.explain(refused)
        if not gone:
            self._raise_in_part(refused)
        raise refused

    def _became_sync(self, refusals: Sequence[PsError]) -> bool:
        """Whether shards refuse a push that others have, or may have, because the model has just become synchronous.

        It goes on under the new timeline then, so that it counts on every partition: no error could be acted upon.
        """
        if {e.code for e in refusals} != {"rolled_back"}:
            return False
        if self._states:  # the map may know the new mode before the shards do
            return "staged" not in self._states
        in_part = self._backoff.in_doubt or any(e.members.get("partitions") for e in refusals)
        return in_part and "sync" not in self._modes

    def _raise_in_part(self, refused: PsError) -> None:
        """Raise InDoubt if other shards have, or may have, accepted the push that one has refused.

        Pushed again, the gradient would count twice there.  If the push is only staged, it counts on all partitions or
        on none: then the refusal itself is raised, with the `partitions` that have accepted their parts.
        """
        accepted = sorted({*self._accepted, *refused.members.get("partitions", ())})
        if not (accepted or self._backoff.in_doubt):
            return
        if self._modes == {"sync"} and self._states <= {"staged"}:
            raise refused.plus(partitions=accepted)
        who = f"partitions {accepted} have the push" if accepted else "an earlier attempt may be applied"
        raise problem(
            "in_doubt",
            f"{refused.detail}; {who}",
            hint=NOT_AGAIN,
            refused=refused.code,
            partitions=accepted,
        ) from refused

    def _slots(self, groups: Groups, found: dict[str | None, Slot]) -> Call[None]:
        """Find a slot for each group of parts that is worth one, and add it to `found`; the other groups are sent."""
        wanted: list[tuple[str, int]] = []
        for to, parts in groups:
            size = self._outgoing.slot_bytes(to, parts)
            if to is None or not size:
                continue
            slot = self._outgoing.slot_holding(to, parts) or self.cluster.same_host.slot(to, size)
            if slot is None:
                wanted.append((to, size))
            else:
                found[to] = slot
        if wanted:
            asked = [replace(json_request("POST", "/slots", {"bytes": size}), to=to) for to, size in wanted]
            outcomes = yield [self.deadline.bound(r) for r in asked]
            for (to, size), outcome in zip(wanted, outcomes, strict=True):
                if isinstance(outcome, Response) and outcome.status == 200:
                    slot = self.cluster.same_host.map_slot(to, str(json_of(outcome)["slot"]), size)
                    if slot is not None:
                        found[to] = slot

    def sent(
        self, groups: Groups, pull: DType | None = None, sinks: Sequence[Incoming] = (), *, more: bool = False
    ) -> Call[list[Outcome]]:
        """Send the push, or with `pull` a pushpull in that dtype into `sinks`, and return the outcome of each group.

        `more`: other parts of the push will follow.
        Slots that belong to this client again afterwards are kept, the others abandoned.
        """
        slots: dict[str | None, Slot] = {}
        begun, outcomes = False, []
        try:
            yield from self._slots(groups, slots)  # if this is interrupted, `slots` has those found so far
            bare = self._outgoing.requests(self.model_map, groups, slots, pull, more=more)
            requests = [self.deadline.bound(r, s) for r, s in zip_longest(bare, sinks)]
            begun = True
            outcomes = yield requests
            return outcomes
        finally:  # if the requests were interrupted, their slots may still be read and are abandoned
            for i, (to, parts) in enumerate(groups):
                if (slot := slots.get(to)) is None:
                    continue
                ours = not begun or (bool(outcomes) and _is_over(outcomes[i], sinks[i] if sinks else None))
                memory = self._outgoing.memory
                if memory is not None and (begun or slot.mapped):  # otherwise its contents may be incomplete
                    memory.push_ended(slot, parts, ours=ours)
                elif ours:
                    self.cluster.same_host.keep(slot)

    def remember(self, replies: Sequence[PushReply], leased: Sequence[Leased], clock: int) -> None:
        """Keep the values that a push has produced, if all of them are leased: the next pull may want them.

        sync: the values include at least `clock` commits.
        """
        values = self.cluster.same_host.hold(leased)  # if it is not kept below, its leases end
        versions = {p: (v, i) for r in replies for p, v, i, _ in r.parts}
        timelines = {r.timeline for r in replies}
        if len(timelines) == 1 and sum(len(lease.pieces) for lease in leased) == self.model_map.spec.partitions:
            origin = Origin.of(self.model_map.name, self.model_map.generation, timelines.pop(), versions)
            self.cluster.lease_cache.keep(origin, values, clock, pushed=True)


def in_order(parts: Iterable[Part]) -> list[Part]:
    """Return the parts in order of partition, as requests list them."""
    return sorted(parts, key=lambda part: part.partition)


def good_and_failed(
    groups: Groups, outcomes: list[Outcome], read: Callable[[Response], T], *, reads: bool
) -> tuple[list[tuple[int, T]], list[Failed]]:
    """Return what `read` makes of the groups' good outcomes, as (index, T), and the groups that failed.

    `reads`: the requests change nothing.
    """
    good: list[tuple[int, T]] = []
    failed: list[Failed] = []
    for i, ((to, parts), outcome) in enumerate(zip(groups, outcomes, strict=True)):
        result = result_of(outcome, read, reads=reads)
        if isinstance(result, PsError):
            failed.append((to, parts, result))
        else:
            good.append((i, result))
    return good, failed


def _is_over(outcome: Outcome, sink: Incoming | None) -> bool:
    """Whether a push was applied or refused for good, so that its slot belongs to this client again."""
    if not isinstance(outcome, Response):
        return False
    over = outcome.status == 200
    if over and sink is not None:
        pushed = None if sink.reply is None else sink.reply.push
        over = pushed is not None and (pushed.state == "applied" or pushed.released)
    if not over and 400 <= outcome.status < 500:
        error = error_of(outcome)
        over = error.code != "slot_gone" and not may_be_done(error)
    return over

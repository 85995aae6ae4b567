"""Push, pull and pushpull of one model, to all shards they concern at once.

A shard that refuses because it no longer owns a partition, or that cannot be reached, only delays the parts it was to
have: the map is fetched anew and what is not done yet is sent again, to whoever owns it then, under the same push id.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, cast

import numpy as np
from msgspec.structs import replace

from paramserver.client.arrays import HANDED_OUT, Origin, Params
from paramserver.client.arrivals import Arrivals
from paramserver.client.calls import (
    POLL_S,
    Call,
    Deadline,
    Outcome,
    Pause,
    Response,
    error_of,
    json_of,
    json_request,
)
from paramserver.client.cluster import Cluster, ModelMap
from paramserver.client.encoding import Draft, Feedback, drafted, ready
from paramserver.client.frames import (
    Incoming,
    Outgoing,
    PullTerms,
    PushTerms,
    leased_by,
    pull_request,
    push_reply,
)
from paramserver.client.gradients import Grads
from paramserver.client.pushed import Pushed, summed
from paramserver.client.retry import Backoff, judged, may_be_done, passes
from paramserver.client.same_host import Leased, Slot
from paramserver.codecs.codec import Codec
from paramserver.core.selection import Names, Part, Ranges, Selection, listed, select
from paramserver.errors import ConflictError, InDoubt, PsError, StaleMapError, Unavailable, Unreachable, problem
from paramserver.types import ITEMSIZE, AnyArray, DType
from paramserver.wire.frame import PullReply, PushReply

REFRESH_S: Final = 2.0
"""How long a call waits for a new map before it tries again by the old one."""
_WIDTH: Final = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}


class Transfer:
    """The sends of one call, kept until every part is done."""

    def __init__(
        self, cluster: Cluster, held: ModelMap, selection: Selection, deadline: Deadline, draft: Draft | None = None
    ) -> None:
        self.cluster, self.held, self.selection, self.deadline = cluster, held, selection, deadline
        self._backoff = Backoff(deadline)
        self._moved = 0
        # In sync a push counts on all partitions or on none, which is known at its end.
        self._draft = draft if draft is not None and held.spec.consistency.mode != "sync" else None

    def groups(self, parts: list[Part]) -> list[tuple[str | None, list[Part]]]:
        """The parts by the way they take."""
        out: dict[str | None, list[Part]] = {}
        for part in parts:
            out.setdefault(self.cluster.route(self.held, part.partition), []).append(part)
        return list(out.items())

    def settle(
        self,
        groups: list[tuple[str | None, list[Part]]],
        outcomes: list[Outcome],
        outgoing: Outgoing | None = None,
    ) -> Call[tuple[list[tuple[int, Response]], list[Part]]]:
        """Sort outcomes into the good ones (index, response) and the parts to send again, after a pause if any.

        Raises the first refusal that trying again cannot change, or the failure that outlasted the deadline.
        """
        good: list[tuple[int, Response]] = []
        again: list[Part] = []
        failures: list[PsError] = []
        stale = False
        refused: PsError | None = None
        for i, ((to, parts), outcome) in enumerate(zip(groups, outcomes, strict=True)):
            result = judged(outcome)
            if isinstance(result, Response):
                good.append((i, result))
                if self._draft is not None:
                    self._draft.accepted([p.partition for p in parts])
                continue
            again += parts
            if isinstance(result, StaleMapError):
                stale = True
                failures.append(result)
            elif result.code == "slot_gone":
                continue  # another slot is asked for at once
            elif passes(result):
                stale = stale or (to is not None and isinstance(result, Unreachable | InDoubt))
                if to is not None and isinstance(result, Unreachable):
                    self.cluster.lost(to, self.deadline.clock())
                failures.append(result)
            else:
                refused = refused or result
        if refused is not None:
            if refused.code in ("model_replaced", "unknown_model"):
                self.cluster.forget(self.held.name)
            if outgoing is not None:
                outgoing.explain(refused)
            raise refused
        if failures:
            done = outgoing is not None and bool(good)  # of a push, on some partitions
            self._backoff.in_doubt = self._backoff.in_doubt or done or any(map(may_be_done, failures))
            moved_once = all(isinstance(f, StaleMapError) for f in failures) and self._moved == 0
            self._moved += 1
            if not moved_once:  # a first 421 is answered at once with a fresh map; everything else waits
                yield self._backoff.pause(failures[0])
            if stale:
                yield from self._refresh()
        again.sort(key=lambda p: p.partition)
        return good, again

    def _slots(self, outgoing: Outgoing, groups: list[tuple[str | None, list[Part]]]) -> Call[dict[str | None, Slot]]:
        """A slot for each way on this machine that is worth one; what gets none is sent."""
        found: dict[str | None, Slot] = {}
        wanted: list[tuple[str, int]] = []
        for to, parts in groups:
            size = outgoing.slot_bytes(to, parts)
            if to is None or not size:
                continue
            slot = outgoing.lies_in(to, parts) or self.cluster.same_host.slot(to, size)
            if slot is None:
                wanted.append((to, size))
            else:
                found[to] = slot
        if wanted:
            asked = [replace(json_request("POST", "/slots", {"bytes": size}), to=to) for to, size in wanted]
            outcomes = yield [self.deadline.bound(r) for r in asked]
            for (to, size), outcome in zip(wanted, outcomes, strict=True):
                if isinstance(outcome, Response) and outcome.status == 200:
                    slot = self.cluster.same_host.lent(to, str(json_of(outcome)["slot"]), size)
                    if slot is not None:
                        found[to] = slot
        return found

    def sent(
        self,
        outgoing: Outgoing,
        groups: list[tuple[str | None, list[Part]]],
        pull: PullTerms | None = None,
        sinks: Sequence[Incoming] = (),
    ) -> Call[list[Outcome]]:
        """The outcomes of a push, or with `pull` of a pushpull into `sinks`, by each way; slots are kept, or left."""
        slots = yield from self._slots(outgoing, groups)
        begun, outcomes = False, []
        try:
            bare = outgoing.requests(self.held, groups, slots, pull, 0.0)
            requests = [self.deadline.bound(r, s) for r, s in zip_longest(bare, sinks)]
            begun = True
            outcomes = yield requests
            return outcomes
        finally:  # whoever is interrupted knows nothing of any slot
            for i, (to, parts) in enumerate(groups):
                if (slot := slots.get(to)) is None:
                    continue
                ours = not begun or (bool(outcomes) and _is_over(outcomes[i], sinks[i] if sinks else None))
                if outgoing.place is not None and (begun or slot.lies):  # else who knows what was written to it
                    outgoing.place.settled(slot, parts, ours=ours)
                elif ours:
                    self.cluster.same_host.keep(slot)

    def without_memory(self, arrivals: Arrivals) -> list[Part]:
        """What shards lent cannot be mapped here: they are reached by their other addresses; all parts anew."""
        for address in arrivals.lenders:
            self.cluster.lost(address, self.deadline.clock())
        return list(self.selection.parts)

    def remember(self, replies: Sequence[PushReply], leased: Sequence[Leased]) -> None:
        """Keep what a push has made, where all shards have lent it: the next pull may want it."""
        held = self.cluster.same_host.hold(leased)  # what is not kept is over with this
        versions = {p: (v, i) for r in replies for p, v, i, _ in r.parts}
        timelines = {r.timeline for r in replies}
        if len(timelines) == 1 and sum(len(lease.pieces) for lease in leased) == self.held.spec.partitions:
            origin = _origin(self.held.name, self.held.generation, timelines.pop(), versions)
            self.cluster.present.pushed(origin, held)

    def of_one_timeline(self, replies: list[PullReply]) -> Call[tuple[list[PullReply], list[Part]]]:
        """The replies of the newest timeline, and the parts to pull again because theirs was older.

        While a synchronous model goes back to an earlier clock, some shards hear of it a moment before the others.
        """
        newest = max(r.timeline for r in replies)
        kept = [r for r in replies if r.timeline == newest]
        have = {p for r in kept for p, _, _ in r.parts}
        older = [p for p in self.selection.parts if p.partition not in have]
        if older:
            yield self._backoff.pause(problem("unavailable", "the model is going back to an earlier clock"))
        return kept, older

    def _refresh(self) -> Call[None]:
        """Take up a newer map if a scheduler tells one soon; shards serve on without it."""
        soon = Deadline.after(min(REFRESH_S, self.deadline.left_s()), self.deadline.clock)
        try:
            fresh = yield from self.cluster.map_of(self.held.name, soon, newer_than=self.held)
        except Unavailable:
            return
        if fresh.generation != self.held.generation:
            raise problem("model_replaced", f"model '{fresh.name}' was created anew meanwhile", hint="pull again")
        self.held = fresh


def _is_over(outcome: Outcome, sink: Incoming | None) -> bool:
    """Whether a push was applied or refused for good, so that its slot is this client's again."""
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


def wire_dtype(selection: Selection, dtype: str | None) -> DType:
    """In which dtype a pull travels: as asked, or the widest of the parameters'."""
    if dtype is not None and dtype not in ITEMSIZE:
        raise problem("invalid_dtype", f"dtype '{dtype}' cannot be pulled", hint=f"one of {', '.join(ITEMSIZE)}")
    if dtype is None:
        kinds = {p.dtype for p in selection.params}
        dtype = kinds.pop() if len(kinds) == 1 else max("float32", *kinds, key=lambda d: _WIDTH[d])
    return cast(DType, dtype)


def pull(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    *,
    names: Names | None = None,
    ranges: Ranges | None = None,
    out: Params | None = None,
    dtype: str | None = None,
    min_version: int = 0,
    wait_s: float = 0.0,
    timeline: int | None = None,
    view: bool = False,
) -> Call[Params]:
    """The present values of the elements chosen; waits up to `wait_s` for `min_version`.

    `view`: they may be read-only memory of shards on this machine.

    Raises NotFoundError, ConflictError (`version_not_reached`), or Unavailable when the deadline passes.
    """
    held = yield from cluster.map_of(model, deadline)
    selection = select(held.layout, *listed(names, ranges))
    whole = selection.size == held.layout.size
    terms = PullTerms(wire_dtype(selection, dtype), min_version, timeline, whole)
    lendable = whole and terms.dtype == "float32"
    if lendable and (known := cluster.present.of(model, held.generation, timeline, min_version)) is not None:
        values = known[0].values()
        if values is not None:
            return _lent(selection, values, known[1], out, view=view)
    flat = _memory(selection, terms.dtype, out)
    transfer = Transfer(cluster, held, selection, deadline)
    wait_until = deadline.clock() + float(wait_s)
    arrivals, found = Arrivals(cluster.same_host, held.layout), None
    replies: list[PullReply] = []
    pending = list(selection.parts)
    while pending:
        groups = transfer.groups(pending)
        left_s = max(0.0, min(wait_until - deadline.clock(), deadline.left_s(), POLL_S))
        sinks = [Incoming(selection, parts, flat, terms.dtype) for _, parts in groups]
        requests = [
            deadline.bound(pull_request(transfer.held, to, parts, terms, left_s, sink, cluster.same_host))
            for (to, parts), sink in zip(groups, sinks, strict=True)
        ]
        outcomes = yield requests
        try:
            good, pending = yield from transfer.settle(groups, outcomes)
        except ConflictError as e:
            if e.code != "version_not_reached" or deadline.clock() >= wait_until or deadline.left_s() <= 0:
                raise
            yield Pause(0.01)
            continue
        replies += [arrivals.read(sinks[i], groups[i][0]) for i, _ in good]
        if not pending:
            replies, pending = yield from transfer.of_one_timeline(replies)
        if not pending:
            found = arrivals.gather(selection, flat, view=view and out is None)
            if found is None:
                replies, pending = [], transfer.without_memory(arrivals)
                arrivals = Arrivals(cluster.same_host, held.layout)
    assert found is not None
    params = _params(selection, found, out, model, replies)
    if lendable and arrivals.held is not None:
        cluster.present.pulled(params.origin, arrivals.held)
    return params


def _lent(selection: Selection, values: AnyArray, origin: Origin, out: Params | None, *, view: bool) -> Params:
    """Values that are at hand already, as a pull hands them out."""
    flat = values
    if not view or out is not None:
        flat = _memory(selection, "float32", out)
        flat[...] = values
    return _handed_out(selection, flat, out, origin)


def push(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    ranges: Ranges | None = None,
    dtype: str | None = None,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    partitions: frozenset[int] | None = None,
) -> Call[Pushed]:
    """Deliver a gradient exactly once to every partition it touches, or to those of `partitions` alone."""
    held = yield from cluster.map_of(model, deadline)
    with drafted(feedback) as draft:  # given back where the push fails
        gradient = ready(held.layout, held.generation, grads, ranges, dtype, codec, draft, partitions)
        whole = partitions is None and gradient.selection.size == held.layout.size
        if not whole and terms.ends_s is not None:
            terms = replace(terms, ends_s=None)  # what it does not touch may take the commit later
        mapped = whole and cluster.present.wanted(model)
        outgoing = Outgoing(gradient, _based(terms, held), cluster.same_host, mapped=mapped)
        transfer = Transfer(cluster, held, gradient.selection, deadline, draft)
        replies: list[PushReply] = []
        leased: list[Leased] = []
        pending = list(gradient.selection.parts)
        while pending:
            groups = transfer.groups(pending)
            outcomes = yield from transfer.sent(outgoing, groups)
            good, pending = yield from transfer.settle(groups, outcomes, outgoing)
            for i, response in good:
                replies.append(push_reply(response))
                if (lease := leased_by(replies[-1], groups[i][0], held.layout)) is not None:
                    leased.append(lease)
        if leased:
            transfer.remember(replies, leased)
        pushed = summed(replies)
        if pushed.late and draft is not None:
            draft.give_back()  # nothing of it will be applied on any partition
        return pushed


def pushpull(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    out: Params | None = None,
    ranges: Ranges | None = None,
    dtype: str | None = None,
    codec: Codec | None = None,
) -> Call[tuple[Pushed, Params]]:
    """A push, and in the same round trip a pull of what the model is then.

    The pull is of the whole model; partitions that the gradient does not touch are pulled beside it.
    """
    options: dict[str, Any] = {"ranges": ranges, "dtype": dtype, "codec": codec}
    pushed, params = yield from exchange(cluster, model, deadline, grads, terms, out=out, **options)
    if params is None:
        params = yield from after_push(pull(cluster, model, deadline, out=out))
    return pushed, params


def after_push(pulling: Call[Params]) -> Call[Params]:
    """What a pull brings that is asked for besides a push which was accepted; raises InDoubt where it fails, for who is
    told that nobody could be reached would push again."""
    try:
        return (yield from pulling)
    except Unavailable as e:
        if isinstance(e, InDoubt):
            raise
        detail = f"the push was accepted, the pull after it failed: {e.detail}"
        raise problem("in_doubt", detail, hint=e.hint) from e


def exchange(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    out: Params | None = None,
    view: bool = False,
    ranges: Ranges | None = None,
    dtype: str | None = None,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
) -> Call[tuple[Pushed, Params | None]]:
    """A push, and what the model is then where one round trip can bring it; otherwise it is still to be pulled.

    It cannot for a gradient of some partitions only, and where a push ends its worker's iteration which was not
    `released` in time.
    """
    held = yield from cluster.map_of(model, deadline)
    if ranges is not None:
        ranges = listed(None, ranges)[1]
    with drafted(feedback) as draft:  # given back where the push fails
        gradient = ready(held.layout, held.generation, grads, ranges, dtype, codec, draft)
        selection = gradient.selection
        if len(selection.params) < len(held.spec.params) or selection.ranged:
            if draft is not None:
                draft.give_back()
            check_out(held, out)
            how: Any = {"ranges": ranges, "dtype": dtype, "codec": codec, "feedback": feedback}
            return (yield from push(cluster, model, deadline, grads, terms, **how)), None
        pull_terms = PullTerms(wire_dtype(selection, None), timeline=terms.timeline, whole=True)
        flat = _memory(selection, pull_terms.dtype, out)
        outgoing = Outgoing(gradient, _based(terms, held), cluster.same_host)
        transfer = Transfer(cluster, held, selection, deadline, draft)
        arrivals = Arrivals(cluster.same_host, held.layout)
        replies: list[PullReply] = []
        pending = list(selection.parts)
        while pending:
            groups = transfer.groups(pending)
            sinks = [Incoming(selection, parts, flat, pull_terms.dtype) for _, parts in groups]
            outcomes = yield from transfer.sent(outgoing, groups, pull_terms, sinks)
            good, pending = yield from transfer.settle(groups, outcomes, outgoing)
            replies += [arrivals.read(sinks[i], groups[i][0]) for i, _ in good]
        pushed = summed([r.push for r in replies if r.push is not None])
        if pushed.late and draft is not None:
            draft.give_back()
        if terms.ends_s is not None and not pushed.released:
            arrivals.drop()  # of shards that had the commit in time
            return pushed, None
        found = arrivals.gather(selection, flat, view=view and out is None)
        if found is None:
            transfer.without_memory(arrivals)
        if found is None or len({r.timeline for r in replies}) > 1:
            return pushed, None
        params = _params(selection, found, out, model, replies)
        if arrivals.held is not None:
            cluster.present.pulled(params.origin, arrivals.held)
        return pushed, params


def _based(terms: PushTerms, held: ModelMap) -> PushTerms:
    """The terms with base versions per partition, where `base` is a pull of this creation of the model."""
    base = terms.base
    if base is None or (isinstance(base, Mapping) and not isinstance(base, Params)):
        return terms
    if not isinstance(base, Params):
        raise problem("invalid_field", f"base must be what pull() returned, not {type(base).__name__}")
    origin = base.origin
    if origin.model != held.name:
        raise problem("invalid_field", f"base was pulled from '{origin.model}', the push is to '{held.name}'")
    return replace(terms, base=origin.versions if origin.generation == held.generation else None)


def check_out(held: ModelMap, out: Params | None) -> None:
    """Before a push: raise RequestError where the pull of the whole model that follows it could not go into `out`."""
    if out is not None:
        whole = select(held.layout)
        _memory(whole, wire_dtype(whole, None), out)


def _memory(selection: Selection, dtype: DType, out: Params | None) -> AnyArray:
    if out is None:
        return np.empty(selection.size, HANDED_OUT[dtype])
    if not isinstance(out, Params):
        raise problem("invalid_field", f"out must be what pull() returned, not {type(out).__name__}")
    if not out.fits(selection, HANDED_OUT[dtype]):
        hint = "its parameters, shapes, ranges and dtype must be those of this pull, and it must be writable"
        raise problem("invalid_shape", "out cannot take what this pull returns", hint=hint)
    return out.flat


def _params(selection: Selection, flat: AnyArray, out: Params | None, model: str, replies: list[PullReply]) -> Params:
    versions = {p: (v, i) for r in replies for p, v, i in r.parts}
    origin = _origin(model, replies[0].generation, max([r.timeline for r in replies]), versions)
    return _handed_out(selection, flat, out, origin)


def _handed_out(selection: Selection, flat: AnyArray, out: Params | None, origin: Origin) -> Params:
    return out.refreshed(origin) if out is not None else Params(selection, flat, origin)


def _origin(model: str, generation: int, timeline: int, versions: Mapping[int, tuple[int, int]]) -> Origin:
    oldest, newest = min([v for v, _ in versions.values()]), max([i for _, i in versions.values()])
    return Origin(model, generation, timeline, oldest, newest, versions)

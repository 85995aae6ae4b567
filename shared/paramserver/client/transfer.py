"""Push, pull and pushpull of one model, as calls; `sends` delivers the parts to their shards."""

from typing import Final, cast

from msgspec.structs import replace

from paramserver.client.arrays import Params
from paramserver.client.arrivals import Arrivals, memory
from paramserver.client.cluster import Cluster, ModelMap
from paramserver.client.encoding import NO_ENCODING, Content, Draft, Encoding, apart_from, draft_for, ready
from paramserver.client.frames import (
    Outgoing,
    OwnBase,
    PullTerms,
    PushTerms,
    in_sink,
    leased_by,
    pull_request,
    push_reply,
)
from paramserver.client.gradients import Grads
from paramserver.client.pushed import Pushed, summed
from paramserver.client.rows import Rows, arranged, chosen, ids_of, with_rows
from paramserver.client.same_host import Leased
from paramserver.client.sends import GONE, PushTransfer, Transfer, good_and_failed
from paramserver.client.values import sendable
from paramserver.core.fields import NUMBER_MAX, whole_number
from paramserver.core.selection import Names, Ranges, Selection, listed, select
from paramserver.errors import PsError, problem
from paramserver.net.calls import POLL_S, Call, Deadline, Pause, plain, seconds
from paramserver.types import LEVELS, DType, DTypeLike
from paramserver.wire.frame import PushReply

ANSWER_S: Final = 1.0
"""Time of a pull that no node is asked to wait in, so that its answer comes before the deadline; at most a fifth.  The
answer to a worker who waits for others may come so long after it, because it says whom for."""
_WIDTH: Final = {"bfloat16": 1, "float16": 1, "float32": 2, "float64": 3}


def wire_dtype(selection: Selection, dtype: DTypeLike | None) -> DType:
    """Return the dtype in which pulled values are sent: the one asked for, or the widest of the parameters'."""
    if dtype is not None:
        return sendable(dtype, "pulled")
    kinds = {p.dtype for p in selection.params}
    return cast(DType, kinds.pop() if len(kinds) == 1 else max("float32", *kinds, key=lambda d: _WIDTH[d]))


def pull(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    *,
    names: Names | None = None,
    ranges: Ranges | None = None,
    rows: Rows | None = None,
    out: Params | None = None,
    dtype: DTypeLike | None = None,
    min_version: int = 0,
    min_clock: int = 0,
    wait_s: float = 0.0,
    timeline: int | None = None,
    view: bool = False,
) -> Call[Params]:
    """Pull the current values of the selected elements.

    Waits up to `wait_s`, and not to the deadline, for `min_version` and, in sync, `min_clock`.  `view`: the values may
    be read-only memory of shards on this machine.  Raises NotFoundError, ConflictError (`version_not_reached`), or
    Unavailable at the deadline.
    """
    min_version, wait_s = whole_number("min_version", min_version), seconds(wait_s, "wait_s")
    model_map = yield from cluster.map_of(model, deadline)
    names, ranges = listed(names, ranges)
    asked = chosen(model_map.layout, ids_of(rows)) if rows else {}
    if asked:
        if out is not None:
            raise problem("invalid_field", "out= and rows= exclude each other")
        ranges = with_rows(model_map.layout, ranges, asked, probe=names is None)
    selection = select(model_map.layout, names, ranges)
    whole = selection.size == model_map.layout.size
    terms = PullTerms(wire_dtype(selection, dtype), min_version, timeline, whole, min_clock)
    arrivals = Arrivals(cluster.same_host, model_map.layout, selection, terms.dtype, out, view=view)
    lendable = whole and terms.dtype == "float32"
    if lendable:
        known = cluster.lease_cache.lookup(model, model_map.generation, timeline, min_version, min_clock)
        if known is not None and (values := known[0].values()) is not None:
            return arranged(arrivals.known(values, known[1]), asked)
    transfer = Transfer(cluster, model_map, selection, deadline)
    spare_s = min(ANSWER_S, deadline.left_s() / 5)  # kept for the answer, which would come after the deadline
    wait_until = deadline.clock() + min(wait_s, deadline.left_s() - spare_s)
    params: Params | None = None
    pending = list(selection.parts)
    try:
        while pending:
            groups, waiting = transfer.groups(pending)
            left_s = max(0.0, min(wait_until - deadline.clock(), POLL_S))
            sinks = arrivals.sinks(groups)
            requests = [
                deadline.bound(pull_request(transfer.model_map, to, parts, terms, left_s, sink, cluster.same_host))
                for (to, parts), sink in zip(groups, sinks, strict=True)
            ]
            good, failed = good_and_failed(groups, (yield requests), in_sink, reads=True)
            try:
                pending = yield from transfer.again(failed, waiting)
            except PsError as e:
                if e.code != "version_not_reached" or deadline.clock() >= wait_until:
                    raise
                arrivals.release_unread()
                yield Pause(0.01)
                continue
            for i, _ in good:
                arrivals.read(sinks[i])
            if not pending:
                arrivals.replies, pending = yield from transfer.of_one_timeline(arrivals.replies)
            if not pending and (params := arrivals.params(model)) is None:
                pending, lacked = transfer.without_memory(arrivals.unmappable), arrivals.lacked
                arrivals.start_over()
                if lacked is not None:
                    yield transfer.pause(lacked)
    except BaseException:  # also if the caller is interrupted: it was cancelled, or by Ctrl-C
        arrivals.release_all()
        raise
    assert params is not None
    if lendable and arrivals.leased_values is not None:
        cluster.lease_cache.keep(params.origin, arrivals.leased_values, min_clock)
    return arranged(params, asked)


def push(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    encoding: Encoding = NO_ENCODING,
    partitions: frozenset[int] | None = None,
) -> Call[Pushed]:
    """Deliver a gradient exactly once to every partition it touches, or only to those in `partitions`."""
    model_map = yield from cluster.map_of(model, deadline)
    with draft_for(encoding.feedback) as draft:  # restored if the push fails
        gradient = ready(model_map.layout, model_map.generation, grads, encoding, draft, partitions)
        piece = partitions is not None
        return (yield from _push(cluster, model_map, deadline, gradient, terms, draft, piece=piece))


def _push(
    cluster: Cluster,
    model_map: ModelMap,
    deadline: Deadline,
    gradient: Content,
    terms: PushTerms,
    draft: Draft | None,
    *,
    piece: bool = False,
) -> Call[Pushed]:
    """Deliver a gradient that is ready to be sent; `piece`: it is only a part of what the push will have delivered."""
    whole = not piece and gradient.selection.size == model_map.layout.size
    if not whole and terms.commit_wait_s is not None:
        terms = replace(terms, commit_wait_s=None)  # partitions that it does not touch may take the commit later
    mapped = whole and cluster.lease_cache.should_request_values(model_map.name)
    outgoing = Outgoing(gradient, _based(terms, model_map), cluster.same_host, mapped=mapped, piece=piece)
    transfer = PushTransfer(cluster, model_map, outgoing, deadline, draft)
    replies: list[PushReply] = []
    leased: list[Leased] = []
    pending = list(gradient.selection.parts)
    try:
        while pending:
            groups, waiting = transfer.groups(pending)
            outcomes = yield from transfer.sent(groups, more=bool(waiting))
            good, failed = good_and_failed(groups, outcomes, push_reply, reads=False)
            for i, reply in good:
                to, parts = groups[i]
                transfer.accepted(parts, reply.state)
                replies.append(reply)
                if (lease := leased_by(reply, to, model_map.layout)) is not None:
                    leased.append(lease)
            pending = yield from transfer.again(failed, waiting)
    except BaseException:  # also if the caller is interrupted
        cluster.same_host.end_leases(leased)
        raise
    pushed = summed(replies)
    if leased:
        transfer.remember(replies, leased, _reached(pushed, terms))
    if pushed.late and draft is not None:
        draft.give_back()  # the push will not be applied on any partition
    return pushed


def pushpull(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    encoding: Encoding = NO_ENCODING,
    out: Params | None = None,
) -> Call[tuple[Pushed, Params]]:
    """Push a gradient and pull the whole model after it.

    This takes one round trip if the gradient covers the whole model (see `exchange`), else a pull follows the push.
    """
    pushed, params = yield from exchange(cluster, model, deadline, grads, terms, encoding=encoding, out=out)
    if params is None:
        params = yield from after_push(pull(cluster, model, deadline, out=out))
    return pushed, params


def after_push(pulling: Call[Params]) -> Call[Params]:
    """Run the pull that follows an accepted push.

    If it fails, raises InDoubt while the push may count: another error would make the caller push again.
    """
    try:
        return (yield from pulling)
    except PsError as e:
        if not may_count_before(e):
            raise
        detail = f"the push was accepted, the pull after it failed: {e.detail}"
        raise problem("in_doubt", detail, hint=e.hint, retryable=False) from e


def may_count_before(error: PsError) -> bool:
    """Whether a push that was accepted may count in spite of this later error: its model and worker are still there.

    Nothing but that follows from what a gateway answers in a node's place, or from a token that was revoked meanwhile.
    """
    return error.code not in ("fenced", "conflict", *GONE)


def exchange(
    cluster: Cluster,
    model: str,
    deadline: Deadline,
    grads: Grads,
    terms: PushTerms,
    *,
    encoding: Encoding = NO_ENCODING,
    out: Params | None = None,
    view: bool = False,
) -> Call[tuple[Pushed, Params | None]]:
    """Push a gradient and, if one round trip can do both, return the values after it; None: they must be pulled.

    They must be pulled if the gradient covers only a part of the model or is too large for one request, if a push that
    ends an iteration was not `released` in time, if leased values cannot be mapped, and if shards answered from
    different timelines.
    """
    model_map = yield from cluster.map_of(model, deadline)
    if out is not None:
        check_out(model_map, out)
    with draft_for(encoding.feedback) as draft:  # restored if the push fails
        gradient = ready(model_map.layout, model_map.generation, grads, encoding, draft)
        if out is not None:
            gradient = apart_from(out.flat, gradient)
        selection = gradient.selection
        outgoing = Outgoing(gradient, _based(terms, model_map), cluster.same_host)
        transfer = PushTransfer(cluster, model_map, outgoing, deadline, draft)
        partial = len(selection.params) < len(model_map.spec.params) or selection.ranged
        if partial or not transfer.fits():
            return (yield from _push(cluster, model_map, deadline, gradient, terms, draft)), None
        dtype = wire_dtype(selection, None)
        arrivals = Arrivals(cluster.same_host, model_map.layout, selection, dtype, out, view=view)
        pending = list(selection.parts)
        try:
            while pending:
                groups, waiting = transfer.groups(pending)
                sinks = arrivals.sinks(groups)
                outcomes = yield from transfer.sent(groups, dtype, sinks, more=bool(waiting))
                good, failed = good_and_failed(groups, outcomes, in_sink, reads=False)
                for i, _ in good:
                    _, parts = groups[i]
                    done = arrivals.read(sinks[i]).push
                    transfer.accepted(parts, "" if done is None else done.state)
                pending = yield from transfer.again(failed, waiting)
        except BaseException:  # also if the caller is interrupted
            arrivals.release_all()
            raise
        pushed = summed([r.push for r in arrivals.replies if r.push is not None])
        if pushed.late and draft is not None:
            draft.give_back()
        if arrivals.torn or (terms.commit_wait_s is not None and not pushed.released):
            arrivals.release_all()  # shards that had the commit in time have lent their values
            return pushed, None
        params = arrivals.params(model)
        if params is None:
            transfer.without_memory(arrivals.unmappable)
        elif arrivals.leased_values is not None:
            cluster.lease_cache.keep(params.origin, arrivals.leased_values, _reached(pushed, terms))
        return pushed, params


def _reached(pushed: Pushed, terms: PushTerms) -> int:
    """sync: return how many commits the values in the answer to the push include; 0 if that is not known."""
    return terms.clock + 1 if pushed.released and terms.clock is not None else 0


def _based(terms: PushTerms, model_map: ModelMap) -> PushTerms:
    """Check weight, ack and base; return the terms with base versions per partition if `base` is a pull.

    Raises RequestError (`invalid_field`) if one is invalid, and FencedError (`model_replaced`) if `base` was pulled
    from an earlier creation of the model, or the worker has joined an earlier one.
    """
    if terms.generation not in (None, model_map.generation):
        raise _replaced(model_map, "this worker had joined")
    weight, base = terms.weight, terms.base
    if type(weight) is not float:
        weight = plain(weight)
        terms = replace(terms, weight=weight)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight < NUMBER_MAX:
        detail = f"weight: must be a number of at least 0 and below {NUMBER_MAX:g}, not {weight!r:.40}"
        raise problem("invalid_field", detail, where="weight")
    if terms.ack is not None and terms.ack not in LEVELS:
        raise problem("invalid_field", f"ack: must be one of {', '.join(LEVELS)}, not {terms.ack!r:.40}", where="ack")
    if not isinstance(base, Params):
        if base is None or isinstance(base, OwnBase):
            return terms
        raise problem("invalid_field", f"base must be what pull() returned, not {type(base).__name__}")
    origin = base.origin
    if origin.model != model_map.name:
        raise problem("invalid_field", f"base was pulled from '{origin.model}', the push is to '{model_map.name}'")
    if origin.generation != model_map.generation:
        raise _replaced(model_map, "`base` was pulled")
    return replace(terms, base=origin.versions)


def _replaced(model_map: ModelMap, since: str) -> PsError:
    return problem(
        "model_replaced",
        f"model '{model_map.name}' was deleted and created again after {since}",
        hint="pull again and compute the gradient from these values",
        generation=model_map.generation,
    )


def check_view(out: Params | None, view: bool) -> None:
    """Raise RequestError (`invalid_field`) if values are to be read-only and to go into `out`."""
    if view and out is not None:
        raise problem("invalid_field", "out= and copy=False exclude each other")


def check_out(model_map: ModelMap, out: Params) -> None:
    """Before a push: raise RequestError if the pull of the whole model after it cannot go into `out`."""
    whole = select(model_map.layout)
    memory(whole, wire_dtype(whole, None), out)

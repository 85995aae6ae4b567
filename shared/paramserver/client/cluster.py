"""What a client knows about its cluster: each model's map, and the route to each shard.

The map of a model is fetched when it is first needed, and again when a shard says it is stale.  Each address that a
shard advertises is probed with a short timeout; if one answers, requests go to that shard directly.  Requests for other
shards go to the URL the client was given, whose node forwards them.  So do those for a shard that falls silent to this
client alone, until it answers again.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final
from urllib.parse import quote

from paramserver.client.gradient_arrays import GradientArrays, give_back
from paramserver.client.lease_cache import LeaseCache
from paramserver.client.same_host import SameHost, is_same_host
from paramserver.core.layout import Layout
from paramserver.core.ranges import of_pairs
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.limits import LEASE_S
from paramserver.net.calls import ATTEMPT_S, Call, Deadline, Request, Response, json_of, json_request
from paramserver.net.retry import deliver_json
from paramserver.wire.frame import FRAME_HEADERS, PullFrame, encode_header

log = logging.getLogger("paramserver")

PROBE_S: Final = 3.0
"""Timeout of a probe; an address that does not answer within it counts as unreachable from here.  With TLS it takes
four round trips."""
LEAVE_S: Final = 1.0
"""How long a closing client waits for each shard to take back its slots and leases."""
MAPS_KEPT_MAX: Final = 64
"""Maps of models that a client keeps; that of 500 parameters takes 700 KiB.  One more request fetches another again."""
_TRY_AGAIN_S: Final = (5.0, 30.0)
"""Delays after which a silent address is probed again, twice in all: its shard may just be starting."""
_SELDOM_S: Final = 50.0
"""Delay after which it is probed once more, whenever a map is fetched.  A worker's heartbeat does that each minute, so
that its calls rarely have to wait."""
_ANSWERED_AGAIN_S: Final = (5.0, 10.0)
"""The same for an address that has answered before; the last delay is repeated for as long as the map names it."""
_EPISODE_S: Final = 60.0
"""A failure that comes so long after another one has nothing to do with it."""
_LOOK_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Delays, from the loss of a shard, after which maps are fetched again: it may be back, at a better address.  On a busy
machine its start takes many seconds."""


@dataclass(frozen=True)
class ModelMap:
    """One model as the scheduler described it: its layout, and the owner of each partition."""

    name: str
    generation: int
    timeline: int
    map_epoch: int
    spec: ModelSpec
    layout: Layout
    owners: tuple[str | None, ...]
    """Owning shard of each partition; None while it has no owner."""
    addresses: Mapping[str, tuple[str, ...]]
    """Base URLs that each shard advertises."""
    document: Mapping[str, Any] = field(repr=False)

    @property
    def cluster(self) -> str:
        """Id of the cluster; empty if the document has none."""
        return str(self.document.get("cluster", ""))

    @cached_property
    def in_use(self) -> tuple[str, ...]:
        """The shards that own a partition.  Cached: every call uses them, and there may be thousands of partitions."""
        return tuple(sorted({owner for owner in self.owners if owner is not None}))

    @classmethod
    def from_document(cls, doc: Mapping[str, Any]) -> "ModelMap":
        """Return the map that a document of `GET /models/{m}` describes."""
        spec = ModelSpec.parse(doc["spec"])
        layout = Layout(spec)
        if doc.get("bounds") is not None and tuple(doc["bounds"]) != layout.bounds:
            detail = f"model '{spec.name}' is partitioned in a way this client version does not support"
            raise problem("internal", detail)
        owners: list[str | None] = [None] * spec.partitions
        for p in doc["partitions"]:
            owners[int(p["index"])] = p.get("shard")
        return cls(
            spec.name,
            int(doc["generation"]),
            int(doc["timeline"]),
            int(doc["map_epoch"]),
            spec,
            layout,
            tuple(owners),
            {s: tuple(str(a).rstrip("/") for a in v["addresses"]) for s, v in doc["shards"].items()},
            doc,
        )


@dataclass(slots=True)
class _Address:
    """What probing one address has shown."""

    answers: bool
    tries: int
    again_at: float | None
    """When to probe it again; None: not any more."""
    has_answered: bool
    """Whether it has ever answered."""
    failing_since: float | None = None
    """When a request to it first failed, of those that failed one after the other."""

    def is_due(self, now: float, *, fetched: bool) -> bool:
        """Whether it is time to probe it again; `fetched`: a map was."""
        seldom = not self.has_answered and self.tries > len(_TRY_AGAIN_S)
        return self.again_at is not None and self.again_at <= now and (fetched or not seldom)


def model_path(name: str, *rest: str) -> str:
    """Return the path of a model's route; each part is percent-encoded as one component."""
    return "/".join(["/models", *(component(p) for p in (name, *rest))])


def component(name: str, hint: str = "") -> str:
    """Return a name percent-encoded as one component of a path.  Raises RequestError (`invalid_field`) for no text."""
    if not isinstance(name, str):
        raise problem("invalid_field", f"a name is text, not {name!r:.60}", hint=hint)
    return quote(name, safe="")


class Cluster:
    """Maps and routes, shared by all objects and threads of one client; each update is a single atomic operation."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.urls = urls
        self.same_host = SameHost()
        self.lease_cache = LeaseCache(self.same_host)
        self._maps: dict[str, ModelMap] = {}
        """The newest last."""
        self._known: dict[str, _Address] = {}
        self._look_again: tuple[float, ...] = ()
        self._warned = False

    def map_of(self, model: str, deadline: Deadline, *, newer_than: ModelMap | None = None) -> Call[ModelMap]:
        """Return the model's map: the cached one unless that is `newer_than` itself, else a fetched one.

        Raises NotFoundError (`unknown_model`), or the error that kept the cluster from answering in time.
        """
        model_map = self._maps.get(model)
        again = self._look_again  # another thread may remove the first delay meanwhile
        if again and again[0] <= deadline.clock():
            self._look_again = again[1:]
            model_map = None
        if model_map is not None and model_map is not newer_than:
            if self._due(model_map, deadline.clock(), fetched=False):
                yield from self._probe(model_map, deadline, fetched=False)
            return model_map
        return (yield from self.fetch_map(model, deadline))

    def fetch_map(self, model: str, deadline: Deadline, *, last: bool = False) -> Call[ModelMap]:
        """Return the model's map as the scheduler has it now; raises like `map_of`.

        `last`: nothing follows before the deadline, so that a probe of the map's addresses may last until then.
        """
        doc = yield from deliver_json(json_request("GET", model_path(model), timeout_s=ATTEMPT_S), deadline)
        return (yield from self.store_document(doc, deadline, last=last))

    def store_document(self, doc: Any, deadline: Deadline, *, last: bool = False) -> Call[ModelMap]:
        """Store the map in a model document, probe its addresses if due, and return it; `last` as in `fetch_map`."""
        try:
            fresh = self._encrypted(ModelMap.from_document(doc))
        except (KeyError, TypeError, ValueError) as e:
            raise problem("internal", f"the model's document cannot be read: {e!r:.100}") from e
        self._maps.pop(fresh.name, None)
        self._maps[fresh.name] = fresh
        for oldest in list(self._maps)[:-MAPS_KEPT_MAX]:
            self.forget(oldest)
        if self._due(fresh, deadline.clock(), fetched=True):
            yield from self._probe(fresh, deadline, fetched=True, last=last)
        return fresh

    def _encrypted(self, fresh: ModelMap) -> ModelMap:
        """Drop `http:` addresses if all given URLs use TLS: token and values must not be sent in the clear."""
        if not all(u.startswith("https:") for u in self.urls):
            return fresh
        kept = {s: tuple(a for a in found if not a.startswith("http:")) for s, found in fresh.addresses.items()}
        return replace(fresh, addresses=kept)

    def leave(self) -> Call[None]:
        """Return slots and leases to shards on this machine; those not returned expire by themselves."""
        self.lease_cache.drop()
        self.same_host.unmap_values()
        give_back(self.same_host)
        slots = self.same_host.take_idle()
        requests = [Request("DELETE", f"/slots/{s.file}", to=s.address, timeout_s=LEAVE_S) for s in slots]
        requests += [r for address in self.same_host.lenders() if (r := self._release(address)) is not None]
        if requests:
            yield requests

    def _release(self, address: str) -> Request | None:
        """Return a pull of one element that tells the shard which leases are released; None if it owns no partition."""
        for model_map in list(self._maps.values()):
            for partition, owner in enumerate(model_map.owners):
                if address in model_map.addresses.get(owner or "", ()):
                    frame = PullFrame(
                        model=model_map.name,
                        generation=model_map.generation,
                        map_epoch=model_map.map_epoch,
                        parts=[(partition, of_pairs([(0, 1)]))],
                        release=self.same_host.take_ended(address),
                    )
                    return Request("POST", "/pull", encode_header(frame), FRAME_HEADERS, address, timeout_s=LEAVE_S)
        return None

    def gradients(self, model: str, deadline: Deadline) -> Call[GradientArrays]:
        """Return arrays to compute gradients of that model in."""
        model_map = yield from self.map_of(model, deadline)
        return GradientArrays(model_map.layout, self.same_host)

    def generation(self, model: str) -> int | None:
        """Return the model generation of the cached map; None without one."""
        model_map = self._maps.get(model)
        return None if model_map is None else model_map.generation

    def forget(self, model: str) -> None:
        """Drop the cached map of the model."""
        self._maps.pop(model, None)

    def route(self, model_map: ModelMap, partition: int) -> str | None:
        """Return an address of the partition's owner, if possible one with shared memory; None if none answers here."""
        owner = model_map.owners[partition]
        found = None
        for address in model_map.addresses.get(owner or "", ()):
            known = self._known.get(address)
            if known is not None and known.answers:
                if is_same_host(address):
                    return address
                found = found or address
        return found

    def lost(self, address: str, now: float, *, for_good: bool = False) -> None:
        """Note that an address did not answer a request.

        One with shared memory is not used until a probe is answered, or `for_good`; its shard is reached at its other
        addresses.  If the shard has restarted, those may work again and nothing would tell of its new shared-memory
        address, so maps are fetched again a few times.

        Another is probed once it has failed for longer than the cluster takes to notice that a shard is dead: if the
        map still names it then, it may be out of reach from here alone.
        """
        if is_same_host(address):
            again_at = None if for_good else now + _ANSWERED_AGAIN_S[0]
            self._known[address] = _Address(False, tries=1, again_at=again_at, has_answered=True)
        else:
            known = self._known.get(address)
            if known is None or not known.answers:
                return
            since = known.failing_since
            if since is None or now - since > _EPISODE_S:
                known.failing_since = since = now
            if now - since <= LEASE_S:
                return
            known.again_at = now
        self._look_again = tuple(now + s for s in _LOOK_AGAIN_S)

    def _due(self, model_map: ModelMap, now: float, *, fetched: bool) -> bool:
        """Whether some address is due for a probe.

        New ones are; silent ones are when their delay is over, if none of their shard answers or they are on this
        machine; and so are those that `lost` doubts.
        """
        for owner in model_map.in_use:
            for address in model_map.addresses.get(owner, ()):
                known = self._known.get(address)
                if known is None:
                    return True
                wanted = known.answers or is_same_host(address) or not self._direct(model_map, owner)
                if wanted and known.is_due(now, fetched=fetched):
                    return True
        return False

    def _probe(self, model_map: ModelMap, deadline: Deadline, *, fetched: bool, last: bool = False) -> Call[None]:
        """Probe, concurrently, the owners' addresses that are new or due for another try.

        `fetched` as in `is_due`, `last` as in `fetch_map`.
        """
        now, found = deadline.clock(), list[str]()
        for address in dict.fromkeys(a for owner in model_map.in_use for a in model_map.addresses.get(owner, ())):
            known = self._known.get(address)
            if known is None or known.is_due(now, fetched=fetched):
                found.append(address)
        if not found:
            return
        self._forget_unnamed()
        wait_s = max(0.05, min(PROBE_S, deadline.left_s() if last else deadline.left_s() / 2))
        outcomes = yield [Request("GET", "/livez", to=a, timeout_s=wait_s) for a in found]
        for address, outcome in zip(found, outcomes, strict=True):
            answers = isinstance(outcome, Response) and outcome.status == 200 and _is_of(model_map, outcome)
            before = self._known.get(address)
            has_answered = answers or (before is not None and before.has_answered)
            tries = before.tries if before is not None and not before.answers else 0
            delays = _ANSWERED_AGAIN_S if has_answered else (*_TRY_AGAIN_S, _SELDOM_S)
            again_at = None if answers else deadline.clock() + delays[min(tries, len(delays) - 1)]
            self._known[address] = _Address(answers, tries + 1, again_at, has_answered)
        silent = [s for s in model_map.in_use if not self._direct(model_map, s)]
        if silent and not self._warned:
            self._warned = True
            log.warning(
                "route.proxied shards=%s via=%s: their own addresses are not reachable from here",
                ",".join(silent),
                self.urls[0],
            )

    def _forget_unnamed(self) -> None:
        """Forget the addresses that no map names any more: their processes have ended."""
        named = {a for model_map in list(self._maps.values()) for some in model_map.addresses.values() for a in some}
        for address in [a for a in list(self._known) if a not in named]:
            self._known.pop(address, None)

    def _direct(self, model_map: ModelMap, shard: str) -> bool:
        """Whether the shard answers at an address of its own."""
        return any((k := self._known.get(a)) is not None and k.answers for a in model_map.addresses.get(shard, ()))


def _is_of(model_map: ModelMap, answer: Response) -> bool:
    """Whether the answer to a probe is from a shard of the map's cluster.

    Behind a tunnel or a proxy, an address that is valid inside the cluster may be that of another cluster out here.
    """
    try:
        return not model_map.cluster or json_of(answer)["cluster"] == model_map.cluster
    except (PsError, TypeError, KeyError):
        return False

"""This shard's view of the cluster: the addresses of live shards, and every model with its layout and owners.

Updated from the scheduler's feed; the routes read it to find the owner of each partition.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.errors import problem
from paramserver.types import ModelKey, Token


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One model as the feed last described it."""

    key: ModelKey
    layout: Layout
    timeline: int
    state: str
    """`initializing` (initial values are awaited) or `ready`."""
    owners: tuple[tuple[str, Token], ...]
    """(shard, owner token) of each partition; the shard is "" for one without an owner."""
    cut: int | None
    """sync: clock of the newest cut stored by all partitions."""
    upload_token: str | None
    """Token that uploads of initial values must quote; None while none are awaited."""
    missing: frozenset[str] = frozenset()
    """Parameters whose values are awaited."""
    lost: frozenset[int] = frozenset()
    """Partitions of a complete model that have lost their values; empty for a model that was never complete."""
    restored: bool = False
    """Whether a restore has given the model its first values, so that nobody has a token to upload them again."""

    @property
    def spec(self) -> ModelSpec:
        """Settings of the current revision."""
        return self.layout.spec

    @property
    def pinned(self) -> int | None:
        """Clock of the cut whose snapshots are kept because a recovery may go back to it; only at level `applied`.

        At higher levels a recovery continues from the newest snapshot, and keeping a cut would also keep the whole
        journal after it.
        """
        return self.cut if self.spec.ack == "applied" else None


class Directory:
    """Shards and models as the feed last described them."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        """This shard's own name."""
        self.cluster = ""
        """Id of the cluster; empty until the first map has come."""
        self.map_epoch = 0
        self.models: dict[str, KnownModel] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}
        """Base URLs of each live shard."""
        self._changed = asyncio.Event()

    def update(self, document: Mapping[str, Any]) -> None:
        """Take in one document of the feed; types other than map, model and gone are ignored."""
        kind = document["type"]
        if kind == "map":
            self.cluster = str(document.get("cluster", ""))
            self.map_epoch = int(document["map_epoch"])
            self.addresses = {
                name: tuple(node["addresses"]) for name, node in document["shards"].items() if node["alive"]
            }
        elif kind == "model":
            self._take_model(document)
        elif kind == "gone":
            known = self.models.get(document["model"])
            if known is not None and known.key.generation <= document["generation"]:
                del self.models[document["model"]]
        else:
            return
        self._changed.set()
        self._changed = asyncio.Event()

    def _take_model(self, document: Mapping[str, Any]) -> None:
        name, generation = document["name"], int(document["generation"])
        known = self.models.get(name)
        if known is not None and known.key.generation > generation:
            return
        if known is not None and known.spec.document() == document["spec"]:
            layout = known.layout
        else:
            layout = Layout(ModelSpec.parse(document["spec"]))
        upload = document.get("upload") or {"token": None, "missing": (), "lost": ()}
        self.models[name] = KnownModel(
            ModelKey(name, generation),
            layout,
            int(document["timeline"]),
            str(document["state"]),
            tuple((o[0] or "", int(o[1])) for o in document["owners"]),
            document["cut"],
            upload["token"],
            frozenset(upload["missing"]),
            frozenset(upload["lost"]),
            bool(document["restored"]),
        )

    def address(self, shard: str) -> str:
        """Return a base URL of a shard.  Raises Unavailable (`unavailable`) if it is not known to be alive."""
        addresses = self.addresses.get(shard)
        if not addresses:
            lost = f"shard '{shard}' is unreachable" if shard else "the shard that owned it is gone"
            raise problem("unavailable", f"{lost}; its partitions are being reassigned")
        return addresses[0]

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change of the map or of a model; return False if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def newer(self, known: KnownModel, timeout_s: float) -> KnownModel:
        """Wait until the model's owners differ from those in `known`, or for the timeout, and return it as it is then.

        Raises FencedError (`model_replaced`) if it was deleted, or deleted and created again.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (now := self.models.get(known.key.name)) is not None and now.owners == known.owners:
                    await self._changed.wait()
        except TimeoutError:
            pass
        now = self.models.get(known.key.name)
        if now is None or now.key != known.key:
            raise problem("model_replaced", f"model '{known.key.name}' was deleted or created again")
        return now

"""Look up the model that a request names, in the directory or else at the scheduler."""

from typing import Final

from paramserver.core.fields import check_model_name
from paramserver.core.shard.served_model import replaced
from paramserver.errors import NotFoundError, problem
from paramserver_shard.directory import Directory, KnownModel
from paramserver_shard.link import SchedulerLink

NEWS_S: Final = 2.0
"""Longest wait for each next change of the directory while a model that the scheduler knows has not arrived."""


class Models:
    """Model lookup for the routes."""

    def __init__(self, directory: Directory, link: SchedulerLink) -> None:
        self._directory = directory
        self._link = link

    async def find(self, name: str, generation: int | None = None) -> KnownModel:
        """Return the model of that name, and of that generation if one is given.

        Raises NotFoundError (`unknown_model`) if the scheduler does not know it, FencedError (`model_replaced`) for an
        older generation, Unavailable if no scheduler answers or the model has not arrived on the feed yet.
        """
        known = self._directory.models.get(name)
        if known is None or (generation is not None and generation > known.key.generation):
            known = await self._ask(name, generation)
        if generation is not None and generation != known.key.generation:
            raise replaced(known.key)
        return known

    async def _ask(self, name: str, generation: int | None) -> KnownModel:
        """Ask the scheduler whether the model exists, then wait for it to arrive on the feed."""
        check_model_name(name)
        before = self._directory.models.get(name)
        try:
            await self._link.request("GET", f"/models/{name}")
        except NotFoundError:
            if self._directory.models.get(name) is before:  # else it has arrived since it was asked for
                self._directory.models.pop(name, None)
            raise
        for _ in range(20):
            known = self._directory.models.get(name)
            if known is not None and (generation is None or known.key.generation >= generation):
                return known
            if not await self._directory.changed(NEWS_S):
                break
        raise problem("initializing", f"model '{name}' is being set up on this shard")

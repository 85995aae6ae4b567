"""Requests to the other schedulers: for checkpoints, as each may be on a machine of its own, and for who leads."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx

from paramserver import checkpoint
from paramserver.errors import CorruptState, PsError, problem
from paramserver.net.credentials import Credentials
from paramserver_node.forward import FORWARDED_TO_LEADER
from paramserver_scheduler.checkpoints import CheckpointStore, discard
from paramserver_scheduler.http_client import check, http_client
from paramserver_scheduler.lease import Lease

log = logging.getLogger("paramserver.scheduler")

FILES: Final = (checkpoint.PARAMS, checkpoint.OPTIMIZER, checkpoint.WORKERS, checkpoint.MANIFEST)
"""The files of a checkpoint."""
ASK_S: Final = 1.0
"""Timeout of the question for the leader's term."""
REMOVE_S: Final = 5.0
"""Timeout of a deletion: the client that waits for it has not given up by then."""


def file_path(model: str, name: str, file: str) -> str:
    """URL path under which a scheduler serves a file of a checkpoint on its own disk."""
    return "/internal/checkpoints/" + "/".join(quote(part, safe="") for part in (model, name, file))


def of_creation(creation: str | None) -> dict[str, str]:
    """Query parameters that restrict a request to checkpoints of that creation of the model (None: of any)."""
    return {} if creation is None else {"creation": creation}


class OtherSchedulers:
    """The other schedulers, as listed when Redis last answered."""

    def __init__(self, lease: Lease, store: CheckpointStore, credentials: Credentials) -> None:
        self._lease = lease
        self._store = store
        self._http = http_client(credentials)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def newer_leader_exists(self) -> bool:
        """Whether one of them has replaced this leader, in case Redis is unreachable for this one alone.

        One that does not answer counts as no.
        """
        return self._lease.deposed_by(max(await asyncio.gather(*map(self._term, self._urls())), default=0))

    async def _term(self, url: str) -> int:
        """Return the term in which that scheduler leads; 0 if it does not, or does not answer."""
        only_a_leader_answers = {FORWARDED_TO_LEADER: "0"}
        try:
            answer = await self._http.get(f"{url}/map", headers=only_a_leader_answers, timeout=ASK_S)
            return int(answer.json()["term"]) if answer.is_success else 0
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0

    def url(self, name: str) -> str:
        """URL of the scheduler with that name; raises Unavailable if it is not running."""
        for scheduler in self._lease.schedulers:
            if scheduler.name == name:
                return scheduler.url
        raise problem(
            "unavailable",
            f"the files of this checkpoint are on scheduler '{name}', which is not running",
            hint="start it, or restore from a copy of the folder: psctl checkpoint restore FOLDER",
        )

    async def read(self, model: str, name: str, holder: str | None, creation: str | None) -> checkpoint.Checkpoint:
        """Read a checkpoint of another scheduler; the one named `holder` is tried first.

        Only a checkpoint of that creation of the model is read (None: of any).  It passes through this one's folder and
        does not stay there, where a deletion would miss it while this scheduler does not run.  Raises NotFoundError
        (`unknown_checkpoint`) if no scheduler has it, Unavailable if none has it and `holder` is not running,
        CorruptState if it is damaged, and OSError if it cannot be written here.
        """
        for url in self._urls(holder):
            try:
                found = await self._read_from(url, model, name, creation)
            except CorruptState:
                raise
            except (PsError, httpx.HTTPError, httpx.InvalidURL) as e:
                log.info("checkpoint.not_there model=%s name=%s at=%s %s", model, name, url, e)
            else:
                log.info("checkpoint.fetched model=%s name=%s from=%s", model, name, url)
                return found
        if holder is not None:
            self.url(holder)
        raise problem("unknown_checkpoint", f"model '{model}' has no checkpoint '{name}'")

    async def remove(self, model: str, name: str, creation: str | None) -> bool:
        """Have all other schedulers delete their copies of that creation (None: of any); return whether all have."""

        async def removed(url: str) -> bool:
            try:
                url_of_it = url + file_path(model, name, checkpoint.MANIFEST)
                check(await self._http.delete(url_of_it, params=of_creation(creation), timeout=REMOVE_S))
            except (PsError, httpx.HTTPError, httpx.InvalidURL) as e:
                log.warning("checkpoint.stays model=%s name=%s at=%s %s", model, name, url, e)
                return False
            return True

        return all(await asyncio.gather(*map(removed, self._urls())))

    def _urls(self, first: str | None = None) -> Sequence[str]:
        others = sorted(self._lease.schedulers, key=lambda s: s.name != first)
        return [s.url for s in others if s.url != self._lease.url]

    async def _read_from(self, url: str, model: str, name: str, creation: str | None) -> checkpoint.Checkpoint:
        target = await asyncio.to_thread(self._store.new_path, model, name)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        await asyncio.to_thread(part.mkdir, parents=True)
        try:
            for file in FILES:
                await self._download(url + file_path(model, name, file), creation, part / file)
            return await asyncio.to_thread(checkpoint.read, part)
        except CorruptState as e:
            raise problem(e.code, e.detail.replace(str(part), f"{url}: {name}")) from e
        finally:
            await asyncio.to_thread(discard, part)

    async def _download(self, url: str, creation: str | None, path: Path) -> None:
        async with self._http.stream("GET", url, params=of_creation(creation)) as response:
            if not response.is_success:
                await response.aread()
                check(response)
            with path.open("wb") as out:
                async for chunk in response.aiter_bytes(1 << 20):
                    await asyncio.to_thread(out.write, chunk)

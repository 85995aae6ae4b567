"""A member of the worker pool: it joins, is assigned places in runs, works them, and reports how they ended.

No code is sent: a run names a function that is importable here and under an allowed prefix. The function runs in the
main thread; meanwhile another thread sends heartbeats and notices when the place is taken away.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any
from urllib.parse import quote

import paramserver as ps
from paramserver import limits
from paramserver.errors import (
    AuthError,
    ConflictError,
    FencedError,
    InDoubt,
    NotFoundError,
    PsError,
    Unavailable,
    is_foreign,
    problem,
)
from paramserver_node.unwind import Terminated, own_handlers
from paramserver_node.usage import Usage
from paramserver_worker import entry

log = logging.getLogger("paramserver.worker")

IDLE_POLL_S = 0.25
"""Polling interval while there is no place; a heartbeat is due at least every second."""
RESTART_PAUSE_S = 1.0
"""Pause after a function has raised; during an outage of the shards it may be called again any number of times."""
REPORT_PAUSE_S = 1.0
"""Pause before a report is repeated that no scheduler could take."""
STOP_GRACE_S = 10.0
"""Longest time a function may go on after its place is taken away; then the process exits and is to be restarted."""
EXIT_OVERSTAYED = 75
TRACEBACK_CHARS = 8000
CALL_TIMEOUT_S = (limits.LEASE_S - limits.HEARTBEAT_S) / 2
"""Leaves time to ask another scheduler before the lease expires if one is silent."""


class PoolMember:
    """One worker process, from joining the pool to leaving it."""

    def __init__(self, client: ps.Client, name: str, allow: Sequence[str]) -> None:
        self._client, self._name, self._allow = client, name, list(allow)
        self._member, self._epoch = "", 0
        self._join_in_doubt_until = 0.0
        """Until when a higher epoch may be our own: a join may have been done without our knowing."""
        self._usage = Usage(time.monotonic)
        self._unreachable = False

    def _join(self) -> None:
        body = {"name": self._name, "allow": self._allow}
        try:
            answer = self._client.request("POST", "/pool", body, timeout=CALL_TIMEOUT_S)
        except InDoubt:
            self._join_in_doubt_until = inf
            raise
        self._join_in_doubt_until = min(self._join_in_doubt_until, time.monotonic() + limits.LATE_JOIN_S)
        self._member, self._epoch = answer["member"], answer["epoch"]
        log.info("pool.joined member=%s epoch=%d allow=%s", self._member, self._epoch, ",".join(self._allow))

    def _heartbeat(self) -> dict[str, Any] | None:
        """Send a heartbeat, joining first if needed; returns the scheduler's answer, or None if there is none.

        Raises AuthError if the token is refused, RequestError (`invalid_field`) if the name is, on the first join, and
        FencedError if another process has joined under the name.
        """
        try:
            if not self._epoch:
                self._join()
            path = f"/pool/{quote(self._member, safe='')}"
            body = {"epoch": self._epoch, "metrics": self._usage.look()}
            answer: dict[str, Any] = self._client.request("PUT", path, body, timeout=CALL_TIMEOUT_S)
            if self._unreachable:
                log.info("pool.back member=%s", self._member)
            self._unreachable = False
            return answer
        except PsError as e:
            if is_foreign(e):  # whoever that is knows neither the members nor the tokens
                self._not_reached(e)
            elif isinstance(e, ConflictError | NotFoundError):
                self._lost(e)
            elif isinstance(e, AuthError) or (not self._member and e.code == "invalid_field"):
                raise  # the token is read at the start of the process, and the name is given: retrying would not help
            else:
                self._not_reached(e)
        return None

    def _lost(self, error: PsError) -> None:
        """Have the next heartbeat join again.  Raises FencedError if another process has joined under the name."""
        doubtful = time.monotonic() < self._join_in_doubt_until
        if int(error.members.get("epoch") or 0) > self._epoch and not doubtful:
            # Two that replaced each other in turn would look like a process that dies at its place each time.
            raise problem(
                "fenced",
                f"another process has joined the pool as '{self._name}' and replaces this one",
                hint="give each worker a unique name, or no name",
            ) from error
        self._join_in_doubt_until = 0.0
        log.warning("pool.lost member=%s reason=%s: joining again", self._member, error.code)
        self._epoch = 0

    def _not_reached(self, error: PsError) -> None:
        if not self._unreachable:  # once: an outage may last, and there may be hundreds of workers
            log.warning("pool.unreachable %s; trying on", error)
        self._unreachable = True

    def work(self) -> None:
        """Take and work places, one after the other, forever.  Raises what `_heartbeat` does."""
        while True:
            answer = self._heartbeat()
            place = answer["run"] if answer is not None else None
            if place is None:
                time.sleep(IDLE_POLL_S)
            elif answer is not None and answer["state"] == "stop":
                self._report(place, None)  # the run ended before this place was begun: give it back
            else:
                self._fill(place)

    def leave(self) -> None:
        """Leave the pool, so that the place is free at once and not only when the lease expires."""
        if self._epoch:
            path = f"/pool/{quote(self._member, safe='')}?epoch={self._epoch}"
            self._client.request("DELETE", path, timeout=1.0)

    def _fill(self, place: dict[str, Any]) -> None:
        """Work one place to its end and report it."""
        log.info(
            "place.begins run=%s place=%s entry=%s model=%s", *(place[k] for k in ("id", "place", "entry", "model"))
        )
        error = None
        with self._heartbeats_during(place) as taken_away:
            try:
                with own_handlers():
                    function = entry.load(place["entry"], self._allow)
                    entry.run(self._client, function, place.get("args") or {}, model=place["model"], place=place)
            except (Terminated, KeyboardInterrupt):
                raise
            except SystemExit as e:  # the function ended by itself
                error = None if e.code in (None, 0) else f"{place['entry']} ended with sys.exit({e.code!r})"
            except PsError as e:
                error = f"{traceback.format_exc()[-TRACEBACK_CHARS:]}\n{e}"
            except BaseException:  # asyncio.CancelledError, for one, is no Exception
                error = traceback.format_exc()[-TRACEBACK_CHARS:]
            if error is None:
                log.info("place.done run=%s place=%s", place["id"], place["place"])
            else:
                log.error("place.failed run=%s place=%s\n%s", place["id"], place["place"], error)
            # A report that is given up, or a lease that ends meanwhile, would have all of the work done again.
            while not self._report(place, error) and not taken_away.wait(REPORT_PAUSE_S):
                pass
        if error is not None:
            time.sleep(RESTART_PAUSE_S)

    def _report(self, place: dict[str, Any], error: str | None) -> bool:
        """Report how the work at the place has ended; return False if that is to be reported again.

        It is if no scheduler could take the report, and if this member has lost its membership: once it has joined
        again it may be given the same place.
        """
        if error is not None:
            error = error.encode(errors="replace").decode()  # half a character, as of a file's name, is no JSON
        body = {"member": self._member, "epoch": self._epoch, "error": error, "attempt": place.get("attempt")}
        try:
            path = f"/runs/{quote(place['id'], safe='')}/places/{place['place']}/done"
            self._client.request("POST", path, body, timeout=CALL_TIMEOUT_S)
        except PsError as e:
            log.warning("place.not_reported run=%s reason=%s", place["id"], e)
            untaken = isinstance(e, Unavailable) or is_foreign(e)
            return not untaken and e.code not in ("fenced", "unknown_worker")
        return True

    @contextmanager
    def _heartbeats_during(self, place: dict[str, Any]) -> Iterator[threading.Event]:
        """Send heartbeats from a thread while the block runs; the event is set while the place is not this member's."""
        ended, taken_away = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=self._heartbeat_loop, args=(place, ended, taken_away), name="pool heartbeat", daemon=True
        )
        thread.start()
        try:
            yield taken_away
        finally:
            ended.set()
            thread.join()

    def _heartbeat_loop(self, place: dict[str, Any], ended: threading.Event, taken_away: threading.Event) -> None:
        taken_away_at: float | None = None
        while not ended.wait(limits.HEARTBEAT_S):
            try:
                answer = self._heartbeat()
            except AuthError as e:  # raised again once the function has ended
                log.warning("pool.refused %s", e)
                continue
            except FencedError as e:  # this one, too; the place is the other process's, or will be somebody's
                log.warning("pool.replaced %s", e)
                answer = {"state": "stop", "run": None}
            if answer is None:
                continue
            assigned = answer["run"] if answer["state"] != "stop" else None
            if assigned is not None and (assigned["id"], assigned["place"]) == (place["id"], place["place"]):
                taken_away_at = None
                taken_away.clear()
            elif taken_away_at is None:
                taken_away_at = time.monotonic()
                taken_away.set()
                log.info("place.taken_away run=%s place=%s", place["id"], place["place"])
            elif time.monotonic() - taken_away_at > STOP_GRACE_S:
                log.error("place.overstayed entry=%s ignores worker.draining: ending the process", place["entry"])
                logging.shutdown()
                os._exit(EXIT_OVERSTAYED)

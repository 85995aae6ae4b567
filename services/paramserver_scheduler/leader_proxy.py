"""Dispatch of every request: the leader serves it, a standby forwards it to the leader, streaming both ways."""

import logging
import re
from typing import Final

import httpx
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramserver.errors import problem
from paramserver.net.addresses import SCHEDULERS
from paramserver_node import problems
from paramserver_node.forward import FORWARDED_TO_LEADER, FORWARDED_TO_SHARD, Forwarder, changes_something, in_doubt
from paramserver_node.log import path_of
from paramserver_node.middleware import no_body_deadline
from paramserver_node.race import race
from paramserver_node.roles import allows
from paramserver_scheduler.lease import Lease

log = logging.getLogger("paramserver.scheduler")

LOCAL_PATHS: Final = ("/", "/livez", "/readyz", "/version", "/metrics", "/login", "/docs")
LOCAL_PREFIXES: Final = ("/static/", "/docs/", "/internal/checkpoints/")
"""Paths (`LOCAL_PATHS`) and path prefixes that every scheduler serves itself, leading or not."""

ENDLESS_BODY: Final = re.compile("/internal/shards/[^/]+/clocks")
"""Paths of requests whose body may have no end; without a `content-length` they cannot be forwarded."""

OF_SHARDS: Final = "/internal/shards"
"""Beginning of the paths that shards ask for, each of them every second or more often."""


_TO_SHARD: Final = FORWARDED_TO_SHARD.encode()


class LeaderProxy:
    """The ASGI app around a scheduler's routes."""

    def __init__(self, app: FastAPI, lease: Lease, forwarder: Forwarder) -> None:
        self._app: ASGIApp = app
        self._state = app.state
        self._lease = lease
        self._forwarder = forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(OF_SHARDS) and allows(scope["state"].get("role", "admin"), "node"):
            self._lease.hear()
        if any(name == _TO_SHARD for name, _ in scope["headers"]):  # not to be forwarded, nor to be missing here
            hint = "GET /shards lists the addresses; correct the shard's --advertise"
            raise problem("unavailable", "the address of a shard leads to a scheduler instead", hint=hint)
        if scope["path"] in LOCAL_PATHS or scope["path"].startswith(LOCAL_PREFIXES):
            await self._app(scope, receive, send)
        elif await self._is_leader():
            await self._app(scope, receive, self._naming_all_schedulers(send))
        elif ENDLESS_BODY.fullmatch(scope["path"]) and b"content-length" not in dict(scope["headers"]):
            no_body_deadline(scope)  # also answers at once, without waiting for the rest of the body
            error = problem("no_leader", "this scheduler is not the leader; send this request to the leader directly")
            await problems.response(Request(scope), error)(scope, receive, self._naming_all_schedulers(send))
        else:
            await self._forward(scope, receive, send)

    async def _is_leader(self) -> bool:
        service = self._state.service
        return service is not None and await service.leadership.confirm()

    def _naming_all_schedulers(self, send: Send) -> Send:
        """Wrap `send` to name all schedulers in a header, so clients can turn to another when this one dies."""
        schedulers = self._lease.schedulers
        if len(schedulers) < 2:
            return send
        urls = ",".join(s.url for s in schedulers)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[SCHEDULERS] = urls
            await send(message)

        return named

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        leader = self._lease.leader
        if leader is None or leader.place == self._lease.place or FORWARDED_TO_LEADER in request.headers:
            why = f", and this scheduler cannot lead: {away}" if (away := self._lease.redis_away) else ""
            raise problem("no_leader", f"there is no leader at the moment{why or '; one takes over within seconds'}")
        begun = False

        async def tracked_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def forward() -> None:
            answer = await self._forwarder.forward(
                request, [leader.url], code="no_leader", headers={FORWARDED_TO_LEADER: str(leader.term)}
            )
            try:
                await answer(scope, receive, tracked_send)
            except httpx.TransportError as e:
                # Part of the response has been sent; leaving it incomplete makes the server close the connection.
                log.info("door.leader_broke_off path=%s %s", path_of(scope), e)

        forwarded = await race(forward(), self._lease.wait_for_successor(leader))
        if forwarded is None and not begun:  # the former leader hangs, with the request in flight
            detail = "another scheduler has taken over before the leader answered"
            raise in_doubt(scope, detail) if changes_something(scope) else problem("no_leader", detail)

"""The server of a node: uvicorn, with its HTTP/1.1 and our HTTP/2 on one port (see `protocol_detector`).

It runs in the caller's process and event loop.  When `stop` is set, it accepts no more connections, and finishes the
requests in flight within `grace_s`.
"""

import asyncio
import gc
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from paramserver.errors import PsError, first_cause, problem
from paramserver.limits import CONNECTIONS_MAX, PATIENCE_S
from paramserver_node import log
from paramserver_node.protocol_detector import ProtocolDetector
from paramserver_node.settings import NodeSettings, exit_status

if TYPE_CHECKING:
    from paramserver_node.transfer_threads import TransferThreads

GRACE_S: Final = 10.0

SettingsT = TypeVar("SettingsT", bound=NodeSettings)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tls:
    """The files (PEM) with which a port serves HTTPS, TLS 1.2 or newer."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, settings: NodeSettings) -> Self | None:
        """Return the files named in the settings; None if there are none.

        Raises RequestError (`invalid_field`) if one is missing, or they are not a certificate with its key.
        """
        if not settings.tls_certificate and not settings.tls_key:
            return None
        if not settings.tls_certificate or not settings.tls_key:
            raise problem("invalid_field", "TLS requires two files: set both tls_certificate and tls_key, or neither")
        tls = cls(Path(settings.tls_certificate), Path(settings.tls_key))
        try:  # the server would report it only later, and in its own words
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, _no_password)
        except (OSError, ValueError) as e:
            detail = (
                f"tls_certificate and tls_key: {tls.certificate} and {tls.key} are not a certificate and its key: {e}"
            )
            raise problem("invalid_field", detail) from None
        return tls


def _no_password() -> NoReturn:
    raise ValueError("encrypted private keys are not supported")


class CannotListen(OSError):
    """Raised for an address that is in use, or not one of this machine."""


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=1024, family=family)
    except OSError as e:
        raise CannotListen(f"cannot serve on {host}:{port}: {e.strerror or e}") from None


def run(kind: type[SettingsT], flags: Mapping[str, Any], serve: Callable[[SettingsT], Coroutine[Any, Any, T]]) -> T:
    """Load a node's settings, and return what `serve` does; an expected error exits with its reason in one line."""
    try:
        settings = kind.load(flags)
        log.setup(settings.log_level)
        return uvloop.run(serve(settings))
    except (PsError, BaseExceptionGroup) as error:
        expected = error.subgroup((PsError, CannotListen)) if isinstance(error, BaseExceptionGroup) else error
        if expected is None:
            raise
        cause = first_cause(expected)
        print(f"paramserver-{kind.section}: {cause}", file=sys.stderr)
        sys.exit(exit_status(cause))
    except KeyboardInterrupt:
        sys.exit(130)


def freeze_gc() -> None:
    """Exempt all present objects from garbage collection: they stay, and scanning them blocks everything for 0.1 s."""
    gc.freeze()


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for s in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(s, stop.set)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling, which is left to the process, and with a shorter time for TLS handshakes."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections.  They count in `CONNECTIONS_MAX` only after their TLS handshake."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol = partial(config.http_protocol_class, config, self.server_state, {})  # type: ignore[call-arg]
        handshake_s = PATIENCE_S if config.ssl else None
        self.servers = [
            await loop.create_server(
                protocol, sock=s, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=handshake_s
            )
            for s in sockets or ()
        ]
        self.started = True


async def serve_tcp(
    app: ASGIApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    tls: Tls | None = None,
    proxied: bool = False,
    grace_s: float = GRACE_S,
    transfer_threads: "TransferThreads | None" = None,
) -> None:
    """Serve HTTP/1.1 and HTTP/2 (by prior knowledge, under TLS by ALPN) until `stop`.  Raises CannotListen.

    `proxied`: trust what a proxy on this machine says about its client.  `transfer_threads` transfer large bodies.
    """
    _raise_file_limit()
    await _serve_on(
        _listener(host, port), app, stop, grace_s, tls=tls, proxied=proxied, transfer_threads=transfer_threads
    )


async def serve_unix(
    app: ASGIApp,
    path: str,
    stop: asyncio.Event,
    *,
    grace_s: float,
    transfer_threads: "TransferThreads | None",
) -> None:
    """Serve on a Unix socket until `stop`; raises OSError if it cannot be created at that path.

    `transfer_threads`: those of the app's TCP port, which must know of the requests here, too (`note_request`).
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    await _serve_on(listener, app, stop, grace_s, transfer_threads=transfer_threads)


async def _serve_on(
    listener: socket.socket,
    app: ASGIApp,
    stop: asyncio.Event,
    grace_s: float,
    *,
    tls: Tls | None = None,
    proxied: bool = False,
    transfer_threads: "TransferThreads | None",
) -> None:
    server = _Uvicorn(
        uvicorn.Config(
            app,
            http=type("ProtocolDetector", (ProtocolDetector,), {"transfer_threads": transfer_threads}),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(grace_s),
            server_header=False,
            proxy_headers=proxied,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
    )
    stopping = asyncio.ensure_future(stop.wait())
    stopping.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve([listener])
    finally:
        stopping.cancel()
        listener.close()


def _raise_file_limit() -> None:
    """Raise the limit on open files, as far as allowed: the usual 1,024 suffice for 1,000 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = 4 * CONNECTIONS_MAX if hard == resource.RLIM_INFINITY else min(hard, 4 * CONNECTIONS_MAX)
    if soft != resource.RLIM_INFINITY and soft < want:
        resource.setrlimit(resource.RLIMIT_NOFILE, (want, hard))

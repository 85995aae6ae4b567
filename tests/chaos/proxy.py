"""A TCP fault proxy: each link passes the bytes between one node and one address, until it is told to hold them.

A link that is cut keeps its connections and holds what they send, as a network does while TCP tries again; healed, it
delivers what it held.  New connections through a cut link are accepted and stay silent.  `reset` ends the connections
there are, as a network device does that has forgotten them.
"""

import asyncio
from contextlib import suppress
from typing import Literal

Way = Literal["there", "back", "both"]

CHUNK_BYTES = 1 << 16


class Link:
    """One way into the cluster that can be hurt."""

    def __init__(self, name: str, target_port: int) -> None:
        self.name, self.target_port = name, target_port
        self.port = 0
        """Where it listens, on 127.0.0.1."""
        self.delay_s = 0.0
        """How much later each chunk arrives."""
        self.passed_bytes = 0
        self._open = {"there": asyncio.Event(), "back": asyncio.Event()}
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self.heal()

    async def start(self, port: int = 0) -> None:
        """Listen, on a free port unless one is given."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self, way: Way = "both") -> None:
        """Hold all bytes from now on, or those of one direction: `there` is towards the target."""
        for name, passes in self._open.items():
            if way in (name, "both"):
                passes.clear()

    def heal(self) -> None:
        """Let everything pass again, at once."""
        self.delay_s = 0.0
        for passes in self._open.values():
            passes.set()

    def reset(self) -> None:
        """Abort every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        try:
            await self._open["there"].wait()  # a cut network does not carry the handshake either
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target_port, limit=CHUNK_BYTES)
            self._writers.add(to_writer)
            try:
                await self._join(reader, writer, to_reader, to_writer)
            finally:
                self._writers.discard(to_writer)
                to_writer.close()
        except OSError:
            writer.transport.abort()  # nobody listens there
        except asyncio.CancelledError:
            pass  # the link is taken down
        finally:
            self._connections.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_reader: asyncio.StreamReader,
        to_writer: asyncio.StreamWriter,
    ) -> None:
        there = asyncio.ensure_future(self._pass("there", reader, to_writer))
        back = asyncio.ensure_future(self._pass("back", to_reader, writer))
        try:
            # One side's end is passed on as such; a broken connection ends both.
            done, _ = await asyncio.wait((there, back), return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                writer.transport.abort()
                to_writer.transport.abort()
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passes = self._open[way]
        while chunk := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await passes.wait()
            writer.write(chunk)
            await writer.drain()
            self.passed_bytes += len(chunk)
        await passes.wait()
        with suppress(OSError, NotImplementedError):
            writer.write_eof()

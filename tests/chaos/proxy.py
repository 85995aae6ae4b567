"""A TCP fault proxy: each link forwards bytes between one node and one address until it is told to hold them.

A cut link keeps its connections open and holds their bytes, as a network does while TCP retransmits; `heal` delivers
what was held.  New connections through a cut link are accepted and stay silent.  `reset` aborts the existing
connections, as a network device does that has lost its connection state; `lose` is one that says nothing of it.
"""

import asyncio
import ctypes
import socket
import struct
from contextlib import suppress
from typing import Literal

Way = Literal["there", "back", "both"]

CHUNK_BYTES = 1 << 16
SO_ATTACH_FILTER = 26
RETURN_0 = 6, 0, 0, 0
"""A filter program: let through 0 bytes of each packet."""


class Link:
    """A proxied route from one node to one address."""

    def __init__(self, name: str, target_port: int) -> None:
        self.name, self.target_port = name, target_port
        self.port = 0
        """Port on 127.0.0.1 that the link listens on."""
        self.delay_s = 0.0
        """Delay of each chunk in each direction."""
        self.bytes_per_s = float("inf")
        """Rate of each direction, which all connections share."""
        self._free_at = {"there": 0.0, "back": 0.0}
        self._open = {"there": asyncio.Event(), "back": asyncio.Event()}
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self.heal()

    async def start(self, port: int = 0) -> None:
        """Listen on `port`; 0: on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self, way: Way = "both") -> None:
        """Hold all bytes from now on, or those of one direction; `there` is towards the target."""
        for name, passes in self._open.items():
            if way in (name, "both"):
                passes.clear()

    def heal(self) -> None:
        """Forward everything again, without delay."""
        self.delay_s = 0.0
        for passes in self._open.values():
            passes.set()

    def reset(self) -> None:
        """Abort every connection, with a reset to both ends."""
        for writer in tuple(self._writers):
            linger = struct.pack("ii", 1, 0)  # without it they would be told of an orderly end
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    def lose(self) -> None:
        """Drop all that arrives on the connections that are open now, for good; nobody is told.  Linux only.

        The kernel drops the packets before TCP sees them, so they are not even acknowledged.
        """
        program = ctypes.create_string_buffer(struct.pack("HBBI", *RETURN_0))
        for writer in self._writers:
            connected = writer.get_extra_info("socket")
            described = struct.pack("HL", 1, ctypes.addressof(program))
            with suppress(OSError):  # it has just ended
                connected.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        try:
            await self._open["there"].wait()  # a cut network does not carry a handshake either
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target_port, limit=CHUNK_BYTES)
            self._writers.add(to_writer)
            try:
                await self._join(reader, writer, to_reader, to_writer)
            finally:
                self._writers.discard(to_writer)
                to_writer.close()
        except OSError:
            writer.transport.abort()  # nothing listens on the target port
        except asyncio.CancelledError:
            pass  # the link is being stopped
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
            # EOF is forwarded and the other direction goes on; an error aborts both connections.
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
            now = asyncio.get_running_loop().time()
            self._free_at[way] = max(now, self._free_at[way]) + len(chunk) / self.bytes_per_s
            await asyncio.sleep(self._free_at[way] - now)
            await passes.wait()
            writer.write(chunk)
            await writer.drain()
        await passes.wait()
        with suppress(OSError, NotImplementedError):
            writer.write_eof()

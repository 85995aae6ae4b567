"""The stored form of snapshots: head and arrays of a capture, as a stream that is cut into blocks, and a manifest."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgpack
from msgspec.structs import asdict
from zlib_ng import zlib_ng

from paramserver.core.partition_state import Capture, HeldPart, LoadedState, PartitionState
from paramserver.errors import PsError, problem
from paramserver.limits import SNAPSHOT_BLOCK_BYTES
from paramserver.types import U8, AnyArray

FORMAT: Final = "1.3"
_ALIGN: Final = 64

Entry = Mapping[str, Any]
"""One snapshot in a manifest: version, token, lsn, cut, name, bytes, crc32 (of each block), format."""


def to_stored(capture: Capture) -> tuple[dict[str, Any], tuple[AnyArray, ...]]:
    """Return a capture's head and its arrays: values, slots, buffered and staged gradients, in this order.

    A gradient of ranges is two arrays, its elements and its ranges: in the head there could be more than a hundred
    MiB of them, made into bytes while the event loop waits.
    """
    head = {
        "version": capture.version,
        "clock": capture.clock,
        "steps": list(capture.state.steps),
        "slots": len(capture.state.slots),
        "memory": dict(capture.memory),
        "held": [_fields(part) for part in capture.buffered],
        "lsn": capture.lsn,
        "staged": [_fields(part) for part in capture.staged],
        "settings": dict(capture.settings),
    }
    waiting = chain.from_iterable(map(_arrays, (*capture.buffered, *capture.staged)))
    return head, (capture.state.values, *capture.state.slots, *waiting)


def from_stored(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> LoadedState:
    """Rebuild the state that `to_stored` wrote."""
    slots = int(head["slots"])
    rest = list(arrays[:slots:-1])
    buffered, staged = (tuple([_held(h, rest) for h in head[of]]) for of in ("held", "staged"))
    if rest:
        raise ValueError("more arrays than the head names")
    return LoadedState(
        PartitionState(arrays[0], tuple(arrays[1 : 1 + slots]), tuple(int(s) for s in head["steps"])),
        int(head["version"]),
        int(head["clock"]),
        head["memory"],
        buffered,
        stored=True,
        lsn=int(head["lsn"]),
        staged=staged,
        settings=head["settings"],
    )


def _fields(part: HeldPart) -> dict[str, Any]:
    fields = asdict(part) | {"ranges": None if part.ranges is None else True}
    del fields["data"]
    return fields


def _arrays(part: HeldPart) -> tuple[AnyArray, ...]:
    return (part.data,) if part.ranges is None else (part.data, part.ranges.reshape(-1))


def _held(head: Mapping[str, Any], rest: list[AnyArray]) -> HeldPart:
    """Rebuild a held gradient; its arrays are the last of `rest`, which are taken away."""
    base, data = head["base"], rest.pop()
    ranges = None if head["ranges"] is None else rest.pop().reshape(-1, 2)
    return HeldPart(**{**head, "base": None if base is None else tuple(base), "ranges": ranges, "data": data})


def other_format(what: str, found: object) -> PsError:
    """Make the error for something stored in a format that this version does not know."""
    return problem(
        "corrupt_state",
        f"{what} has format {str(found)[:20]}; this version reads {FORMAT}",
        hint="it was written by another version, or is damaged",
    )


def pack_manifest(entries: Sequence[Entry]) -> str:
    """Encode the manifest of these snapshots, newest first."""
    document = {"format": FORMAT, "crc32": _entries_crc(entries), "snapshots": list(entries)}
    return json.dumps(document, separators=(",", ":"))


def read_manifest(text: bytes | str, what: str) -> list[dict[str, Any]]:
    """Decode the entries of a manifest; raises CorruptState if it is damaged or of another format."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise other_format(what, document["format"])
        entries: list[dict[str, Any]] = document["snapshots"]
        good = document["crc32"] == _entries_crc(entries)
        for entry in entries:
            if entry["format"] != FORMAT:
                raise other_format(f"a snapshot in {what}", entry["format"])
    except (ValueError, TypeError, KeyError, AttributeError):
        good = False
    if not good:
        raise problem("corrupt_state", f"{what} is damaged")
    return entries


def _entries_crc(entries: Any) -> int:
    return zlib_ng.crc32(json.dumps(entries, separators=(",", ":"), sort_keys=True).encode())


def encode_head(head: Mapping[str, Any], arrays: Sequence[AnyArray]) -> bytes:
    """Encode the start of a stream: length, msgpack map, zeros up to a multiple of 64 bytes."""
    packed = msgpack.packb({"format": FORMAT, "head": head, "arrays": [[a.dtype.str, a.nbytes] for a in arrays]})
    size = 4 + len(packed)
    return b"".join((struct.pack("<I", len(packed)), packed, bytes(-size % _ALIGN)))


def decode_head(stream: U8) -> tuple[dict[str, Any], int]:
    """Return (head, offset of the arrays) of a stream with intact blocks; raises CorruptState for another format."""
    (size,) = struct.unpack("<I", stream[:4].tobytes())
    head = msgpack.unpackb(stream[4 : 4 + size].tobytes(), strict_map_key=False)
    if head.get("format") != FORMAT:
        raise other_format("a snapshot", head.get("format"))
    return head, 4 + size + (-(4 + size) % _ALIGN)


def blocks_of(head: bytes, arrays: Sequence[AnyArray]) -> Iterator[bytes]:
    """Yield the stream in blocks of at most `SNAPSHOT_BLOCK_BYTES`."""
    block: list[memoryview] = []
    room = SNAPSHOT_BLOCK_BYTES
    for piece in (memoryview(head), *(a.data.cast("B") for a in arrays)):
        while piece:
            block.append(piece[:room])
            piece = piece[room:]
            room -= len(block[-1])
            if not room:
                yield b"".join(block)
                block, room = [], SNAPSHOT_BLOCK_BYTES
    if block:
        yield b"".join(block)


def next_block(blocks: Iterator[bytes]) -> tuple[bytes, int]:
    """Return the next block and its CRC-32; for 4 MiB in a thread, as making them would block the event loop."""
    block = next(blocks)
    return block, zlib_ng.crc32(block)

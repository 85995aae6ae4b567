"""Sequences of buffers that together hold one run of bytes."""

from collections.abc import Sequence

Pieces = Sequence[memoryview]


def first(pieces: Pieces, size: int) -> list[memoryview]:
    """Return the first `size` bytes, or all if there are fewer."""
    out = []
    for piece in pieces:
        if size <= 0:
            break
        out.append(piece[:size])
        size -= len(piece)
    return out


def after(pieces: Pieces, size: int) -> list[memoryview]:
    """Return what follows the first `size` bytes."""
    out = []
    for piece in pieces:
        if size < len(piece):
            out.append(piece[size:])
        size = max(0, size - len(piece))
    return out


def split(pieces: Pieces, payload_bytes_max: int, size: int) -> list[memoryview]:
    """Split into payloads of at most `payload_bytes_max` bytes, each within one piece, up to `size` in all."""
    out: list[memoryview] = []
    for piece in pieces:
        for at in range(0, len(piece), payload_bytes_max):
            payload = piece[at : at + payload_bytes_max]
            if len(payload) > size:
                return out
            size -= len(payload)
            out.append(payload)
    return out


def frames_begun(pieces: Pieces, size: int) -> tuple[int, int]:
    """Return how many frames (a header and a payload each) begin in the first `size` bytes, and where the last ends.

    The first frame is always counted.
    """
    count, end = 1, len(pieces[0]) + len(pieces[1])
    while end < size:
        end += len(pieces[2 * count]) + len(pieces[2 * count + 1])
        count += 1
    return count, end

"""Flat gradient buffers on the device, one per shard, and the transfer of their encoded bytes to the host.

float32 gradients on the CPU need neither (`HostGradients`); all others go through these buffers.

A shard's partitions are stored end to end in its buffer; for int8 each begins at a multiple of 256 elements, so that
all are encoded at once.  The codec's residual has a second buffer on the device.  On CUDA, the work runs on a side
stream and ends in pinned host memory; on a CPU, the same code runs without either.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from paramserver.client.cluster import ModelMap
from paramserver.client.encoding import Encoded, stored
from paramserver.client.gradient_arrays import GradientArrays
from paramserver.client.values import not_held
from paramserver.codecs.codec import Codec
from paramserver.core.selection import Selection, select
from paramserver.errors import combined, problem
from paramserver.torch import device_codecs
from paramserver.types import INT8_BLOCK, AnyArray


@dataclass(frozen=True, slots=True)
class _Location:
    """Location of one partition in its shard's buffer."""

    start: int
    """First element."""
    size: int
    byte: int
    """First byte in the packed bytes."""
    nbytes: int


class SideStream:
    """The CUDA stream that moves gradients and values; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self.cuda else None

    def after_current(self) -> AbstractContextManager[Any]:
        """Return a context that queues work on this stream, after all work queued on the current stream so far."""
        if not self.cuda:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return, unused-ignore]

    def wait(self) -> None:
        """Block until all work queued on this stream is done, such as copies to the host."""
        if self.cuda:
            self._stream.synchronize()

    def before_current(self) -> None:
        """Make work queued on the current stream from now on wait for all work queued on this one."""
        if self.cuda:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class ShardBuffer:
    """The gradients for one shard."""

    def __init__(self, partitions: Sequence[int], sizes: Sequence[int], codec: Codec, device: torch.device) -> None:
        align = INT8_BLOCK if codec.coding == "int8" else 1
        self.codec = codec
        self.locations: dict[int, _Location] = {}
        at = byte = 0
        for partition, size in zip(partitions, sizes, strict=True):
            nbytes = device_codecs.part_bytes(codec, size)
            self.locations[partition] = _Location(at, size, byte, nbytes)
            at, byte = at + size + -size % align, byte + nbytes
        self.grads = torch.zeros(at, dtype=torch.float32, device=device)
        self._residual = torch.zeros(at if codec.per_partition else 0, dtype=torch.float32, device=device)
        """What the codec has left out so far; empty for one without error feedback."""
        self._new_residual = torch.zeros_like(self._residual)
        self._accepted: set[int] = set()
        """Partitions whose new residual becomes the residual as soon as residuals are needed."""
        pinned = device.type == "cuda"
        self._host = torch.empty(byte, dtype=torch.uint8, device="cpu", pin_memory=True) if pinned else None

    def part(self, partition: int) -> Tensor:
        """Return one partition's gradient, float32 [size], to be written to."""
        location = self.locations[partition]
        return self.grads[location.start : location.start + location.size]

    def residual(self, partition: int) -> Tensor:
        """Return one partition's residual, what the codec left out so far; empty for codecs without error feedback."""
        self._commit_residuals()
        location = self.locations[partition]
        return self._residual[location.start : location.start + location.size]

    def encode(self) -> tuple[Tensor, Tensor]:
        """Return (packed bytes, which may still be in transfer to the host, squares); wait for the stream to use them.

        `squares`, float64 of shape [], is the sum of squares of what the bytes decode to (for elements of a dtype, of
        the values before rounding); it is not finite if an element is not.
        """
        codec = self.codec
        self._commit_residuals()
        if codec.coding == "int8":
            packed, squares = self._int8()
        elif codec.coding == "topk":
            packed, squares = self._topk()
        else:
            packed, squares = device_codecs.elements(self.grads, codec.coding)
        if self._host is None:
            return packed, squares
        self._host.copy_(packed, non_blocking=True)
        return self._host, squares

    def _int8(self) -> tuple[Tensor, Tensor]:
        scales, q, squares = device_codecs.int8_blocks(self.grads, self._residual, self._new_residual)
        pieces: list[Tensor] = []
        for location in self.locations.values():
            first = location.start // INT8_BLOCK
            pieces.append(scales[first : first + -(-location.size // INT8_BLOCK)].view(torch.uint8))
            pieces.append(q[location.start : location.start + location.size].view(torch.uint8))
        return torch.cat(pieces), squares

    def _topk(self) -> tuple[Tensor, Tensor]:
        pieces: list[Tensor] = []
        squares = torch.zeros((), dtype=torch.float64, device=self.grads.device)
        for location in self.locations.values():
            span = slice(location.start, location.start + location.size)
            residual, new_residual = self._residual[span], self._new_residual[span]
            data, more = device_codecs.topk(self.grads[span], residual, new_residual, self.codec.fraction)
            pieces.append(data)
            squares = squares + more
        return torch.cat(pieces), squares

    def keep(self, partitions: Collection[int]) -> None:
        """Record that the push was accepted on these partitions: what it left out of them is added to the next one."""
        self._accepted.update(self.locations.keys() & partitions)

    def _commit_residuals(self) -> None:
        """Replace residuals by accepted new ones, on the stream of the next encoding; no copy if all were accepted."""
        if not self.codec.per_partition:
            return
        if len(self._accepted) == len(self.locations):
            self._residual, self._new_residual = self._new_residual, self._residual
        else:
            for partition in self._accepted:
                location = self.locations[partition]
                span = slice(location.start, location.start + location.size)
                self._residual[span].copy_(self._new_residual[span])
        self._accepted.clear()


class HostGradients:
    """A module's float32 gradients on the CPU, in arrays that shards on this machine read in place."""

    def __init__(self, arrays: GradientArrays) -> None:
        self._arrays = arrays
        self._tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def arrange(self, model_map: ModelMap) -> None:
        """Do nothing: the layout does not depend on who owns the partitions."""

    def encode(self, grads: Mapping[str, Tensor | None]) -> GradientArrays:
        """Copy the gradients to the arrays and return these; None counts as zero.

        Raises RequestError (`non_finite`) for numbers in float64 that float32 cannot hold.
        """
        given = {name: grad.detach() for name, grad in grads.items() if grad is not None}
        held = {name: into for name, into in self._tensors.items() if name in given}
        torch._foreach_copy_(list(held.values()), [given[name] for name in held])
        for name, into in self._tensors.items():
            if name not in held:
                into.zero_()
            elif given[name].dtype == torch.float64 and bool((into.isinf() & given[name].isfinite()).any()):
                raise not_held(name, "float32")
        return self._arrays


class GradientBuffers:
    """The gradients of a whole model, grouped by shard; regrouped when partitions have moved."""

    def __init__(self, model_map: ModelMap, codec: Codec, device: torch.device) -> None:
        self.codec, self._device = codec, device
        self.side = SideStream(device)
        self.selection: Selection = select(model_map.layout)
        self._generation = model_map.generation
        self._owners: tuple[str | None, ...] = ()
        self._shards: list[ShardBuffer] = []
        self._shard_of: dict[int, ShardBuffer] = {}
        self.arrange(model_map)

    def arrange(self, model_map: ModelMap) -> None:
        """Group partitions by their current owners; keeps residuals, unless the model was deleted and created again."""
        if model_map.generation != self._generation:
            self.selection, self._generation = select(model_map.layout), model_map.generation
            self._owners, self._shard_of = (), {}
        if model_map.owners == self._owners:
            return
        sizes = {p.partition: p.stop - p.start for p in self.selection.parts}
        groups: dict[str | None, list[int]] = {}
        for partition in sizes:
            groups.setdefault(model_map.owners[partition], []).append(partition)
        before = self._shard_of
        self._shards = [ShardBuffer(g, [sizes[p] for p in g], self.codec, self._device) for g in groups.values()]
        self._shard_of = {p: shard for shard in self._shards for p in shard.locations}
        for partition, shard in self._shard_of.items():
            if partition in before:
                shard.residual(partition).copy_(before[partition].residual(partition))
        self._owners = model_map.owners
        self._pieces = [
            (piece.param, piece.source, piece.source + piece.length, target)
            for part in self.selection.parts
            for piece, target in zip(
                part.pieces,
                self._shard_of[part.partition].part(part.partition).split([piece.length for piece in part.pieces]),
                strict=True,
            )
        ]

    def encode(self, grads: Mapping[str, Tensor | None]) -> Encoded:
        """Return the encoded gradient; None counts as zero.  Raises RequestError (`non_finite`)."""
        flat = [None if (g := grads[p.name]) is None else g.detach().reshape(-1) for p in self.selection.params]
        with self.side.after_current():
            into, source = list[Tensor](), list[Tensor]()
            for param, start, stop, target in self._pieces:
                grad = flat[param]
                if grad is None:
                    target.zero_()
                else:
                    into.append(target)
                    source.append(grad[start:stop])
            torch._foreach_copy_(into, source)
            made = [shard.encode() for shard in self._shards]
            total = float(torch.stack([squares for _, squares in made]).sum())  # waits for the device
        self.side.wait()
        if not total < float("inf"):
            self._raise_non_finite(grads)
        parts: dict[int, tuple[AnyArray, int]] = {}
        for shard, (packed, _) in zip(self._shards, made, strict=True):
            host: AnyArray = packed.numpy()
            for partition, location in shard.locations.items():
                parts[partition] = stored(self.codec, host[location.byte : location.byte + location.nbytes])
        return Encoded(self.selection, self.codec, parts, sqrt(total), self._generation, self.keep)

    def _raise_non_finite(self, grads: Mapping[str, Tensor | None]) -> None:
        bad = [n for n, g in grads.items() if g is not None and not bool(g.isfinite().all())]
        if bad:
            raise combined([not_held(n, None) for n in bad])
        raise problem("non_finite", f"the gradient is out of range for {self.codec.text}")

    def keep(self, partitions: Collection[int]) -> None:
        """Record that the push was accepted on these partitions; it may still fail on others."""
        for shard in self._shards:
            shard.keep(partitions)

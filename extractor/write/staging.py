"""Staging: copies of states from the device to the host that the forward pass does not wait for.

The copies run on a CUDA stream of their own, and an event tells when a batch has landed in host memory.
On the CPU the same code runs without a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from extractor.layouts.planes import Blob, Plane, encode, finite_rows, surely_finite_rows
from extractor.records import Batch, CapturedBatch
from extractor.write.buffers import HostBuffer


@dataclass(eq=False)
class StagedBatch:
    """A batch whose states are in host memory or on their way to it.

    Attributes:
        batch: the batch, with its samples.
        planes: the planes, in the order in which they lie in the buffer.
        buffer: holds the rows of each plane, one row per token of the batch, in one piece.
    """

    batch: Batch
    planes: tuple[Plane, ...]
    buffer: HostBuffer
    _finite: torch.Tensor
    _arrival: Any = None
    _sources: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the bytes are in host memory, then drop the references to the device tensors."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._sources.clear()

    def let_go(self) -> HostBuffer:
        """Drop this batch's view of the buffer's memory and return the buffer."""
        self.__dict__.pop("_bytes", None)
        return self.buffer

    @cached_property
    def _columns(self) -> list[tuple[str, torch.dtype, int, int, int]]:
        """Of each plane: key, dtype, width, bytes per row, and the offset of its first row in bytes."""
        base, columns = 0, []
        for plane in self.planes:
            columns.append((plane.key, plane.dtype, plane.width, plane.row_bytes, base))
            base += plane.row_bytes * self.batch.num_tokens
        return columns

    @cached_property
    def _bytes(self) -> memoryview:
        return self.buffer.tensor.numpy().data

    @cached_property
    def _all_finite(self) -> bool:
        return bool(self._finite.numpy().all())

    def tensor(self, plane: Plane, sequence: int) -> torch.Tensor:
        """One sequence's rows of a plane: a view of the buffer, in the plane's dtype.

        The shape is [T, width] for T tokens, or [T] for a plane of width 0."""
        blob = self.blobs(sequence)[plane.key]
        return torch.frombuffer(blob.data, dtype=blob.dtype).view(blob.shape)

    def blobs(self, sequence: int) -> dict[str, Blob]:
        """One sequence's rows of every plane, as views of the buffer, by the plane's key.

        The shapes are those of tensor()."""
        begin, end = self.batch.offsets[sequence : sequence + 2]
        tokens, held = end - begin, self._bytes
        return {
            key: Blob(
                dtype,
                (tokens, width) if width else (tokens,),
                held[base + begin * size : base + end * size],
            )
            for key, dtype, width, size, base in self._columns
        }

    def places(self, sequence: int) -> list[tuple[int, int]]:
        """Where one sequence's rows of every plane lie in the buffer: (offset, length) in bytes."""
        begin, end = self.batch.offsets[sequence : sequence + 2]
        tokens = end - begin
        return [(base + begin * size, tokens * size) for _, _, _, size, base in self._columns]

    def first_bad_token(self, sequence: int) -> tuple[Plane, int] | None:
        """The plane and the index of the first token of a sequence with a value that is not finite.

        None when all values are finite. The flags computed on the device may be False for a row that
        is finite (see surely_finite_rows), so such a sequence is checked exactly here."""
        if self._all_finite:
            return None
        begin, end = self.batch.offsets[sequence : sequence + 2]
        if bool(self._finite[:, begin:end].all()):
            return None
        # Each value is checked, in host memory; the earliest bad token over all planes counts.
        good = torch.stack([finite_rows(self.tensor(plane, sequence)) for plane in self.planes])
        bad = (~good).nonzero()
        if not len(bad):
            return None
        plane, token = min(bad.tolist(), key=lambda at: (at[1], at[0]))
        return self.planes[plane], token


class Stager:
    """Copies the states of captured batches to host buffers.

    Args:
        planes: what a sample's file stores.
        device: where the states are."""

    def __init__(self, planes: Sequence[Plane], device: torch.device) -> None:
        self._planes = tuple(planes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def nbytes(self, tokens: int) -> int:
        """Bytes that all planes of a batch of so many tokens take."""
        return tokens * sum(plane.row_bytes for plane in self._planes)

    def stage(self, captured: CapturedBatch, buffer: HostBuffer) -> StagedBatch:
        """Start the copy into a buffer of at least nbytes(tokens) bytes.

        On CUDA this returns at once, except when the buffer is new and not pinned yet. Raises RunError
        when the buffer cannot be pinned."""
        buffer.wait_until_locked()
        if self._stream is None:
            return self._copy(captured, buffer)
        # The copy starts when the forward pass, on the current stream, has computed the states.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._copy(captured, buffer)

    @torch.no_grad()
    def _copy(self, captured: CapturedBatch, buffer: HostBuffer) -> StagedBatch:
        tokens = captured.batch.num_tokens
        # States are encoded to the stored dtypes on the device, then copied plane after plane.
        encoded = encode(self._planes, captured.states)
        base = 0
        for plane in self._planes:
            size = plane.row_bytes * tokens
            target = buffer.tensor[base : base + size].view(plane.dtype).view(plane.shape(tokens))
            target.copy_(encoded[plane.key], non_blocking=True)
            base += size
        # The flags, bool [planes, tokens], are computed on the device, where a pass over the states is
        # cheap. The host checks exactly only the sequences with a flag that is False.
        finite = torch.stack([surely_finite_rows(encoded[p.key]) for p in self._planes])
        if self._stream is None:
            return StagedBatch(captured.batch, self._planes, buffer, finite)
        host_finite = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
        host_finite.copy_(finite, non_blocking=True)
        arrival = torch.cuda.Event(blocking=True)
        arrival.record(self._stream)
        # These references are kept until the copy is done: PyTorch would otherwise give the memory of
        # the forward's stream to the next pass while this stream still reads it.
        sources = [*captured.states.values(), *encoded.values(), finite]
        return StagedBatch(captured.batch, self._planes, buffer, host_finite, arrival, sources)

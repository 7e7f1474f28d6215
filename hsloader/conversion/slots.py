"""Room for chunks in flight, kept from one segment to the next: fresh memory costs its page faults each time."""

from __future__ import annotations

from collections.abc import Sequence

from hsloader.conversion.chunks import ChunkEncoder
from hsloader.formats.source import RowBuffer
from hsloader.store.codec import Codec

__all__ = ["Slot", "Slots"]


class Slot:
    """Room for one chunk: the memory its rows are read into, and an encoder for each field."""

    __slots__ = ("_digest", "_encoders", "buffer")

    def __init__(self, digest: bool) -> None:
        self.buffer = RowBuffer()
        self._digest = digest
        self._encoders: dict[Codec, ChunkEncoder] = {}

    def encoder(self, codec: Codec) -> ChunkEncoder:
        """The encoder of a field's chunks."""
        encoder = self._encoders.get(codec)
        if encoder is None:
            encoder = self._encoders[codec] = ChunkEncoder(codec, digest=self._digest)
        return encoder


class Slots:
    """The slots of a process that writes one segment after another."""

    def __init__(self) -> None:
        self._kind: tuple[tuple[Codec, ...], bool] | None = None
        self._slots: list[Slot] = []

    def take(self, codecs: Sequence[Codec], count: int, *, keep: int, digest: bool) -> list[Slot]:
        """``count`` slots for chunks of these codecs, the first of them from the last call if that was for the same.

        ``keep`` are remembered for the next call; the others live as long as the caller holds them.
        """
        kind = tuple(codecs), digest
        if kind != self._kind:
            self._kind, self._slots = kind, []
        slots = self._slots[:count] + [Slot(digest) for _ in range(count - len(self._slots))]
        self._slots = slots[:keep]
        return slots

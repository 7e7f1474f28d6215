"""Problem: one thing that ``verify`` found wrong."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    ``kind``: manifest, packed, group, segment, table, array, shard, chunk, padding, sample, names, unexpected.
    ``path``: the file or directory.  ``text``: expected and found, in words.  ``chunk``: number along the array, where
    one chunk is hit.  ``samples``: names of the samples that are hit (their number in the segment where the names are
    damaged too).
    """

    kind: str
    path: str
    text: str
    chunk: int | None = None
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One printable line, whatever bytes are in the names."""
        text = self.text if self.text.startswith(self.path) else f"{self.path}: {self.text}"
        if self.chunk is not None:
            text += f" (chunk {self.chunk})"
        if self.samples:
            more = len(self.samples) - _NAMES_SHOWN
            text += f"; hits {', '.join(self.samples[:_NAMES_SHOWN])}" + (f" and {more:,} more" if more > 0 else "")
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

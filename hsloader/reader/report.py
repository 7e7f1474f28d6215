"""What the feeder was at, in words, for the error that says how it ended."""

from __future__ import annotations

from hsloader.reader.counters import Stage, ThreadCounter
from hsloader.reader.ring import Ring

__all__ = ["file_in_hand"]

_BUSY = (Stage.INDEX, Stage.READ, Stage.DECODE)


def file_in_hand(ring: Ring) -> str:
    """What the feeder's threads were reading, as the end of a sentence; empty if nothing."""
    found = []
    for number, row in enumerate(ring.threads):
        if row[ThreadCounter.TID] and row[ThreadCounter.STAGE] in _BUSY:
            name = ring.path(number)
            place = f"{name} at byte {row[ThreadCounter.OFFSET]:,}" if row[ThreadCounter.LENGTH] else name
            if name and place not in found:
                found.append(place)
    if not found:
        return ""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"; it was reading {', '.join(found[:4])}{more} in {ring.info().get('dataset', 'its dataset')}"

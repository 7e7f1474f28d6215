"""What the ring's counters say, in words and numbers, for errors and ``stats()``."""

from __future__ import annotations

from hsloader.reader.counters import FeederCounter, Stage, ThreadCounter, TrainerCounter
from hsloader.reader.ring import Ring

__all__ = ["file_in_hand", "summary"]

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


def summary(ring: Ring) -> dict[str, float]:
    """The reader's counters as a flat dict of floats.

    Names end in their unit: ``_bytes``, ``_seconds`` (thread-seconds for ``read``, ``index``, ``buffer`` and
    ``decode``), else counts. ``read_bytes`` counts what was asked of the file system, ``decoded_bytes`` what that gave.
    """
    trainer, feeder = ring.trainer, ring.feeder
    threads = ring.threads.sum(axis=0)
    found = {
        "batches_requested": trainer[TrainerCounter.REQUESTED],
        "batches_received": trainer[TrainerCounter.RECEIVED],
        "batches_filled": feeder[FeederCounter.FILLED],
        "batches_cancelled": trainer[TrainerCounter.CANCELLED],
        "wait_seconds": trainer[TrainerCounter.WAIT_NS] / 1e9,
        "last_wait_seconds": trainer[TrainerCounter.LAST_WAIT_NS] / 1e9,
        "fill_seconds": feeder[FeederCounter.FILL_NS] / 1e9,
        "restarts": trainer[TrainerCounter.RESTARTS],
        "bad_samples": trainer[TrainerCounter.BAD_SAMPLES],
        "reads": threads[ThreadCounter.READS],
        "read_bytes": threads[ThreadCounter.READ_BYTES],
        "read_seconds": threads[ThreadCounter.READ_NS] / 1e9,
        "index_seconds": threads[ThreadCounter.INDEX_NS] / 1e9,
        "buffer_seconds": threads[ThreadCounter.BUFFER_NS] / 1e9,
        "frames": threads[ThreadCounter.FRAMES],
        "cut_frames": threads[ThreadCounter.CUT_FRAMES],
        "bad_frames": threads[ThreadCounter.BAD_FRAMES],
        "frame_bytes": threads[ThreadCounter.FRAME_BYTES],
        "decoded_bytes": threads[ThreadCounter.DECODED_BYTES],
        "decode_seconds": threads[ThreadCounter.DECODE_NS] / 1e9,
        "zeroed_bytes": threads[ThreadCounter.ZEROED_BYTES],
        "token_chunk_hits": threads[ThreadCounter.TOKEN_HITS],
        "dropped_bytes": threads[ThreadCounter.DROPPED_BYTES],
        "open_shards": feeder[FeederCounter.OPEN_SHARDS],
        "read_threads": feeder[FeederCounter.READERS],
        "decode_threads": feeder[FeederCounter.DECODERS],
    }
    return {name: float(value) for name, value in found.items()}

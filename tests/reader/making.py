"""Small datasets and batches for the reader's tests, and what a batch must hold according to ``dataset.read``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsloader.reader.client import FeederClient
from hsloader.reader.options import ReadOptions
from hsloader.reader.pieces import PIECES, BatchRequest, span_offsets
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.dtypes import DTYPES
from hsloader.store.writer import Writer

ROWS = 400  # of every span

USUAL: dict[str, Any] = {
    "hidden_states": ("bfloat16", (3, 64)),
    "last_hidden_state": ("bfloat16", (64,)),
    "input_ids": "int32",
    "loss_mask": "uint8",
}


def every_type() -> dict[str, Any]:
    """A state field and a token field of every data type."""
    states = {f"state_{name}": (name, (40,)) for name in DTYPES if DTYPES[name].item_size > 1}
    states |= {f"state_{name}": (name, (130,)) for name in DTYPES if DTYPES[name].item_size == 1}
    return states | {f"token_{name}": (name, ()) for name in DTYPES}


def make_dataset(
    path: Path,
    fields: dict[str, Any] | None = None,
    samples: int = 40,
    longest: int = 150,
    seed: int = 0,
    **settings: Any,
) -> Dataset:
    """A dataset of random samples in small shards and several segments."""
    rng = np.random.default_rng(seed)
    settings = {"typical_length": 60, "shard_bytes": 1 << 18, "segment_bytes": 1 << 21, **settings}
    with Writer(path, fields or USUAL, **settings) as writer:
        for _ in range(samples):
            length = int(rng.integers(5, longest))
            writer.append(**{field.name: random_bits(rng, field, length) for field in writer.fields or ()})
    return open_dataset(path)


def random_bits(rng: np.random.Generator, field: Any, length: int) -> np.ndarray[Any, Any]:
    """Values of a field as its bits; floats are ordinary numbers, so that they compress as states do."""
    shape = (length, *field.shape)
    bits = field.type.bits
    if field.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if field.dtype == "bfloat16":
        return (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(bits)
    if bits.kind == "f":
        return rng.normal(size=shape).astype(bits)
    info = np.iinfo(bits)
    return rng.integers(info.min, info.max, shape, dtype=bits, endpoint=True)


def make_client(dataset: Dataset, slots: int = 4, rows: int = ROWS, **options: Any) -> FeederClient:
    """A client for batches whose spans all have ``rows`` rows."""
    fields = list(dataset.fields)
    size = span_offsets([rows] * len(fields), [dataset.fields[name].row_bytes for name in fields])[1]
    page = -(-size // 4096) * 4096
    return FeederClient(dataset, fields, slot_bytes=size, budget=slots * page, options=ReadOptions(**options))


def request_of(pieces: Sequence[tuple[int, int, int, int, int]], fields: int, rows: int = ROWS) -> BatchRequest:
    """A request of spans of ``rows`` rows."""
    return BatchRequest((rows,) * fields, np.array(pieces, PIECES))


def random_request(rng: np.random.Generator, dataset: Dataset, rows: int = ROWS) -> BatchRequest:
    """A batch of whole samples, cut samples and gaps, another for each field."""
    pieces = []
    for field in range(len(dataset.fields)):
        at = int(rng.integers(0, 5))
        while True:
            sample = int(rng.integers(0, len(dataset)))
            length = int(dataset.lengths[sample])
            start = int(rng.integers(0, length)) if rng.random() < 0.5 else 0
            stop = int(rng.integers(start, length + 1)) if rng.random() < 0.5 else length
            if at + stop - start > rows:
                break
            pieces.append((field, sample, start, stop, at))
            at += stop - start + int(rng.integers(0, 3))
    order = rng.permutation(len(pieces))
    return request_of([pieces[i] for i in order], len(dataset.fields), rows)


def expected(dataset: Dataset, request: BatchRequest) -> list[np.ndarray[Any, Any]]:
    """The spans that ``request`` must give."""
    spans = []
    for number, (name, field) in enumerate(dataset.fields.items()):
        span = np.zeros((request.rows[number], *field.shape), field.type.bits)
        for index, sample, start, stop, dest in request.pieces.tolist():
            if index == number:
                span[dest : dest + stop - start] = dataset.read(sample, name, start, stop)
        spans.append(span)
    return spans


def assert_filled(dataset: Dataset, request: BatchRequest, filled: Any) -> None:
    """Demand that a filled batch is what was asked."""
    assert filled is not None
    for name, found, wanted in zip(dataset.fields, filled.spans, expected(dataset, request), strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        # As bytes: a NaN equals itself.
        assert found.tobytes() == wanted.tobytes(), name


def poison(client: FeederClient) -> None:
    """Fill every slot with ones, so that rows nobody wrote are seen."""
    for slot in range(client.slots):
        client.ring.slot(slot)[:] = 0xFF


def eventually(happened: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether something happens within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def runs(pid: int) -> bool:
    """Whether a process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""Makes small datasets for the tests: samples of bits, written through ``Writer`` or ``SegmentWriter``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout
from hsloader.store.samples import mask_counts
from hsloader.store.segment import SegmentWriter
from hsloader.store.writer import Writer

Sample = dict[str, np.ndarray[Any, Any]]

HIDDEN = 64
FIELDS = (
    Field(name="hidden_states", dtype="bfloat16", shape=(3, HIDDEN)),
    Field(name="last_hidden_state", dtype="bfloat16", shape=(HIDDEN,)),
    Field(name="input_ids", dtype="int32"),
    Field(name="loss_mask", dtype="uint8"),
)


def random_sample(rng: np.random.Generator, length: int, fields: tuple[Field, ...] = FIELDS) -> Sample:
    """Bits of one sample: states like bfloat16 numbers around one, ids, a mask of zeros and ones."""
    sample: Sample = {}
    for field in fields:
        shape = (length, *field.shape)
        if field.name == "loss_mask":
            bits = rng.integers(0, 2, shape)
        elif field.dtype == "bfloat16":
            bits = rng.standard_normal(shape, np.float32).view(np.uint32) >> 16
        else:
            bits = rng.integers(0, 100, shape)
        sample[field.name] = bits.astype(field.type.bits)
    return sample


def write_dataset(path: Path, samples: list[Sample], **options: Any) -> None:
    """Write samples named s0, s1, ... to a dataset of ``FIELDS``; small shards unless told otherwise."""
    options = {"typical_length": 100, "shard_bytes": 300_000, "norm_state": "pre", **options}
    first = options.pop("first", 0)
    with Writer(path, options.pop("fields", FIELDS), **options) as writer:
        for i, sample in enumerate(samples, first):
            writer.append(name=f"s{i}", extras={"number": i}, **sample)


def fill_segment(
    writer: SegmentWriter, samples: list[Sample], fields: tuple[Field, ...] = FIELDS, *, prefix: str = "s"
) -> None:
    """Append samples named s0, s1, ... (or with another ``prefix``) to a segment."""
    encoders = {field.name: writer.codec(field.name).encoder() for field in fields if not field.is_token_field}
    for i, sample in enumerate(samples):
        length = len(sample[fields[0].name])
        writer.begin(f"{prefix}{i}", length)
        append_frames(writer, sample, encoders)
        tokens = {field.name: sample[field.name] for field in fields if field.is_token_field}
        loss_tokens, first = mask_counts(sample["loss_mask"], "uint8") if "loss_mask" in sample else (-1, -1)
        writer.commit(tokens, loss_tokens=loss_tokens, first_supervised=first)


def append_frames(writer: SegmentWriter, sample: Sample, encoders: dict[str, Any]) -> None:
    """Encode and append the state fields of the open sample."""
    for name, encoder in encoders.items():
        rows = sample[name].reshape(len(sample[name]), -1)
        for start, stop in writer.chunks(name, len(rows)):
            writer.append(name, encoder.encode([rows[start:stop]]))


def tiny_layout(fields: tuple[Field, ...] = FIELDS, *, alignment: int = 16, shard_chunks: int = 3) -> RowLayout:
    """Chunks of ``alignment`` rows (8 of token fields) and shards of about ``shard_chunks`` chunks."""
    chunk_rows = {field.name: 8 if field.is_token_field else alignment for field in fields}
    widest = max(field.row_bytes for field in fields)
    return RowLayout(
        alignment=alignment,
        chunk_rows=chunk_rows,
        shard_bytes=shard_chunks * alignment * widest,
        typical_length=alignment,
    )


def tree(path: Path) -> dict[str, bytes]:
    """Every file below ``path`` with its bytes."""
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}

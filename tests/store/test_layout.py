"""The row layout follows the format's rule."""

from __future__ import annotations

import pytest

from hsloader.store.fields import Field
from hsloader.store.layout import TOKEN_CHUNK_ROWS, choose_layout, first_chunk_alignment


def _fields(hidden: int, layers: int) -> tuple[Field, ...]:
    return (
        Field(name="hidden_states", dtype="bfloat16", shape=(layers, hidden)),
        Field(name="last_hidden_state", dtype="bfloat16", shape=(hidden,)),
        Field(name="input_ids", dtype="int32"),
    )


@pytest.mark.parametrize(
    ("hidden", "layers", "typical", "alignment", "chunk"),
    [
        (7168, 3, 1700, 128, 64),  # 2 MiB / narrowest row limits the alignment, 3 MiB the chunk
        (2048, 3, 147, 32, 32),  # 147 / 4
        (768, 1, 74, 64, 64),  # 128 KiB / widest row
        (7168, 3, 1, 2, 2),
        (7168, 3, 100_000, 128, 64),
    ],
)
def test_alignment_and_chunks(hidden: int, layers: int, typical: int, alignment: int, chunk: int) -> None:
    layout = choose_layout(_fields(hidden, layers), typical)
    assert layout.alignment == alignment
    assert layout.chunk_rows["hidden_states"] == chunk
    assert layout.alignment % layout.chunk_rows["last_hidden_state"] == 0
    assert layout.chunk_rows["input_ids"] == TOKEN_CHUNK_ROWS


def test_a_row_above_the_largest_chunk_is_a_chunk_of_its_own() -> None:
    layout = choose_layout((Field(name="logits", dtype="float32", shape=(1 << 20,)),), 10)
    assert layout.chunk_rows["logits"] == 1


def test_token_fields_alone_need_no_padding() -> None:
    layout = choose_layout((Field(name="input_ids", dtype="int32"),), 100)
    assert layout.alignment == 1
    assert layout.padded(7) == 7


def test_shards_are_about_a_gibibyte_of_raw_rows() -> None:
    fields = _fields(7168, 3)
    layout = choose_layout(fields, 1700)
    raw = layout.shard_chunks(fields[0]) * layout.chunk_rows["hidden_states"] * fields[0].row_bytes
    assert 0.99 * (1 << 30) < raw <= 1 << 30
    assert choose_layout(fields, 1700, shard_bytes=1).shard_chunks(fields[0]) == 1


def test_large_samples_begin_on_pages() -> None:
    assert first_chunk_alignment(256 << 10) == 4096
    assert first_chunk_alignment((256 << 10) - 1) == 64


def test_a_typical_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        choose_layout(_fields(64, 3), 0)

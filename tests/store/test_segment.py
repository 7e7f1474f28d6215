"""SegmentWriter: boundaries, rollback, determinism, and what other zarr readers rely on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader.store.fields import Field
from hsloader.store.layout import RowLayout
from hsloader.store.manifest import SegmentEntry
from hsloader.store.segment import SegmentWriter
from hsloader.store.shard import ABSENT
from hsloader.store.stored_segment import Segment
from tests.store.making import FIELDS, Sample, append_frames, fill_segment, random_sample, tiny_layout, tree

STATES = [field.name for field in FIELDS if not field.is_token_field]


def _write(path: Path, samples: list[Sample], layout: RowLayout | None = None) -> SegmentEntry:
    with SegmentWriter(path, FIELDS, layout or tiny_layout()) as writer:
        fill_segment(writer, samples)
        return writer.seal()


def test_every_chunk_that_holds_rows_is_in_the_index_and_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    entry = _write(tmp_path / "s", [random_sample(rng, n) for n in (1, 16, 17, 100)])
    segment = Segment(tmp_path / "s", entry)
    assert entry.rows == 16 + 16 + 32 + 112
    for field in FIELDS:
        array = segment.array(field.name)
        held = 0
        for shard in range(array.shards):
            index = array.index(shard)
            assert len(index) == array.shard_chunks
            held += int((index[:, 0] != ABSENT).sum())
        assert held == -(-entry.rows // array.chunk_rows)


def test_the_only_shard_of_an_array_has_no_empty_slots(tmp_path: Path) -> None:
    fields = (Field(name="states", dtype="float16", shape=(256,)), Field(name="ids", dtype="int32"))
    layout = RowLayout(alignment=16, chunk_rows={"states": 16, "ids": 64}, shard_bytes=32 << 10)
    sample = {"states": np.ones((40, 256), "<f2"), "ids": np.arange(40, dtype="<i4")}
    for count, shards, slots in ((1, 1, 3), (2, 2, 4)):
        path = tmp_path / str(count)
        with SegmentWriter(path, fields, layout) as writer:
            fill_segment(writer, [sample] * count, fields)
            array = Segment(path, writer.seal()).array("states")
        assert (array.shards, array.shard_chunks) == (shards, slots)
        document = json.loads((path / "states" / "zarr.json").read_bytes())
        assert document["chunk_grid"]["configuration"]["chunk_shape"] == [slots * 16, 256]


def test_samples_start_at_multiples_of_the_alignment_and_of_64_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    entry = _write(tmp_path / "s", [random_sample(rng, n) for n in (5, 33, 16, 1)])
    segment = Segment(tmp_path / "s", entry)
    first_rows = segment.table()[0]
    assert first_rows.tolist() == [0, 16, 64, 80]
    array = segment.array("hidden_states")
    for row in first_rows.tolist():
        shard, slot = divmod(row // array.chunk_rows, array.shard_chunks)
        assert int(array.index(shard)[slot, 0]) % 64 == 0


def test_large_samples_start_on_pages(tmp_path: Path) -> None:
    fields = (Field(name="states", dtype="float32", shape=(1024,), codec="none"),)
    layout = RowLayout(alignment=64, chunk_rows={"states": 64}, typical_length=64)
    sample = {"states": np.ones((65, 1024), "<f4")}
    with SegmentWriter(tmp_path / "s", fields, layout) as writer:
        fill_segment(writer, [sample, sample], fields)
        entry = writer.seal()
    index = Segment(tmp_path / "s", entry).array("states").index(0)
    assert [int(offset) % 4096 for offset in index[:4:2, 0]] == [0, 0]
    assert int(index[1, 0]) == int(index[0].sum()) + -int(index[0].sum()) % 8  # within a sample only to eight bytes


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    samples = [random_sample(np.random.default_rng(1), n) for n in (40, 3)]
    assert _write(tmp_path / "a", samples) == _write(tmp_path / "b", samples)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 200])
@pytest.mark.parametrize("where", ["begun", "one frame", "all frames", "one field"])
def test_a_rolled_back_sample_leaves_no_trace(tmp_path: Path, length: int, where: str) -> None:
    rng = np.random.default_rng(2)
    before, bad, after = (random_sample(rng, n) for n in (70, length, 30))
    with SegmentWriter(tmp_path / "with", FIELDS, tiny_layout()) as writer:
        fill_segment(writer, [before])
        encoders = {name: writer.codec(name).encoder() for name in STATES}
        writer.begin("bad", length)
        if where == "one frame":
            start, stop = writer.chunks("hidden_states", length)[0]
            rows = bad["hidden_states"][start:stop].reshape(stop - start, -1)
            writer.append("hidden_states", encoders["hidden_states"].encode([rows]))
        elif where == "all frames":
            append_frames(writer, bad, encoders)
        elif where == "one field":
            append_frames(writer, bad, {"hidden_states": encoders["hidden_states"]})
        writer.rollback()
        fill_segment(writer, [after])
        entry = writer.seal()
    assert entry == _write_named(tmp_path / "without", [before, after])
    assert tree(tmp_path / "with") == tree(tmp_path / "without")


def _write_named(path: Path, samples: list[Sample]) -> SegmentEntry:
    """As the test above names them: each call of fill_segment begins at s0."""
    with SegmentWriter(path, FIELDS, tiny_layout()) as writer:
        for sample in samples:
            fill_segment(writer, [sample])
        return writer.seal()


def test_a_sample_with_missing_frames_or_tokens_is_not_committed(tmp_path: Path) -> None:
    sample = random_sample(np.random.default_rng(3), 40)
    tokens = {name: sample[name] for name in ("input_ids", "loss_mask")}
    with SegmentWriter(tmp_path / "s", FIELDS, tiny_layout()) as writer:
        encoders = {name: writer.codec(name).encoder() for name in STATES}
        writer.begin("x", 40)
        with pytest.raises(ValueError, match=r"expected 3 frames for 40 tokens .16 rows a chunk., found 0"):
            writer.commit(tokens)
        append_frames(writer, sample, encoders)
        with pytest.raises(ValueError, match="expected the token fields"):
            writer.commit({"input_ids": sample["input_ids"]})
        with pytest.raises(ValueError, match=r"field input_ids: expected int32 \[40\], found int64 \[40\]"):
            writer.commit({**tokens, "input_ids": sample["input_ids"].astype(np.int64)})
        writer.commit(tokens)
        with pytest.raises(RuntimeError, match="no sample is open"):
            writer.commit(tokens)
        assert writer.seal().samples == 1


def test_an_unsealed_segment_leaves_no_shards(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "s", FIELDS, tiny_layout(shard_chunks=100)) as writer:
        fill_segment(writer, [random_sample(np.random.default_rng(4), 40)])
    assert not tree(tmp_path / "s")


def test_an_empty_segment_is_not_sealed(tmp_path: Path) -> None:
    with (
        SegmentWriter(tmp_path / "s", FIELDS, tiny_layout()) as writer,
        pytest.raises(ValueError, match="at least one"),
    ):
        writer.seal()


def test_quarantine_source_names_and_extras_are_kept(tmp_path: Path) -> None:
    sample = random_sample(np.random.default_rng(5), 3)
    tokens = {name: sample[name] for name in ("input_ids", "loss_mask")}
    quarantine: list[dict[str, Any]] = [{"name": "bad.pt", "reason": "NaN in layer 2"}]
    names = ["rows_0-9/d\udce9j\u00e0.pt", "x" * 300]
    with SegmentWriter(tmp_path / "s", FIELDS, tiny_layout()) as writer:
        encoders = {name: writer.codec(name).encoder() for name in STATES}
        for name, extras in zip(names, ({"id": 2**63, "text": "\u00e9\n"}, None), strict=True):
            writer.begin(name, 3)
            append_frames(writer, sample, encoders)
            writer.commit(tokens, flags=1, extras=extras)
        entry = writer.seal(quarantine, {"plan": 7})
    segment = Segment(tmp_path / "s", entry)
    assert segment.meta.quarantine == tuple(quarantine)
    assert segment.meta.source == {"plan": 7}
    assert [segment.name(i) for i in range(2)] == names
    assert segment.extras(0) == {"id": 2**63, "text": "\u00e9\n"}
    assert segment.extras(1) == {}
    assert segment.table()[5].tolist() == [1, 1]


def test_extras_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    sample = random_sample(np.random.default_rng(6), 3)
    tokens = {name: sample[name] for name in ("input_ids", "loss_mask")}
    with SegmentWriter(tmp_path / "s", FIELDS, tiny_layout()) as writer:
        writer.begin("x", 3)
        append_frames(writer, sample, {name: writer.codec(name).encoder() for name in STATES})
        for extras in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(ValueError, match="JSON"):
                writer.commit(tokens, extras=extras)
        writer.commit(tokens, extras={"x": None})


def test_bf16_as_uint16_names_the_type_for_other_readers(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "s", FIELDS, tiny_layout(), bf16_as="uint16") as writer:
        fill_segment(writer, [random_sample(np.random.default_rng(7), 3)])
        entry = writer.seal()
    assert json.loads((tmp_path / "s/hidden_states/zarr.json").read_text())["data_type"] == "uint16"
    assert Segment(tmp_path / "s", entry).array("hidden_states").field.dtype == "bfloat16"


def test_a_token_chunk_that_failed_is_written_once_when_the_next_sample_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = (Field(name="scores", dtype="float32", shape=(16,), codec="none"),)
    layout = RowLayout(alignment=1, chunk_rows={"scores": 40_000})
    bits = np.random.default_rng(8).standard_normal((96_000, 16), np.float32)

    def write(path: Path, fails: bool) -> SegmentEntry:
        with SegmentWriter(path, fields, layout) as writer:
            writer.begin("a", 96_000)
            writer.commit({"scores": bits})
            if fails:
                with monkeypatch.context() as patched:
                    patched.setattr(os, "pwritev", _second_fails(os.pwritev))
                    with pytest.raises(OSError, match="No space"):
                        writer.begin("b", 1)
            writer.begin("b", 1)
            writer.commit({"scores": bits[:1]})
            return writer.seal()

    assert write(tmp_path / "failing", True) == write(tmp_path / "undisturbed", False)
    assert tree(tmp_path / "failing") == tree(tmp_path / "undisturbed")


def _second_fails(real: Any) -> Any:
    calls: list[int] = []

    def write(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(real(*arguments))

    return write

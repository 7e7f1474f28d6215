"""The parts of a conversion that decide something: checks, agreement, digests, padding, room, plans as JSON."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader import ConversionError
from hsloader.conversion.agreement import agree, fields_of
from hsloader.conversion.checks import ChunkCheck, StateCheck, check_ids
from hsloader.conversion.digests import columns_digest, rows_digest
from hsloader.conversion.plan import Plan, PlannedSegment, group_samples
from hsloader.conversion.provenance import provenance_of
from hsloader.conversion.report import Quarantined
from hsloader.conversion.settings import ConvertSettings
from hsloader.conversion.slots import Slots
from hsloader.conversion.space import SegmentSize, most_ahead, peak_bytes
from hsloader.conversion.task import length_without_padding
from hsloader.formats.source import ArrowFile, FieldSpec, Identity, SampleSource
from hsloader.store.codec import Codec
from hsloader.store.dtypes import DTYPES
from hsloader.store.fields import Field
from hsloader.store.manifest import Provenance

SPECS = (
    FieldSpec("input_ids", "int32", (), "int64"),
    FieldSpec("hidden_states", "bfloat16", (3, 64), "bfloat16"),
    FieldSpec("last_hidden_state", "bfloat16", (64,), "bfloat16"),
)

# By dtype: the largest finite pattern, the smallest and largest pattern of a NaN, and that of infinity if there is one.
PATTERNS = {
    "float16": (0x7BFF, 0x7C01, 0x7FFF, 0x7C00),
    "bfloat16": (0x7F7F, 0x7F81, 0x7FFF, 0x7F80),
    "float32": (0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, 0x7F800000),
    "float64": (0x7FEFFFFFFFFFFFFF, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float8_e4m3fn": (0x7E, 0x7F, 0x7F, None),
    "float8_e5m2": (0x7B, 0x7D, 0x7F, 0x7C),
}


def sample(name: str, length: int = 10, specs: tuple[FieldSpec, ...] = SPECS, **more: object) -> SampleSource:
    made = SampleSource(
        name=name,
        path=f"/src/{name}",
        row=None,
        length=length,
        specs=specs,
        layout="speculators-list",
        identity=Identity(1000 + length, 7, 8),
        payload_bytes=length * 520,
    )
    return replace(made, **more)


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize("negative", [False, True])
def test_exactly_the_values_that_are_not_finite_are_found(dtype: str, negative: bool) -> None:
    bits = DTYPES[dtype].bits
    largest, first_nan, last_nan, infinity = PATTERNS[dtype]
    sign = (1 << (8 * bits.itemsize - 1)) if negative else 0
    check = StateCheck(dtype, bits)
    words = np.zeros((5, 12), f"u{bits.itemsize}")
    rows = words.view(bits)
    words[:, 3] = 1
    words[1, 2] = largest | sign
    assert check([rows[:, :4], rows[:, 4:]]) == ChunkCheck()
    for value, counts in ((first_nan, (1, 0)), (last_nan, (1, 0)), (infinity, (0, 1))):
        if value is None:
            continue
        words[3, 7] = value | sign
        found = check([rows[:, :4], rows[:, 4:]])
        assert (found.nans, found.infinities, found.first_row) == (*counts, 3)


def test_zero_rows_are_those_of_either_zero_in_every_part() -> None:
    check = StateCheck("bfloat16", DTYPES["bfloat16"].bits)
    rows = np.full((6, 8), 0x3F80, np.uint16)
    rows[0] = 0
    rows[1] = 0x8000
    rows[2, ::2] = 0
    rows[2, 1::2] = 0x8000
    rows[3, :4] = 0  # only in one part
    rows[4] = 1  # subnormal
    rows[5, 1:] = 0
    assert check([rows[:, :4], rows[:, 4:]]).zero_rows == 3
    assert check([rows[:, :0], rows]).zero_rows == 3
    assert check([rows[:, :0]]) == ChunkCheck()


def test_slots_are_kept_for_chunks_of_the_same_kind_alone() -> None:
    slots = Slots()
    codecs = [Codec(Field(name="hidden_states", dtype="bfloat16", shape=(3, 64)), rows) for rows in (8, 8, 16)]
    first = slots.take(codecs[:1], 4, keep=2, digest=True)
    encoder = first[0].encoder(codecs[0])
    assert first[0].encoder(codecs[1]) is encoder
    second = slots.take(codecs[1:2], 3, keep=8, digest=True)
    assert [slot in first for slot in second] == [True, True, False]
    assert slots.take(codecs[:1], 1, keep=8, digest=True) == second[:1]
    assert slots.take(codecs[:1], 1, keep=8, digest=False)[0] not in second
    other = slots.take(codecs[2:], 3, keep=8, digest=False)
    assert len({id(slot) for slot in [*first, *second, *other]}) == 8


def test_ids() -> None:
    assert check_ids(np.array([0, 5, 9], np.int32), 10) is None
    assert "negative id -100 (first at token 1)" in str(check_ids(np.array([0, -100], np.int32), None))
    assert "id 10 (first at token 2) is outside the vocabulary of 10" in str(check_ids(np.array([1, 2, 10]), 10))


def test_a_digest_does_not_care_whether_rows_came_in_parts_or_as_columns() -> None:
    rows = np.arange(7 * 24, dtype=np.uint16).reshape(7, 24)
    parts = [rows[:, :8], rows[:, 8:20], rows[:, 20:]]
    expected = rows_digest(parts)
    assert columns_digest(rows, (8, 12, 4), np.empty(1000, np.uint16)) == expected
    for row, column in itertools.product((0, 6), (0, 8, 23)):
        other = rows.copy()
        other[row, column] ^= 1
        assert columns_digest(other, (8, 12, 4), np.empty(1000, np.uint16)) != expected


def test_padding_is_a_tail_of_at_least_two_zero_ids_with_zero_mask() -> None:
    def cut(ids: list[int], mask: list[int]) -> int:
        return length_without_padding({"input_ids": np.array(ids), "loss_mask": np.array(mask)}, len(ids))

    assert cut([5, 6, 0, 0], [0, 1, 0, 0]) == 2
    assert cut([5, 6, 7, 0], [0, 1, 1, 0]) == 4  # one alone may be a token
    assert cut([5, 0, 0, 0], [0, 0, 1, 0]) == 4
    assert cut([5, 0, 0, 0, 0], [0, 0, 1, 0, 0]) == 3
    assert cut([0, 0], [0, 0]) == 0
    assert length_without_padding({"input_ids": np.zeros(4)}, 4) == 4  # without a mask nothing says padding


def test_one_in_ten_may_differ_and_is_told_why() -> None:
    wide = (*SPECS[:2], FieldSpec("last_hidden_state", "float16", (64,), "float16"))
    samples = [sample(f"data_{i}.pt") for i in range(10)]
    agreed = agree([*samples[:9], replace(samples[9], specs=wide)])
    assert [s.name for s in agreed.samples] == [f"data_{i}.pt" for i in range(9)]
    assert [q.name for q in agreed.refused] == ["data_9.pt"]
    assert "last_hidden_state is float16 [64] where 90% of the samples have bfloat16 [64]" in agreed.refused[0].reason
    with pytest.raises(
        ConversionError, match=r"8 \(80 %\)(?s:.*)2 \(20 %\): (?s:.*)float16 \[64\]; for example data_8"
    ):
        agree([*samples[:8], *(replace(s, specs=wide) for s in samples[8:])])


def test_fields_have_the_usual_order_and_the_source_dtypes() -> None:
    extra = (*SPECS, FieldSpec("positions", "int16", (), "int16"))
    fields = fields_of([sample("a", specs=extra)], "lossless")
    assert [f.name for f in fields] == ["hidden_states", "last_hidden_state", "input_ids", "positions"]
    assert fields[2].source_dtype == "int64"


def test_segments_close_at_their_size_and_keep_what_was_refused_between() -> None:
    fields = fields_of([sample("a")], "lossless")
    row = sum(f.row_bytes for f in fields)
    samples = [sample(f"data_{i}.pt", 10) for i in (0, 2, 4, 10, 12)]
    refused = [Quarantined(name, "bad") for name in ("data_99.pt", "data_1.pt", "data_3.pt")]
    segments = group_samples(samples, refused, fields, 25 * row, 7)
    assert [s.number for s in segments] == [7, 8, 9]
    assert [[x.name for x in s.samples] for s in segments] == [
        ["data_0.pt", "data_2.pt"],
        ["data_4.pt", "data_10.pt"],
        ["data_12.pt"],
    ]
    assert [[q.name for q in s.refused] for s in segments] == [["data_1.pt"], ["data_3.pt"], ["data_99.pt"]]
    one = group_samples([sample("huge", 1000)], [], fields, 25 * row, 0)
    assert len(one) == 1


@pytest.mark.parametrize(
    ("total", "expected"),
    [(100 << 20, 256 << 20), (16 << 30, 1 << 30), (1 << 40, 8 << 30), (64 << 40, 16 << 30)],
    ids=["one", "shared", "usual", "huge"],
)
def test_a_source_is_cut_so_that_workers_can_share_it(total: int, expected: int) -> None:
    assert ConvertSettings.of().segment_bytes(total) == expected
    assert ConvertSettings.of(segment_size=1 << 20).segment_bytes(total) == 1 << 20


def test_a_plan_survives_its_json(tmp_path: Path) -> None:
    odd = sample("a/b \udcff\u00e9.pt#3", row=3, path="/src/a/b \udcff\u00e9.pt", left_out=(("x", "why"),), gzip=True)
    inside = sample(
        "arrow/hidden_states/hs_4.safetensors", row=4, path="/src/arrow/hidden_states/hs_4.safetensors",
        folder="/src/arrow", place=(0, 8, 4),
    )  # fmt: skip
    arrow = ArrowFile("arrow/b.arrow", "/src/arrow/b.arrow", Identity(5, 6, 7))
    inside = replace(inside, arrow=arrow)
    older = replace(inside, name="arrow/hidden_states/hs_5.safetensors", row=5, arrow=None)
    older = replace(older, path=f"/src/{older.name}")
    fields = fields_of([sample("a")], "none")
    plan = Plan(
        source="/src",
        root="/src",
        settings=ConvertSettings(layer_ids=(1, 2, 3)).identity(),
        fields=fields,
        provenance=Provenance(layer_ids=(1, 2, 3), notes=("a", "b")),
        typical_length=12,
        segments=(PlannedSegment(number=4, samples=(odd, inside, older), refused=(Quarantined("\udc80", "bad"),)),),
        files={
            "a/b \udcff\u00e9.pt": odd.identity,
            inside.name: inside.identity,
            older.name: older.identity,
            arrow.name: arrow.identity,
        },
        notes={"no checksum": 2},
    )
    assert Plan.from_json(plan.to_json(), "plan") == plan
    with pytest.raises(ConversionError, match=r"journal/plan\.json.*another destination"):
        Plan.from_json(plan.to_json()[:-20], "journal/plan.json")


def test_deleting_sources_lowers_the_peak() -> None:
    sizes = [SegmentSize(70 << 30, 100 << 30) for _ in range(9)]
    kept = [SegmentSize(size.stored) for size in sizes]
    assert peak_bytes(kept, 2) > 9 * (70 << 30)
    assert 140 << 30 < peak_bytes(sizes, 2) < 150 << 30
    assert peak_bytes([], 4) == 0
    assert peak_bytes(sizes, most_ahead(4)) > peak_bytes(sizes, 4)


def test_layer_ids_end_up_in_one_convention() -> None:
    fields = fields_of([sample("a")], "lossless")
    before = provenance_of(ConvertSettings.of(layer_ids=[2, 18, 33], layer_convention="before"), fields, ["x"])
    assert before.layer_ids == (1, 17, 32)
    assert before.layer_ids_as_written == (2, 18, 33)
    with_last = provenance_of(ConvertSettings.of(layer_ids=[2, 18, 33, 35]), fields, ["x"])
    assert with_last.layer_ids == (2, 18, 33)
    with pytest.raises(ValueError, match="names 2 layers"):
        provenance_of(ConvertSettings.of(layer_ids=[2, 18]), fields, ["x"])


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ({"codec": "zip"}, "lossless, none"),
        ({"norm_state": "yes"}, "pre, post"),
        ({"segment_size": 1000}, "1,048,576"),
        ({"workers": 0}, "at least 1"),
        ({"delete_source": "yes"}, "lossy"),
    ],
)
def test_bad_settings(option: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ConvertSettings.of(**option)


@pytest.mark.parametrize("codec", [{"codec": "fp8"}, {"trim_padding": True}])
def test_a_number_for_true_asks_for_no_lossy_deletion(codec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ask for it as delete_source='lossy'"):
        ConvertSettings.of(delete_source=1, **codec)


@pytest.mark.parametrize("option", [{"layer_ids": [2.5]}, {"layer_ids": "218"}, {"notes": "one text"}])
def test_settings_that_would_be_taken_for_others(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        ConvertSettings.of(**option)


def test_unknown_settings() -> None:
    with pytest.raises(TypeError, match=r"there is no keyword worker=: did you mean workers=\?"):
        ConvertSettings.of(worker=3)

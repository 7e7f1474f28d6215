"""What the loader relies on in a trainer: views, bounds, bad samples, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from hsloader.batches.fit import check_fit  # noqa: E402
from hsloader.batches.layout import BatchLayout  # noqa: E402
from hsloader.batches.noise import GaussianNoise, UniformNoise, noise_keys  # noqa: E402
from hsloader.batches.orders import order_named  # noqa: E402
from hsloader.batches.registry import TRAINER_NAMES, trainer_named, variants_of  # noqa: E402
from hsloader.batches.states import batch_dtype, restored, tensor_of  # noqa: E402
from hsloader.batches.trainer import SequenceParallel, Trainer  # noqa: E402
from hsloader.errors import DamageError, IncompatibleError  # noqa: E402
from hsloader.store.dtypes import DTYPES  # noqa: E402
from hsloader.store.fields import Field  # noqa: E402
from tests.batches.golden_sources import CASES, Source, _file_sample, execute  # noqa: E402
from tests.shared_data import needs_shared  # noqa: E402

FIELDS = {
    "hidden_states": Field(name="hidden_states", dtype="bfloat16", shape=(3, 48)),
    "last_hidden_state": Field(name="last_hidden_state", dtype="bfloat16", shape=(48,)),
    "input_ids": Field(name="input_ids", dtype="int32", source_dtype="int64"),
    "loss_mask": Field(name="loss_mask", dtype="uint8", source_dtype="int64"),
}


def made(lengths: list[int], mask: int = 1) -> Source:
    """Samples whose every value tells where it came from: sample * 100 + token."""
    samples: list[dict[str, Any] | None] = []
    for number, length in enumerate(lengths):
        ids = torch.arange(length, dtype=torch.int32) + 100 * number + 1
        states = ids.to(torch.bfloat16)[:, None]
        samples.append(
            {
                "hidden_states": states[:, :, None].expand(-1, 3, 48),
                "last_hidden_state": states.expand(-1, 48),
                "input_ids": ids,
                "loss_mask": torch.full((length,), mask, dtype=torch.uint8),
            }
        )
    return Source(dict(FIELDS), samples, np.array(lengths, dtype=np.int64))


def laid_out(trainer: Trainer, source: Source, samples: list[int], bad: set[int] | None = None) -> BatchLayout:
    indices = np.array(samples, dtype=np.int64)
    return trainer.lay_out(indices, source.lengths[indices], bad or set())


def batch_of(trainer: Trainer, source: Source, samples: list[int], bad: set[int] | None = None) -> Any:
    layout = laid_out(trainer, source, samples, bad)
    return trainer.finish(layout, execute(trainer, layout, source))


lengths_of = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(lengths_of, st.integers(1, 30), st.none() | st.integers(1, 9), st.data())
def test_packs_agree_with_plain_concatenation(
    lengths: list[int], size: int, max_length: int | None, data: st.DataObject
) -> None:
    """eagle3's pack, said in lists: drop lost samples, cut, shift, concatenate, cut or pad."""
    source = made(lengths)
    bad = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1))
    trainer = trainer_named("speculators-0.9", FIELDS, max_tokens=size, max_length=max_length)
    batch = batch_of(trainer, source, list(range(len(lengths))), bad)
    ids, states, positions, documents = [], [], [], []
    kept = [n for n in range(len(lengths)) if n not in bad]
    for document, number in enumerate(kept):
        tokens = (100 * number + 1 + np.arange(min(lengths[number], max_length or 99))).tolist()
        ids += tokens[1:]
        states += tokens[:-1]
        positions += list(range(1, len(tokens)))
        documents += [document] * (len(tokens) - 1)
    for key, values, pad in [("input_ids", ids, 0), ("position_ids", positions, 0), ("document_ids", documents, -1)]:
        assert batch[key].tolist() == [(values + [pad] * size)[:size]], key
    first = torch.tensor((states + [0] * size)[:size]).to(torch.bfloat16)
    assert torch.equal(batch["hidden_states"], first[None, :, None].expand(1, size, 144))
    assert batch["error_records"] == len(bad)


@settings(max_examples=100, deadline=None)
@given(st.lists(lengths_of, min_size=1, max_size=5), st.integers(1, 30), st.booleans(), st.data())
def test_batches_that_are_laid_out_together_are_those_of_each_alone(
    batches: list[list[int]], size: int, by_count: bool, data: st.DataObject
) -> None:
    lengths = [length for batch in batches for length in batch]
    source, sizes = made(lengths), [len(batch) for batch in batches]
    bad = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    name = data.draw(st.sampled_from(["speculators-0.4", "speculators-0.9", "raw"]))
    options = {"batch_size": 3} if by_count and name == "raw" else {"max_tokens": size}
    if by_count and name != "raw":
        name, options = "specforge-0.2", {"batch_size": max(sizes)}
    trainer = trainer_named(name, FIELDS, **options)
    samples = np.arange(len(lengths))
    together = trainer.lay_out_all(samples, source.lengths, sizes, bad)
    first = 0
    for layout, count in zip(together, sizes, strict=True):
        alone = laid_out(trainer, source, list(range(first, first + count)), bad)
        first += count
        assert layout.samples.tolist() == alone.samples.tolist()
        assert layout.pieces.tolist() == alone.pieces.tolist()
        assert (layout.bad, layout.rows, layout.shapes, layout.tokens) == (
            alone.bad, alone.rows, alone.shapes, alone.tokens,
        )  # fmt: skip
        assert {name: array.tolist() for name, array in layout.host.items()} == {
            name: array.tolist() for name, array in alone.host.items()
        }
        pieces = layout.pieces[layout.pieces["span"] == 0]
        assert layout.tokens == (pieces["stop"] - pieces["start"]).sum()
        assert {name: np.prod(shape, dtype=int) for name, shape in layout.shapes.items()} == {
            span.name: layout.rows[span.name] * np.prod(span.field.shape, dtype=int) for span in trainer.spans
        }


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.none() | st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_no_batch_is_larger_than_the_bound(lengths: list[int], max_length: int | None, size: int, degree: int) -> None:
    source = made(lengths)
    usp = SequenceParallel(rank=0, degree=degree, ulysses=degree, ttt_length=2)
    trainers = [
        trainer_named("speculators-0.9", FIELDS, max_tokens=7, max_length=max_length),
        trainer_named("specforge-0.2", FIELDS, batch_size=size, max_length=max_length),
        trainer_named("specforge-2026-06", FIELDS, batch_size=size, max_length=max_length, sequence_parallel=usp),
        trainer_named("raw", FIELDS, batch_size=size, max_length=max_length),
    ]
    for trainer in trainers:
        bound = trainer.largest_rows(source.lengths)
        for start in range(0, len(lengths), size):
            layout = laid_out(trainer, source, list(range(len(lengths)))[start : start + size])
            assert all(layout.rows[name] <= bound[name] for name in bound)


def test_large_tensors_are_views_of_their_spans() -> None:
    source = made([5, 9, 3])
    for trainer in [
        trainer_named("speculators-0.9", FIELDS, max_tokens=16),
        trainer_named("specforge-0.2", FIELDS, variant="dspark", batch_size=3),
        trainer_named("specforge-0.1", FIELDS, batch_size=3),
    ]:
        layout = laid_out(trainer, source, [0, 1, 2])
        spans = execute(trainer, layout, source)
        batch = trainer.finish(layout, spans)
        for state in trainer.states:
            assert batch[state.key].data_ptr() == spans[state.span].data_ptr()
            assert batch[state.key].is_contiguous()
    raw = trainer_named("raw", FIELDS, batch_size=3)
    layout = laid_out(raw, source, [0, 1, 2])
    spans = execute(raw, layout, source)
    last = raw.finish(layout, spans)[2]["hidden_states"]
    assert last.untyped_storage().data_ptr() == spans["hidden_states"].untyped_storage().data_ptr()


def test_small_arrays_that_were_moved_already_are_taken_as_they_are() -> None:
    source = made([5, 3])
    trainer = trainer_named("speculators-0.9", FIELDS, max_tokens=8)
    layout = laid_out(trainer, source, [0, 1])
    moved = {name: torch.from_numpy(array).clone() for name, array in layout.host.items()}
    batch = trainer.finish(layout, execute(trainer, layout, source), moved)
    assert batch["position_ids"] is moved["position_ids"]
    assert layout.filled(0).tolist() == [[0, 4], [4, 2]]


def test_raw_gives_samples_as_stored_and_a_shorter_list_without_bad_ones() -> None:
    source = made([5, 9, 3])
    batch = batch_of(trainer_named("raw", FIELDS, batch_size=3, max_length=4), source, [2, 0, 1], bad={0})
    assert [sample["input_ids"].tolist() for sample in batch] == [[201, 202, 203], [101, 102, 103, 104]]
    assert {name: str(value.dtype) for name, value in batch[0].items()} == {
        "hidden_states": "torch.bfloat16",
        "last_hidden_state": "torch.bfloat16",
        "input_ids": "torch.int32",
        "loss_mask": "torch.uint8",
    }
    assert batch_of(trainer_named("raw", FIELDS), source, [0], bad={0}) == []
    cast = batch_of(trainer_named("raw", FIELDS, hidden_states_dtype="float32"), source, [1])
    assert cast[0]["hidden_states"].dtype == torch.float32
    assert cast[0]["input_ids"].dtype == torch.int32
    budget = trainer_named("raw", FIELDS, max_tokens=6)
    assert budget.costs(source.lengths).tolist() == [5, 6, 3]
    assert len(batch_of(budget, source, [1])[0]["loss_mask"]) == 6


def test_a_padded_batch_keeps_its_shape_without_a_bad_sample() -> None:
    source = made([5, 9, 3])
    trainer = trainer_named("specforge-0.2", FIELDS, batch_size=3)
    batch = batch_of(trainer, source, [0, 1, 2], bad={1})
    assert batch["hidden_state"].shape == (3, 9, 144)
    for key, value in batch.items():
        assert not value[1].any(), key
    assert batch["attention_mask"].tolist()[2] == [1] * 3 + [0] * 6
    assert batch["loss_mask"].tolist()[2] == [1, 1] + [0] * 7


def test_a_batch_that_lost_its_supervised_tokens_is_refused_unless_the_trainer_knows_empty_ones() -> None:
    source = made([5, 9])
    for name, options, refused in [
        ("specforge-0.2", {"batch_size": 2}, True),
        ("speculators-0.4", {"max_tokens": 8}, True),
        ("raw", {"batch_size": 2}, False),
        ("speculators-0.6", {"max_tokens": 8}, False),
    ]:
        trainer = trainer_named(name, FIELDS, **options)
        layout = laid_out(trainer, source, [0, 1], bad={0, 1})
        mask = execute(trainer, layout, source)["loss_mask"].numpy()
        if refused:
            with pytest.raises(DamageError, match="samples 0, 1 are damaged, and without them their batch of 2"):
                trainer.check(layout, mask)
        else:
            trainer.check(layout, mask)
            batch = trainer.finish(layout, execute(trainer, layout, source))
            assert batch == [] if name == "raw" else batch["lengths"].tolist() == [0]
    unsupervised = made([4], mask=0)  # as written, nothing lost: the trainer's own affair
    trainer = trainer_named("specforge-0.2", FIELDS, batch_size=1)
    layout = laid_out(trainer, unsupervised, [0])
    trainer.check(layout, execute(trainer, layout, unsupervised)["loss_mask"].numpy())


@needs_shared
@pytest.mark.parametrize("variant", ["dflash", "dspark"])
def test_samples_that_specforge_refuses_are_refused(variant: str) -> None:
    folder = CASES / f"specforge-0.2.0-{variant}/source_bad"
    paths = sorted(folder.glob("data_[0-4]*.ckpt"))
    assert len(paths) == 5
    for path in paths:
        sample = _file_sample(path)
        source = Source(dict(FIELDS), [sample], np.array([len(sample["input_ids"])]))
        fields = {**FIELDS, "hidden_states": Field(name="hidden_states", dtype="bfloat16", shape=(5, 48))}
        trainer = trainer_named("specforge-0.2", fields, variant=variant, batch_size=1, max_length=32)
        layout = laid_out(trainer, source, [0])
        with pytest.raises(IncompatibleError, match=rf"sample 0: .*{variant}.* needs two supervised tokens in a row"):
            trainer.check(layout, execute(trainer, layout, source)["loss_mask"].numpy())


def test_fp8_states_are_restored_into_a_given_tensor_or_as_they_come() -> None:
    values = torch.tensor([[1.5, -2.0], [0.25, 448.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.1, 3.0])
    expected = values.to(torch.bfloat16) * scale.to(torch.bfloat16)[:, None]
    assert torch.equal(restored(values, torch.bfloat16, scale), expected)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(2, 2, dtype=dtype)
        assert restored(values, dtype, scale, out) is out
        assert torch.equal(out, expected.to(dtype))
    done = restored(values, torch.bfloat16, scale)
    assert restored(done, torch.bfloat16, scale) is done
    halves = torch.tensor([1.0, 2.0], dtype=torch.float16)
    assert restored(halves, torch.float32).dtype == torch.float32


def test_stored_bits_become_tensors_without_a_copy() -> None:
    for name, dtype in DTYPES.items():
        if name in ("uint16", "uint32", "uint64"):
            continue  # torch has them, but no arithmetic to compare with
        bits = np.ones((2, 3), dtype=dtype.bits)
        tensor = tensor_of(bits, Field(name="x", dtype=name, shape=(3,)))
        assert str(tensor.dtype) == f"torch.{name}"
        assert tensor.data_ptr() == bits.ctypes.data


def test_ids_and_masks_get_the_producers_dtype_back() -> None:
    def dtype(stored: str, source: str | None, widen: bool = False) -> str:
        return batch_dtype(Field(name="x", dtype=stored, source_dtype=source), integers_as_int64=widen)

    assert dtype("uint8", None) == dtype("uint8", "int64") == dtype("int64", None) == "int64"
    assert dtype("uint8", "bool") == dtype("uint8", "bool", True) == dtype("bool", None) == "bool"
    assert (dtype("int32", "int32"), dtype("int32", "int32", True)) == ("int32", "int64")
    assert dtype("uint8", "float32") == "float32"


@dataclass
class Origin:
    norm_state: str = "unknown"
    layer_ids: tuple[int, ...] | None = None


def test_norm_states_and_layers_that_do_not_fit_are_refused_with_the_remedy() -> None:
    speculators = trainer_named("speculators-0.9", FIELDS, max_tokens=8)
    specforge = trainer_named("specforge-0.2", FIELDS, batch_size=1)
    dflash = trainer_named("specforge-0.2", FIELDS, variant="dflash", batch_size=1)
    assert check_fit(speculators, Origin("pre"), path="d") == check_fit(specforge, Origin("post"), path="d") == ()
    assert check_fit(dflash, Origin("pre"), path="d") == ()  # reads no last state
    with pytest.raises(IncompatibleError, match=r"d holds .*after the final norm.*'post'.*'pre'.*normed twice"):
        check_fit(speculators, Origin("post"), path="d")
    with pytest.raises(IncompatibleError, match=r"'pre'.*'post'.*not be normed at all"):
        check_fit(specforge, Origin("pre"), path="d")
    assert check_fit(specforge, Origin("pre"), path="d", norm_state="post") == ()
    with pytest.raises(ValueError, match="expected 'pre' or 'post'"):
        check_fit(specforge, Origin("pre"), path="d", norm_state="normed")
    (note,) = check_fit(speculators, Origin(), path="d")
    assert "does not say" in note
    with pytest.raises(IncompatibleError, match=r"layers \[2, 16, 29\].*wants \[1, 15, 28\]"):
        check_fit(speculators, Origin("pre", (2, 16, 29)), path="d", layer_ids=[1, 15, 28])
    assert check_fit(speculators, Origin("pre", (1, 15)), path="d", layer_ids=(1, 15)) == ()
    assert "cannot be checked" in check_fit(speculators, Origin("pre"), path="d", layer_ids=(1, 15))[0]


def test_noise_goes_where_the_trainer_puts_it_or_where_it_is_told() -> None:
    def keys(name: str, noise: Any, **options: Any) -> tuple[str, ...]:
        return noise_keys(noise, trainer_named(name, FIELDS, **options))

    assert keys("speculators-0.4", UniformNoise(0.05), max_tokens=8) == (
        "hidden_states",
        "verifier_last_hidden_states",
    )
    assert keys("speculators-0.9", UniformNoise(0.05), max_tokens=8) == ("hidden_states",)
    assert keys("specforge-0.2", UniformNoise(0.05), batch_size=1) == ("hidden_state",)
    assert keys("speculators-0.9", GaussianNoise(0.05, keys=["hidden_states"]), max_tokens=8) == ("hidden_states",)
    with pytest.raises(ValueError, match=r"speculators-0.9 \(mtp\) has no states that are noised .* of hidden_states"):
        keys("speculators-0.9", UniformNoise(0.05), variant="mtp", max_tokens=8)
    with pytest.raises(ValueError, match="'input_ids' is no tensor of states"):
        keys("specforge-0.2", UniformNoise(0.05, keys=("input_ids",)), batch_size=1)
    with pytest.raises(ValueError, match="expected a positive number"):
        UniformNoise(0.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("speculators-1.0", {}, "'speculators-1.0': expected one of raw, speculators-0.3"),
        ("speculators-0.4", {"variant": "dflash", "max_tokens": 8}, "no variant 'dflash'; it has eagle3"),
        ("speculators-0.9", {"batch_size": 4}, "give max_tokens="),
        ("specforge-0.2", {"max_tokens": 8}, "give batch_size="),
        ("raw", {"max_tokens": 8, "batch_size": 2}, "not both"),
        ("raw", {"variant": "eagle3"}, "no variants"),
        ("raw", {"max_length": 0}, "max_length=0"),
        ("speculators-0.9", {"max_tokens": 8, "drop_last": True}, "packs have no number of them"),
        ("raw", {"hidden_states_dtype": "int8"}, "expected a float type"),
        ("raw", {"sequence_parallel": SequenceParallel(rank=0, degree=2, ulysses=2)}, "no sequence-parallel"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_named(name, FIELDS, **options)


def test_a_missing_field_is_refused_with_what_there_is() -> None:
    only = {name: FIELDS[name] for name in ("hidden_states", "input_ids", "loss_mask")}
    with pytest.raises(IncompatibleError, match="needs the field 'last_hidden_state', this dataset has hidden_states"):
        trainer_named("speculators-0.9", only, max_tokens=8)
    assert trainer_named("specforge-0.2", only, variant="dflash", batch_size=1).needs == (
        "input_ids",
        "loss_mask",
        "hidden_states",
    )
    with pytest.raises(ValueError, match="expected 0 to degree - 1"):
        SequenceParallel(rank=2, degree=2, ulysses=1)
    with pytest.raises(ValueError, match="does not divide"):
        SequenceParallel(rank=0, degree=4, ulysses=3)


def test_every_trainer_says_what_a_state_must_know() -> None:
    for name in TRAINER_NAMES:
        for variant in variants_of(name) or (None,):
            size = {"max_tokens": 8} if name.startswith("speculators") else {"batch_size": 2}
            trainer = trainer_named(name, FIELDS, variant=variant, **size)
            contract = trainer.contract("train")
            assert (contract["trainer"], contract["variant"]) == (name, variant)
            assert trainer.packed == ("max_tokens" in size)
            assert contract["drop_last"] == trainer.drops_last("train")


def test_orders_by_name() -> None:
    lengths = np.arange(3, 13, dtype=np.int64)
    samples = np.arange(10, dtype=np.int64) * 2
    packed = trainer_named("speculators-0.9", FIELDS, max_tokens=20)
    padded = trainer_named("specforge-0.2", FIELDS, batch_size=4)

    def order(name: str, trainer: Trainer, **options: Any) -> Any:
        return order_named(name, trainer, samples, lengths, seed=0, **{"world": 2, **options})

    for trainer in (packed, padded):
        assert order("hsloader", trainer, split="val").elastic
        assert sorted(order("hsloader", trainer, split="val").planner(0).samples.tolist()) == samples.tolist()
    assert [len(batch) for batch in order("hsloader", padded).planner(0)] == [4, 4]  # trains without the short one
    assert order("trainer", packed).contract == {"order": "multipack-0.9", "shuffle": True, "world_size": 2}
    assert order("hsloader", packed).contract == {"order": "hsloader", "shuffle": True}
    assert [len(batch) for batch in order("trainer", padded, shuffle=False).planner(0)] == [4, 4]
    assert order("trainer", padded, shuffle=False).planner(0)[1].tolist() == [2, 6, 10, 14]
    for name, trainer, options, message in [
        ("random", packed, {}, "expected one of hsloader, trainer, multipack-0.4"),
        ("trainer", trainer_named("raw", FIELDS), {}, "trainer raw has no order of its own"),
        ("distributed-sampler", packed, {}, "counts samples"),
        ("multipack-0.9", padded, {}, "packs by tokens"),
        ("multipack-0.9", packed, {"shuffle": False}, "always shuffles"),
    ]:
        with pytest.raises(ValueError, match=message):
            order(name, trainer, **options)


def test_noise_on_states_that_cannot_be_added_to_is_refused() -> None:
    fields = {**FIELDS, "hidden_states": Field(name="hidden_states", dtype="float8_e4m3fn", shape=(3, 48))}
    noise = UniformNoise(0.05)
    with pytest.raises(ValueError, match=r"'hidden_state' of specforge-0.2 .*float8_e4m3fn.*hidden_states_dtype="):
        noise_keys(noise, trainer_named("specforge-0.2", fields, batch_size=2))
    trainer = trainer_named("specforge-0.2", fields, batch_size=2, hidden_states_dtype="bfloat16")
    assert noise_keys(noise, trainer) == ("hidden_state",)

"""Batches on the CPU: right, the script's for as long as it keeps them, and made without waste."""

from __future__ import annotations

import gc
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import hsloader
from hsloader import DataLoader, ReadOptions
from hsloader.batches.noise import GaussianNoise
from hsloader.errors import IncompatibleError
from hsloader.monitor import stats
from hsloader.store.dataset import Dataset
from hsloader.store.writer import Writer
from tests.loader.making import PACKED, PADDED, RAW, assert_same, clone, ids_of, reference, write

FAMILIES = [
    pytest.param(PACKED, id="packed"),
    pytest.param({**PACKED, "trainer": "speculators-0.4"}, id="packed-float32"),
    pytest.param({**PACKED, "variant": "mtp", "max_length": 30}, id="packed-mtp"),
    pytest.param(PADDED, id="padded"),
    pytest.param({**PADDED, "hidden_states_dtype": "float32"}, id="padded-float32"),
    pytest.param(RAW, id="raw"),
    pytest.param({**RAW, "max_length": 10}, id="raw-cut"),
]


def plan_of(loader: DataLoader) -> list[list[int]]:
    return loader.batch_sampler._generate_batches(loader.state_dict()["epoch"])


@pytest.mark.parametrize("settings", FAMILIES)
@pytest.mark.parametrize("in_process", [False, True], ids=["feeder", "threads"])
def test_every_batch_is_right(dataset: Dataset, settings: dict[str, Any], in_process: bool) -> None:
    with DataLoader(dataset, read=ReadOptions(in_process=in_process), **settings) as loader:
        for _ in range(2):
            plan = plan_of(loader)
            assert len(loader) == len(plan)
            for batch, samples in zip(loader, plan, strict=True):
                assert_same(batch, reference(dataset, samples, settings))


@pytest.mark.parametrize("settings", FAMILIES)
def test_batches_are_kept_for_ever(dataset: Dataset, settings: dict[str, Any]) -> None:
    with DataLoader(dataset, **settings) as loader:
        plan = plan_of(loader)
        kept = list(loader)
        first = clone(kept[0])
        for _ in range(2):
            list(loader)  # the ring goes round
        expected = [reference(dataset, samples, settings) for samples in plan]
        assert_same(kept, expected)
    gc.collect()
    assert_same(kept[0], first)  # also after the loader is gone


def test_views_of_the_ring_are_lent_and_come_back(dataset: Dataset) -> None:
    with DataLoader(dataset, **PACKED) as loader:
        batches = iter(loader)
        client = loader._connection.client  # type: ignore[union-attr]
        first = next(batches)
        assert client.held == 1
        states = first["hidden_states"][0, :3]
        del first
        assert client.held == 1  # a view of a view
        del states
        assert client.held == 0
        kept = [next(batches) for _ in range(5)]
        assert client.held == client.slots - 2  # the others are copies
        storages = {batch["hidden_states"].untyped_storage().data_ptr() for batch in kept}
        assert len(storages) == 5


def test_copies_use_their_memory_again(dataset: Dataset) -> None:
    """A batch in another dtype is a copy, in memory that the last one left."""
    settings = {**PACKED, "trainer": "speculators-0.4", "max_tokens": 2000}
    with DataLoader(dataset, **settings) as loader:
        places = set()
        for _ in range(6):
            for batch in loader:
                places.add(batch["hidden_states"].data_ptr())
                del batch
        assert len(places) <= 2


def test_writing_into_a_batch_harms_no_other(dataset: Dataset) -> None:
    with DataLoader(dataset, **PACKED) as loader:
        plan = plan_of(loader)
        for batch in loader:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(1)
        loader.set_epoch(0)
        for batch, samples in zip(loader, plan, strict=True):
            assert_same(batch, reference(dataset, samples, PACKED))


def test_collate_makes_a_scripts_own_batches(dataset: Dataset) -> None:
    def lengths(samples: list[dict[str, Any]]) -> list[int]:
        return [len(sample["input_ids"]) for sample in samples]

    with DataLoader(dataset, collate=lengths, shuffle=False, **RAW) as loader:
        assert [length for batch in loader for length in batch] == dataset.lengths.tolist()
    with pytest.raises(ValueError, match="collate= makes batches of single samples"):
        DataLoader(dataset, collate=lengths, **PACKED)


@pytest.mark.parametrize("settings", FAMILIES)
def test_every_tensor_is_pinned_if_asked(
    dataset: Dataset, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a make-believe pinned allocator: there is none without a GPU."""
    blocks: list[torch.Tensor] = []
    empty = torch.empty

    def is_pinned(tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr() for block in blocks)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if is_pinned(tensor):
            return tensor
        blocks.append(tensor.clone())
        return blocks[-1]

    def allocate(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        block = empty(*shape, **options)
        if pin_memory:
            blocks.append(block)
        return block

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for pinned in (True, False):
        with DataLoader(dataset, pin_memory=pinned, **settings) as loader:
            plan = plan_of(loader)
            for batch, samples in zip(loader, plan, strict=True):
                assert_same(batch, reference(dataset, samples, settings))
                parts = batch if isinstance(batch, list) else [batch]
                tensors = [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
                assert {is_pinned(tensor) for tensor in tensors} == {pinned}


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without pinned memory")
def test_pinned_batches_without_an_accelerator_are_torchs_error(dataset: Dataset) -> None:
    with (
        DataLoader(dataset, pin_memory=True, **PACKED) as loader,
        pytest.raises(RuntimeError, match="accelerator"),
    ):
        next(iter(loader))


def test_a_scripts_own_batch_sampler(dataset: Dataset) -> None:
    drawn = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(10)), 4, drop_last=False)
    with DataLoader(dataset, trainer="raw", batch_sampler=drawn, log_every=0) as loader:
        assert len(loader) == 3
        assert [len(batch) for batch in loader] == [4, 4, 2]
        assert [ids_of(batch) for batch in loader] == [
            ids_of(reference(dataset, samples, RAW)) for samples in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
        ]


def test_a_batch_sampler_whose_batches_grow(dataset: Dataset) -> None:
    class Growing:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            yield list(range(4 * (self.epoch + 1)))

        def __len__(self) -> int:
            return 1

    with DataLoader(dataset, trainer="raw", batch_sampler=Growing(), log_every=0) as loader:
        kept, totals = [], []
        for _ in range(3):
            kept += list(loader)
            totals.append(loader.stats()["samples"])
        assert [len(batch) for batch in kept] == [4, 8, 12]
        assert totals == [4, 8, 12]  # a larger ring counts anew, as monitor.stats says
        assert "counts from there" in (stats.__doc__ or "")
        for batch in kept:
            assert_same(batch, reference(dataset, list(range(len(batch))), RAW))


def test_a_batch_sampler_whose_batch_is_too_large_and_then_is_not(dataset: Dataset) -> None:
    class Varying:
        size = 1

        def __iter__(self) -> Any:
            yield list(range(24)) * self.size

    sampler, read = Varying(), ReadOptions(prefetch=4 << 20)
    with DataLoader(dataset, trainer="raw", batch_sampler=sampler, read=read, log_every=0) as loader:
        for epoch, size in enumerate((1, 40, 1)):
            sampler.size = size
            loader.set_epoch(epoch)
            if size > 1:
                with pytest.raises(ValueError, match="prefetch of"):
                    iter(loader)
            else:
                assert [len(batch) for batch in loader] == [24]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [([[0, 99]], "0 to 23"), ([[]], "list of sample indices"), ([["a"]], "list of sample indices")],
)
def test_a_batch_sampler_that_gives_nonsense(dataset: Dataset, wrong: Any, message: str) -> None:
    with (
        DataLoader(dataset, trainer="raw", batch_sampler=wrong, log_every=0) as loader,
        pytest.raises(ValueError, match=message),
    ):
        list(loader)


@pytest.mark.parametrize("noise", [hsloader.UniformNoise(0.05), GaussianNoise(0.05)])
def test_noise_is_reproducible_and_leaves_the_padding_alone(dataset: Dataset, noise: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with DataLoader(dataset, noise=noise, **PACKED) as loader, DataLoader(dataset, **PACKED) as clean:
        noisy = [clone(batch) for batch in loader]
        plain = [clone(batch) for batch in clean]
    with DataLoader(dataset, noise=noise, rank=1, world_size=2, **PACKED) as loader:
        again = [clone(batch) for batch in loader]
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(again, noisy[1::2][: len(again)])
    for ours, theirs in zip(noisy, plain, strict=True):
        difference = (ours["hidden_states"].float() - theirs["hidden_states"].float()).abs()
        padding = theirs["document_ids"][0] < 0
        assert difference[0, padding].max().item() == 0.0 if padding.any() else True
        assert 0 < difference.mean().item() < 0.05
        assert_same(ours["verifier_last_hidden_states"], theirs["verifier_last_hidden_states"])


def test_noise_for_a_trainer_that_names_no_states(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"say which of .*hidden_states.*keys="):
        DataLoader(dataset, noise=hsloader.UniformNoise(0.05), **RAW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trainer": "speculators"}, "expected one of raw, speculators-0.3"),
        ({"max_tokens": None}, "give max_tokens="),
        ({"split": "test"}, "split='test': expected one of 'train', 'val', 'all'"),
        ({"order": "random"}, "order='random'"),
        ({"on_bad": "ignore"}, "on_bad='ignore'"),
        ({"long": "cut"}, "long='cut'"),
        ({"epoch": -1}, "epochs count from 0"),
        ({"stall_after": 0}, "stall_after=0"),
        ({"device": "meta"}, "device='meta'"),
        ({"samples": [0], "split": "val"}, "samples= names the samples"),
        ({"samples": [0, 0]}, "listed twice"),
        ({"split": "val"}, "give val_ratio= above 0"),
        ({"val_ratio": -0.5, "split_by": "trainer"}, "val_ratio=-0.5: expected a number from 0"),
        ({"val_ratio": 1.0}, "val_ratio=1.0"),
        ({"val_ratio": float("nan"), "split": "all"}, "val_ratio=nan"),
        ({"rank": 1}, "give both, or neither"),
        ({"rank": 2, "world_size": 2}, "no such rank"),
        ({"batch_sampler": [[0]], "val_ratio": 0.1}, "give no val_ratio= with it"),
        ({"batch_sampler": [[0, 1, 2]], "trainer": "raw"}, "give no max_tokens= with it"),
        ({"batch_sampler": iter([[0]])}, "is an iterator, which gives its batches once"),
        ({"min_loss_tokens": 1000}, "no sample is left"),
        ({"max_length": 1}, r"no token of \d+ samples would reach a batch.*raise max_length"),
        ({"val_ratio": 0.9999999}, "0 samples to train, .*lower val_ratio"),
        ({"split": "val", "val_ratio": 0.0001}, "0 to validate; .*raise val_ratio"),
        ({"read": ReadOptions(prefetch=1 << 20, in_process=True), "max_tokens": 5000}, r"prefetch=\d+\) or more"),
        ({"world_size": 1000, "rank": 0}, "fewer than the 1000 ranks"),
    ],
)
def test_settings_that_make_no_sense_are_refused(path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(path, **{**PACKED, **wrong})


def test_a_dataset_that_does_not_fit_is_refused(path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"norm_state='pre'.*needs norm_state='post'"):
        DataLoader(path, trainer="specforge-0.2", batch_size=2)
    with pytest.raises(IncompatibleError, match=r"after layers \[1, 3, 5\].*wants \[2, 4\]"):
        DataLoader(path, layer_ids=[2, 4], **PACKED)


def test_help_shows_every_setting() -> None:
    from inspect import signature

    from hsloader.loading.settings import LoaderOptions, LoaderSettings

    shown = signature(DataLoader).parameters
    assert next(iter(shown)) == "dataset"
    assert set(shown) - {"dataset"} == set(LoaderOptions.__annotations__) == set(LoaderSettings.__dataclass_fields__)
    for name in LoaderOptions.__annotations__:
        assert f"``{name}" in (LoaderSettings.__doc__ or ""), name


def test_what_filters_and_split_did_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hsloader")
    settings = {**PACKED, "val_ratio": 0.25, "max_length": 50, "long": "drop", "min_loss_tokens": 20}
    with DataLoader(path, **settings) as loader:
        usable = len(loader._epochs.usable)
    text = caplog.text
    assert "to train" in text
    assert "to validate" in text
    assert f"-> {usable}:" in text
    assert "longer than 50 tokens left out" in text
    assert "fewer than 20 supervised tokens left out" in text


def test_stats_count_what_was_handed_out(dataset: Dataset) -> None:
    with DataLoader(dataset, **PACKED) as loader:
        list(loader)
        stats = loader.stats()
    assert stats["samples"] == len(dataset)
    assert stats["tokens"] == (dataset.lengths - 1).sum()
    assert stats["batches"] == stats["epoch_batches"] == stats["position"]
    assert stats["rows"] == stats["batches"] * PACKED["max_tokens"]
    assert all(isinstance(value, float) for value in stats.values())


def test_a_trainers_contiguous_split_is_where_the_trainer_cuts(tmp_path: Path) -> None:
    """100 * 0.58 is just under 58 and cut to 57, but 1 - 0.42 is just over 0.58."""
    with Writer(tmp_path / "data.hs") as writer:
        for _ in range(100):
            writer.append(input_ids=torch.arange(3), loss_mask=torch.ones(3, dtype=torch.int64))
    with DataLoader(tmp_path / "data.hs", val_ratio=0.42, split_by="contiguous", **RAW) as loader:
        assert loader._epochs.usable.tolist() == list(range(int(100 * 0.58)))


def test_a_script_that_keeps_most_of_the_ring_finds_the_rest_asked_for(tmp_path: Path) -> None:
    """A ring of 32 batches, 29 of them kept: what is left is asked for at once, not once an eighth of 32 is free."""
    path = write(tmp_path / "data.hs", 260, longest=60)
    settings = {**PACKED, "max_tokens": 60, "split": "all"}
    with DataLoader(path, **settings) as loader:
        slot = loader._connection.client.slot_bytes  # type: ignore[union-attr]
    kept: deque[Any] = deque(maxlen=29)
    asked = []
    with DataLoader(path, read=ReadOptions(prefetch=32 * slot), **settings) as loader:
        client = loader._connection.client  # type: ignore[union-attr]
        assert client.slots == 32
        for batch in loader:
            kept.append(batch)
            asked.append(len(client._keys))
            time.sleep(0.003)  # a step, in which the reader should have something to do
        assert client.held >= 28
    assert asked[40:-5].count(0) == 0

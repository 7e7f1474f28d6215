"""Samples whose bytes are damaged: named and raised, or left out by the trainer family's rule."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hsloader import DamageError, DataLoader, ReadOptions
from hsloader.monitor.counters import TrainerCounter
from hsloader.reader.access import Access
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.writer import Writer
from tests.loader.making import PACKED, PADDED, RAW, assert_same, reference, write


def damage(path: Path, sample: int, field: str = "hidden_states") -> None:
    """Flip a byte in the frame of the sample's first chunk."""
    with open_dataset(path) as dataset:
        array = dataset.segments[dataset.segment_of[sample]].array(field)
        chunk = int(dataset.first_rows[sample]) // array.chunk_rows
        shard, slot = divmod(chunk, array.shard_chunks)
        handle = dataset._shards.get(array, shard)
        offset, size = (int(n) for n in handle.index[slot])
        file = handle.path
    data = bytearray(file.read_bytes())
    data[offset + size // 2] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)


@pytest.fixture
def damaged(path: Path, tmp_path: Path) -> Path:
    """The usual dataset with samples 3 and 4 damaged."""
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    damage(copy, 3)
    damage(copy, 4)
    return copy


@pytest.mark.parametrize("settings", [PACKED, PADDED, RAW], ids=["packed", "padded", "raw"])
def test_damage_is_raised_and_named_each_time(damaged: Path, settings: dict[str, Any]) -> None:
    with DataLoader(damaged, shuffle=False, **settings) as loader:
        batches, got = iter(loader), []
        with pytest.raises(DamageError) as first:
            got.extend(batches)
        with pytest.raises(DamageError) as again:  # the position has not moved
            next(batches)
        assert loader.state_dict()["position"] == len(got)
    text = str(first.value)
    assert text == str(again.value)
    for part in (str(damaged), "hidden_states", "chunk", "sample ", "hsloader verify", "on_bad='skip'"):
        assert part in text


@pytest.mark.parametrize("settings", [PACKED, PADDED, RAW], ids=["packed", "padded", "raw"])
def test_skip_leaves_the_batch_and_drops_the_sample(
    path: Path, damaged: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with DataLoader(damaged, on_bad="skip", **settings) as loader, open_dataset(path) as sound:
        for epoch in range(2):
            plan = loader.batch_sampler._generate_batches(epoch)
            for batch, samples in zip(loader, plan, strict=True):
                assert_same(batch, reference(sound, samples, settings, bad=[3, 4]))
                if "error_records" in batch:
                    assert batch["error_records"] == len({3, 4} & set(samples))
        assert loader.stats()["skipped_samples"] == 2
    assert caplog.text.count("left out, as on_bad='skip' says") == 2


def test_what_is_left_out_is_a_line_like_the_others(
    damaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with DataLoader(damaged, on_bad="skip", **RAW) as loader:
        list(loader)
    said = [line for line in capsys.readouterr().err.splitlines() if "left out, as on_bad" in line]
    assert len(said) == 2
    assert all(line.startswith("hsloader: sample ") for line in said)
    assert [line.rpartition(": ")[2] for line in said] == ["1 so far", "2 so far"]


def test_skip_asks_for_nothing_twice_but_the_batches_that_lost_samples(damaged: Path) -> None:
    with DataLoader(damaged, on_bad="skip", trainer="raw", batch_size=1, shuffle=False) as loader:
        batches = sum(1 for _ in loader)
        stats = loader.stats()
    assert stats["batches_cancelled"] == 0
    assert stats["batches_requested"] <= batches + 2 + stats["ring_slots"]  # those of the next epoch are asked ahead


def test_what_was_said_to_be_left_out_is_not_said_again(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next epoch's batches are asked for before the first loses its samples."""
    settings = {**RAW, "samples": [3, 4, 5, 6], "batch_size": 4}
    with DataLoader(damaged, on_bad="skip", **settings) as loader:
        for _ in range(4):
            assert [len(batch) for batch in loader] == [2]
        assert loader.stats()["skipped_samples"] == 2
    assert caplog.text.count("left out, as on_bad='skip' says") == 1
    assert "(and 1 more sample of this batch)" in caplog.text


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_bytes_that_the_system_refuses_are_no_damage(
    dataset: Dataset, on_bad: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount that hangs up empties no batches; the sample comes once it is back."""
    gone = [True]
    read, resident = Access.read, Access.resident

    def refused(self: Access, *arguments: Any) -> Any:
        if gone[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, *arguments)

    monkeypatch.setattr(Access, "read", refused)
    monkeypatch.setattr(Access, "resident", lambda self, *arguments: None if gone[0] else resident(self, *arguments))
    with DataLoader(dataset, on_bad=on_bad, read=ReadOptions(in_process=True), **PACKED) as loader:
        plan = loader.batch_sampler._generate_batches(0)
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(DamageError, match=r"Stale file handle.*the system refuses.*samples="):
                next(batches)
        gone[0] = False
        got = []
        while len(got) < len(plan):
            try:
                got.append(next(batches))
            except DamageError:
                continue  # it was asked for while the mount was gone
        for batch, samples in zip(got, plan, strict=True):
            assert_same(batch, reference(dataset, samples, PACKED))
        assert loader.stats()["skipped_samples"] == 0
    assert "left out" not in caplog.text


def vanish(copy: Path) -> None:
    """Delete every shard of the states."""
    shards = [file for file in copy.rglob("*") if file.is_file() and "hidden_states" in file.parent.parts]
    shards = [file for file in shards if file.name != "zarr.json"]
    assert shards
    for file in shards:
        file.unlink()


ONE_BY_ONE: dict[str, Any] = {**RAW, "batch_size": 1, "split": "all", "shuffle": False, "on_bad": "skip"}


def test_skip_is_for_single_chunks_and_ends_where_a_dataset_vanishes(path: Path, tmp_path: Path) -> None:
    """16 losses are covered; the 17th raises, each time, until the dataset is there again."""
    copy, away = tmp_path / "data.hs", tmp_path / "away.hs"
    shutil.copytree(path, copy)
    with DataLoader(copy, **ONE_BY_ONE) as loader:  # reads nothing yet
        shutil.copytree(copy, away)
        vanish(copy)
        batches = iter(loader)
        assert [next(batches) for _ in range(16)] == [[]] * 16
        for _ in range(2):
            with pytest.raises(DamageError) as told:
                next(batches)
            for part in (
                "sample 16 ",
                "17 losses in this epoch, beside 0 samples handed out, and on_bad='skip' covers 16 (16, or 1 % ",
                f"hsloader verify {copy}",
                "resume from the last state",
                "samples=",
            ):
                assert part in str(told.value)
        assert loader.state_dict()["position"] == 16
        assert loader.stats()["skipped_samples"] == 16
        shutil.copytree(away, copy, dirs_exist_ok=True)
        with open_dataset(away) as sound:
            assert_same(next(batches), reference(sound, [16], ONE_BY_ONE))


def test_skip_covers_one_percent_of_what_an_epoch_handed_out(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    with DataLoader(copy, **ONE_BY_ONE) as loader:
        vanish(copy)
        counters = loader._connection.client.counters  # type: ignore[union-attr]
        counters[TrainerCounter.SAMPLES] += 1_000_000  # before this epoch: they do not count
        batches = iter(loader)
        counters[TrainerCounter.SAMPLES] += 1_850
        assert [next(batches) for _ in range(18)] == [[]] * 18
        with pytest.raises(DamageError, match=r"19 losses .* beside 1,850 samples handed out, .* covers 18 \("):
            next(batches)


def test_samples_that_share_a_damaged_chunk_are_one_loss(path: Path, tmp_path: Path) -> None:
    """A chunk of a token field holds 16,384 rows: here all 24 samples."""
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    damage(copy, 0, "loss_mask")
    with DataLoader(copy, **ONE_BY_ONE) as loader:
        assert list(loader) == [[]] * 24


def test_a_packed_batch_that_loses_all_is_padding(damaged: Path) -> None:
    with DataLoader(damaged, samples=[3], on_bad="skip", **PACKED) as loader:
        (batch,) = loader
    assert batch["error_records"] == 1
    assert not batch["loss_mask"].any()
    assert (batch["document_ids"] == -1).all()


def test_a_padded_batch_that_loses_all_is_refused(damaged: Path) -> None:
    with (
        DataLoader(damaged, samples=[3, 4], on_bad="skip", **{**PADDED, "batch_size": 2}) as loader,
        pytest.raises(DamageError, match="no supervised token"),
    ):
        next(iter(loader))


def test_bad_token_fields_count_too(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    damage(copy, 0, "loss_mask")
    with DataLoader(copy, **RAW) as loader, pytest.raises(DamageError, match="loss_mask"):
        list(loader)


def test_masks_that_filters_must_read_are_checked(tmp_path: Path) -> None:
    """Where the samples table leaves open whether enough supervised tokens survive the cut."""
    copy = tmp_path / "data.hs"
    with Writer(copy) as writer:
        writer.append(input_ids=torch.arange(20), loss_mask=torch.tensor([1] + [0] * 10 + [1] * 9))
    settings = {**RAW, "min_loss_tokens": 1, "max_length": 10}
    with DataLoader(copy, **settings) as loader:
        assert len(loader) == 1
    with pytest.raises(ValueError, match="no sample is left"):
        DataLoader(copy, **{**settings, "min_loss_tokens": 2})
    damage(copy, 0, "loss_mask")
    with pytest.raises(DamageError, match="loss_mask"):
        DataLoader(copy, **{**settings, "min_loss_tokens": 2})


def test_a_dataset_that_is_replaced_while_it_is_read(path: Path, tmp_path: Path) -> None:
    """Another dataset at the same path: refused, not mixed."""
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    with DataLoader(copy, split="all", **RAW) as loader:  # reads nothing yet
        shutil.rmtree(copy)
        write(copy, 24, first=5)
        with pytest.raises(Exception, match=r"replaced by another|fingerprint"):
            list(loader)


def test_a_dataset_that_vanishes(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data.hs"
    shutil.copytree(path, copy)
    with DataLoader(copy, split="all", **RAW) as loader:
        shutil.rmtree(copy)
        with pytest.raises(Exception, match=str(copy)):
            list(loader)

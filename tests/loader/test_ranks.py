"""Ranks: where they are learned, and what looks wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsloader import DataLoader, HiddenStateDataset
from hsloader.errors import LoaderError
from hsloader.loading.ranks import Ranks, find_ranks, local_rank_warning
from tests.loader.making import PACKED, run_script


def test_arguments_then_environment_then_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_ranks() == Ranks(0, 1, "no launcher")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_ranks() == Ranks(3, 8, "the environment")
    assert find_ranks(1, 2) == Ranks(1, 2, "arguments")
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match="no such rank"):
        find_ranks()


def test_torch_distributed_before_the_environment() -> None:
    code = """
import os, torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from hsloader.loading.ranks import find_ranks
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.update(RANK="5", WORLD_SIZE="9")
print(find_ranks())
dist.destroy_process_group()
"""
    done = run_script(code)
    assert "Ranks(rank=0, world=1, source='torch.distributed')" in done.stdout, done.stderr


def test_batches_of_a_scripts_own_sampler_are_those_of_its_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hsloader")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with DataLoader(path, trainer="raw", batch_sampler=[[0], [1], [2], [3]], log_every=0) as loader:
        iter(loader)
    assert "; 4 batches an epoch on each of 2 ranks; reads by" in caplog.text


def test_another_rank_at_iter_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataLoader(path, **PACKED) as loader:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(LoaderError, match=r"rank 0 of 1 \(from no launcher\), now this is rank 1 of 2"):
            iter(loader)


@pytest.mark.parametrize(
    ("ranks", "environment", "warns"),
    [
        ((1, 4), (5, 8, 1, 4), True),  # local numbers
        ((1, 8), (5, 8, 1, 4), True),  # a local rank in the global world
        ((5, 8), (5, 8, 1, 4), False),
        ((1, 2), (5, 8, 1, 4), False),  # data parallel beside tensor parallel
        ((1, 4), (1, 4, 1, 4), False),  # one node: they are the same
    ],
)
def test_a_local_rank_taken_for_the_global_one(
    ranks: tuple[int, int], environment: tuple[int, int, int, int], warns: bool
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    known = dict(zip(names, map(str, environment), strict=True))
    text = local_rank_warning(Ranks(*ranks, "arguments"), known)
    assert (text is not None) == warns
    assert local_rank_warning(Ranks(*ranks, "the environment"), known) is None


def test_a_dataset_for_torch_demands_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks .* needs rank= and world_size=.*accelerate's prepare\(\)"):
        HiddenStateDataset(path, **PACKED)
    dataset = HiddenStateDataset(path, rank=1, world_size=2, **PACKED)
    assert len(list(dataset)) == len(dataset)
    dataset.close()


def test_a_dataset_for_torch_notices_ranks_that_come_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them would read every batch."""
    dataset = HiddenStateDataset(path, **PACKED)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LoaderError, match=r"rank 0 of 1 \(from no launcher\), now this is rank 1 of 2"):
        next(iter(dataset))
    dataset.close()

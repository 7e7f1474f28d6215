"""Keywords that do not exist, and the one that must: what a script's author is told to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsloader import DataLoader, HiddenStateDataset, LoaderError
from hsloader.loading.connection import _own_port


@pytest.mark.parametrize("device", ["gpu", "meta", 1.5, None])
def test_a_device_that_is_none_is_refused(path: Path, device: Any) -> None:
    with pytest.raises(ValueError, match=r"device=.*expected 'cpu', 'cuda'"):
        DataLoader(path, trainer="raw", device=device)


def test_a_device_that_is_not_there_is_refused_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LoaderError, match="torch sees no CUDA device; use device='cpu'"):
        DataLoader(path, trainer="raw", device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LoaderError, match="torch sees 2 CUDA devices, counted from 0"):
        DataLoader(path, trainer="raw", device="cuda:2")


@pytest.mark.parametrize("make", [DataLoader, HiddenStateDataset])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "trainer= is missing.*speculators-0.9"),
        ({"trainer": "raw", "num_workers": 4}, r"no keyword num_workers=.*processes of its own.*ReadOptions\(threads"),
        ({"trainer": "raw", "read": {"threads": 2}}, r"read=.*: say read=hsloader\.ReadOptions\(threads=2\)$"),
        ({"trainer": "raw", "read": "mmap"}, r"read='mmap': say read=hsloader\.ReadOptions\(\.\.\.\)$"),
        ({"trainer": "raw", "max_tokns": 512}, "did you mean max_tokens="),
        ({"trainer": "raw", "zzz": 1}, "there are trainer, variant"),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_right_one(
    path: Path, make: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        make(path, **given)


def test_a_loader_in_a_dataloader_and_an_index_are_answered(path: Path) -> None:
    with DataLoader(path, trainer="raw", log_every=0) as loader:
        with pytest.raises(TypeError, match=r"iterated, not indexed.*HiddenStateDataset"):
            next(iter(torch.utils.data.DataLoader(loader, batch_size=None)))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="iterated, not indexed"):
            loader[0]
    with pytest.raises(TypeError, match=r"iterated, not indexed.*open_dataset\(path\)\[i\]"):
        HiddenStateDataset(path, trainer="raw")[0]


def test_whole_numbers_of_any_type_are_taken(path: Path) -> None:
    """What comes out of a numpy computation; the state is JSON all the same."""
    whole: dict[str, Any] = {"seed": np.int64(3), "epoch": np.int32(1), "max_length": torch.tensor(50)}
    whole |= {"batch_size": np.int64(2), "rank": np.int64(0), "world_size": np.uint8(1)}
    with DataLoader(path, trainer="raw", log_every=0, **whole) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        assert all(len(sample["input_ids"]) <= 50 for sample in next(iter(loader)))
    plain: dict[str, Any] = {"seed": 3, "epoch": 1, "max_length": 50, "batch_size": 2}
    with DataLoader(path, trainer="raw", log_every=0, **plain) as loader:
        assert loader.state_dict() == state
        loader.load_state_dict(state)


@pytest.mark.parametrize("name", ["seed", "epoch", "min_loss_tokens", "batch_size", "max_length"])
@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1"])
def test_what_is_no_whole_number_is_refused(path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}=.*: expected a whole number"):
        DataLoader(path, **{"trainer": "raw", name: value})


@pytest.mark.parametrize("trainer", ["raw", "speculators-0.9"])
def test_a_norm_state_that_is_none_is_refused_whoever_trains(path: Path, trainer: str) -> None:
    with pytest.raises(ValueError, match="norm_state='prenorm': expected 'pre' or 'post'"):
        DataLoader(path, trainer=trainer, norm_state="prenorm")  # type: ignore[arg-type]
    with DataLoader(path, trainer="raw", norm_state="post", log_every=0) as loader:  # raw takes any state
        assert len(loader) == 24


def test_each_rank_of_a_machine_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_own_port(0), _own_port(9000)) == (0, 9000)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (_own_port(0), _own_port(9000)) == (0, 9003)
    with pytest.raises(ValueError, match="metrics_port=65535: with the local rank 3 it is 65,538"):
        _own_port(65535)

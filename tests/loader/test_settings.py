"""Keywords that do not exist, and the one that must: what a script's author is told to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        ({"trainer": "raw", "num_workers": 4}, r"no keyword num_workers=.*ReadOptions\(threads"),
        ({"trainer": "raw", "max_tokns": 512}, "did you mean max_tokens="),
        ({"trainer": "raw", "zzz": 1}, "there are trainer, variant"),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_right_one(
    path: Path, make: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        make(path, **given)


def test_each_rank_of_a_machine_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_own_port(0), _own_port(9000)) == (0, 9000)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (_own_port(0), _own_port(9000)) == (0, 9003)
    with pytest.raises(ValueError, match="metrics_port=65535: with the local rank 3 it is 65,538"):
        _own_port(65535)

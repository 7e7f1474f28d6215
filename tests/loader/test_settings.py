"""Keywords that do not exist, and the one that must: what a script's author is told to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hsloader import DataLoader, HiddenStateDataset


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

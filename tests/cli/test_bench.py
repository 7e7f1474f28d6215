"""hsloader bench on the command line; what it measures is tested in ``tests/benchmark``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hsloader
from tests.cli.conftest import Run


def test_the_options_reach_the_measurement(run: Run, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def refuse(path: Path, **options: Any) -> None:
        given.update(options)
        raise ValueError("seen")

    monkeypatch.setattr(hsloader, "bench", refuse, raising=False)
    assert "seen" in run("bench", dataset).err
    assert (given["scratch_bytes"], given["seconds"], given["gpus"]) == (1 << 30, 30.0, 1)
    run("bench", dataset, "--scratch", "50MB", "--seconds", "2", "--tokens-per-second", "1000")
    assert (given["scratch_bytes"], given["seconds"], given["tokens_per_second"]) == (50_000_000, 2.0, 1000.0)


def test_it_measures_a_dataset(run: Run, dataset: Path) -> None:
    out = run("bench", dataset, "--scratch", "16MiB", "--seconds", "0.5", "--quiet").out
    for words in ("verdict", "recommended", "ReadOptions("):
        assert words in out


def test_half_of_a_need_is_a_mistake_on_the_command_line(run: Run, dataset: Path) -> None:
    done = run("bench", dataset, "--step-ms", "100")
    assert done.status == 2
    assert "tokens_per_step" in done.err

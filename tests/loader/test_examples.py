"""The examples run, each in a process of its own, on a small dataset."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loader.making import ROOT, write

SPECULATORS = all(importlib.util.find_spec(name) for name in ("speculators", "transformers", "hs_connectors"))


def run(folder: Path, *command: object, seconds: float = 200) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:train|loss) (\d+\.\d+)", text)]


def test_a_plain_loop_that_resumes(path: Path, tmp_path: Path) -> None:
    script = ROOT / "examples/train_plain.py"
    arguments = [path, "--max-tokens", 256, "--checkpoint", tmp_path / "last.pt"]
    first = run(tmp_path, script, *arguments, "--epochs", 1)
    assert first.startswith("epoch 0: train")
    second = run(tmp_path, script, *arguments, "--epochs", 3)
    assert re.findall(r"epoch (\d)", second) == ["1", "2"]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_dataloader(path: Path, tmp_path: Path, workers: int) -> None:
    text = run(tmp_path, ROOT / "examples/stock_dataloader.py", path, "--workers", workers)
    assert len(losses(text)) == 2


def test_two_ranks(path: Path, tmp_path: Path) -> None:
    text = run(
        tmp_path,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        ROOT / "examples/train_torchrun.py",
        path,
    )
    assert len(losses(text)) == 2


@pytest.mark.skipif(not SPECULATORS, reason="speculators 0.9.0 is not installed: its Trainer was NOT TESTED")
def test_the_speculators_trainer(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hs", 12)
    script = ROOT / "examples/train_speculators.py"
    text = run(tmp_path, script, path, "--vocabulary", 1000, "--layers", 1, 3, 4)
    steps, batches = map(int, re.search(r"(\d+) steps, (\d+) batches", text).groups())  # type: ignore[union-attr]
    assert steps >= 2
    assert batches >= 1

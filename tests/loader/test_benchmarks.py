"""The loader's benchmark scripts run, with tiny sizes, and write their figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loader.making import ROOT

TINY = ["--hidden", "256", "--tokens", "256", "--gigabytes", "0.005", "--rounds", "1"]


def run(script: str, folder: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script)),
            *("--out", str(folder), "--data", str(folder), *TINY, *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        # TMPDIR stays short: torch's workers put sockets there, whose paths end at 107 bytes, and would lose a batch.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads((folder / script.replace(".py", ".json")).read_text())
    return found


def test_the_gpu_script_tries_out_on_a_cpu(tmp_path: Path) -> None:
    figures = run("gpu.py", tmp_path, "--device", "cpu", "--seconds", "0.05")
    assert {"machine", "throughput", "launch", "compute", "first_batch", "memory"} <= figures.keys()


@pytest.mark.timeout(240)
def test_the_cold_disk_script(tmp_path: Path) -> None:
    figures = run("loader.py", tmp_path)
    assert {"share_of_limit", "times_stock", "limit", "machine"} <= figures.keys()

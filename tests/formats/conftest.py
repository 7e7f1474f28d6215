"""The shared input cases, made once for a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_data import SHARED


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with one sub-folder a case; skips where the generator is not there."""
    script = SHARED / "cases" / "make_cases.py"
    if not script.is_file():
        pytest.skip(f"the shared cases are not at {script}")
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    out = tmp_path_factory.mktemp("cases")
    subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(out)], check=True, capture_output=True, timeout=120
    )
    return out


@pytest.fixture
def as_root() -> bool:
    """Whether permissions do not bind this process."""
    return os.geteuid() == 0

"""What the command-line tests share: a way to run a command, and a small dump with its dataset."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hsloader
from hsloader.cli.demo_data import DemoShape, write_samples
from hsloader.cli.main import app

SHAPE = DemoShape(samples=4, mean_length=60, hidden_size=128, decoder_layers=8)


@dataclass
class Ran:
    """What a command left: its exit status, its stdout, its stderr."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; fails if there is anything beside it."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run() -> Run:
    def run(*arguments: object) -> Ran:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        return Ran(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("cli")
    (folder / "dump").mkdir()
    write_samples(folder / "dump", SHAPE)
    hsloader.convert(folder / "dump", folder / "data.hs", norm_state="pre", model="the-model")
    return folder


@pytest.fixture
def dump(_made: Path, tmp_path: Path) -> Path:
    """A copy of a folder of four samples as speculators 0.4 writes them."""
    return Path(shutil.copytree(_made / "dump", tmp_path / "dump"))


@pytest.fixture
def dataset(_made: Path, tmp_path: Path) -> Path:
    """A copy of their dataset."""
    return Path(shutil.copytree(_made / "data.hs", tmp_path / "data.hs"))

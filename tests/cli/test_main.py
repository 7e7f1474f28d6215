"""The hsloader command as a whole: as a process of its own, on a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hsloader
from tests.cli.conftest import Run

_COMMANDS = ["demo", "inspect", "convert", "info", "verify", "export", "bench", "doctor", "top"]
_HSLOADER = [sys.executable, "-m", "hsloader"]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(hsloader.__file__).parents[1]), "TERM": "xterm", "COLUMNS": "100"}


def test_version(run: Run) -> None:
    assert run("--version").out == f"hsloader {hsloader.__version__}\n"


def test_help_lists_the_commands(run: Run) -> None:
    out = run("--help").out
    for command in _COMMANDS:
        assert f"\n  {command} " in out
    assert "..." not in out.partition("Commands:")[2]  # no summary is cut


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_the_common_options(run: Run, command: str) -> None:
    out = run(command, "--help").out
    for option in ("--json", "--traceback"):
        assert option in out
    assert "<float" not in out  # every value has a name of its own
    assert " range>" not in out


def test_arguments_in_the_usage_line_are_plain(run: Run) -> None:
    assert "convert [OPTIONS] SRC DST\n" in run("convert", "--help").out


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("konvert").status == 2


def test_progress_is_plain_lines_on_a_pipe_and_never_on_stdout(dump: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*_HSLOADER, "convert", dump, tmp_path / "new.hs", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=_ENVIRONMENT,
    )
    assert done.stdout.startswith("{")
    assert "\x1b" not in done.stdout + done.stderr


def test_progress_is_a_bar_on_a_terminal_and_goes_away(dump: Path, tmp_path: Path) -> None:
    screen = _on_a_terminal(["convert", str(dump), str(tmp_path / "new.hs")])
    assert "\x1b[" in screen  # colours, and the bar's cursor movements
    assert "converted 4 samples" in screen


def test_a_reader_that_went_away_is_no_traceback(dataset: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" | true', "bash", *_HSLOADER, "info", dataset],
        capture_output=True,
        text=True,
        check=True,
        env=_ENVIRONMENT,
    )
    assert "Traceback" not in done.stderr


def _on_a_terminal(arguments: list[str]) -> str:
    """What the command prints when all its streams are a terminal."""
    parent, child = pty.openpty()
    try:
        process = subprocess.Popen(
            [*_HSLOADER, *arguments], stdin=child, stdout=child, stderr=child, env=_ENVIRONMENT, close_fds=True
        )
    finally:
        os.close(child)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([parent], [], [], 0.1)[0]:
                try:
                    part = os.read(parent, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                if not part:
                    break
                seen += part
            elif process.poll() is not None:
                break
    finally:
        os.close(parent)
        assert process.wait(timeout=10) == 0, seen.decode(errors="replace")
    return seen.decode(errors="replace")

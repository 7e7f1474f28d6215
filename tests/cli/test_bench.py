"""hsloader bench on the command line; what it measures is tested in ``tests/benchmark``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import hsloader
from hsloader.benchmark.api import BenchProgress
from hsloader.cli.output import in_options
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


@pytest.mark.parametrize("place", ["no/folder/page.html", "."])
def test_a_page_that_cannot_be_written_is_refused_before_it_measures(
    run: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    done = run("bench", dataset, "--report", tmp_path / place, "--json")
    assert done.status == 1
    assert "expected the name of a file in a folder that is there" in done.document["error"]["message"]


def test_a_fault_while_it_measures_is_no_mistake_on_the_command_line(
    run: Run, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *, progress: Any, **options: Any) -> None:
        progress(BenchProgress("disk", "x", 1.0, 30.0))
        raise ValueError("a bug")

    monkeypatch.setattr(hsloader, "bench", fail, raising=False)
    with pytest.raises(ValueError, match="a bug"):
        run("bench", dataset)


def test_handlers_of_signals_are_given_back(run: Run, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(path: Path, **options: Any) -> None:
        seen.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP))
        raise ValueError("seen")

    monkeypatch.setattr(hsloader, "bench", look, raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        term = signal.getsignal(signal.SIGTERM)
        run("bench", dataset)
        assert signal.getsignal(signal.SIGTERM) is term
        assert seen[0] is not term
        assert seen[1] is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_half_of_a_need_is_a_mistake_on_the_command_line(run: Run, dataset: Path) -> None:
    done = run("bench", dataset, "--step-ms", "100")
    assert done.status == 2
    assert "--step-ms needs --tokens-per-step: the tokens of one step on one GPU" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scratch_bytes=1: expected at least 1,024", "--scratch 1: expected at least 1,024"),
        ("threads=300: expected 1 to 256", "--threads 300: expected 1 to 256"),
        ("/a/step_ms/hidden_size=2: no dataset", "/a/step_ms/hidden_size=2: no dataset"),
        ("(drop_cache lets the benchmark", "(--drop-cache lets the benchmark"),
        ("try ReadOptions(threads=4)", "try ReadOptions(threads=4)"),
        ("step_ms=0.0: expected a number above 0", "--step-ms 0.0: expected a number above 0"),
        ("give hsloader.DataLoader(norm_state='pre')", "give hsloader.DataLoader(norm_state='pre')"),
        ("norm_state='pre' or layer_ids=...", "--norm-state pre or --layer-ids ..."),
    ],
)
def test_keywords_are_told_as_options(text: str, said: str) -> None:
    assert in_options(text) == said


def test_a_report_without_matplotlib_says_what_a_shell_takes(
    run: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("bench", dataset, "--report", tmp_path / "page.html")
    assert "--report needs matplotlib: pip install 'hsloader[report]'" in " ".join(done.err.split())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    from hsloader.cli.bench import _signals_that_clean_up

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    before, reached = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as left, _signals_that_clean_up() as leave_if_told:  # noqa: PT012
        Dying()
        reached.append(True)  # Python has dropped what the handler raised
        leave_if_told()
    assert reached
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before

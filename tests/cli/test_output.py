"""Numbers and names as people read them."""

from __future__ import annotations

import pytest

from hsloader.cli import output


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (98_400_000, "98.4 MB"),
        (999_600, "1 MB"),
        (924e9, "924 GB"),
        (2.5e18, "2500 PB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert output.bytes_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119, "119 s"), (121, "2 min 1 s"), (7300, "2 h 1 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration_text(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(5e8, "0.50 GB/s"), (3.2e7, "32 MB/s"), (12, "12 bytes/s")])
def test_rates(rate: float, text: str) -> None:
    assert output.rate_text(rate) == text


@pytest.mark.parametrize(
    ("before", "after", "text"), [(3, 2, "1.50x smaller"), (2, 3, "1.50x larger"), (0, 3, ""), (3, 0, "")]
)
def test_ratios(before: float, after: float, text: str) -> None:
    assert output.ratio_text(before, after) == text


def test_counts_have_their_plural() -> None:
    assert [output.count(n, "sample") for n in (0, 1, 10_000)] == ["0 samples", "1 sample", "10,000 samples"]


def test_some_names_of_many() -> None:
    assert output.named("no files", []) == ""
    assert output.named("2 files", ["a", "b\n"]) == "2 files: a, b\\n"
    assert output.named("4 files", list("abcd")) == "4 files: a, b, c, ..."


def test_names_become_printable() -> None:
    assert output.printable("a\tb\x1b[31m\udcff\u202eü") == r"a\tb\x1b[31m\xff\u202eü"

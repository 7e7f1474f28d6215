"""Progress: what a bar and a line say."""

from __future__ import annotations

import pytest

from hsloader.cli.progress import _speed


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, ""), (0.03, "0.03 files/s"), (9.4, "9 files/s"), (9.7, "10 files/s"), (1234.5, "1,234 files/s")],
)
def test_speeds_are_plain_numbers(rate: float, text: str) -> None:
    assert _speed(rate, "files") == text
    assert _speed(4e7, "bytes") == "40 MB/s"

"""Most tests of the store need no disk: an fsync that takes milliseconds is most of what they would wait for."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync return at once in this process (the processes that tests start and kill do sync)."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

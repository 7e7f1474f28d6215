"""Numbers with their nouns, as messages say them."""

from __future__ import annotations

__all__ = ["number_of"]


def number_of(number: int, noun: str) -> str:
    """``"1 sample"``, ``"10,000 samples"``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

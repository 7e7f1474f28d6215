"""Numbers as people read them: sizes, rates, times, lists."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "plural", "rate_text", "share_text", "size_text", "time_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(count: float) -> str:
    """A number of bytes in decimal units: ``97 MB``, ``1.53 GB``."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """A rate: ``310 MB/s``."""
    return f"{size_text(bytes_per_second)}/s"


def time_text(seconds: float) -> str:
    """A span of time: ``1.9 ms``, ``0.31 s``, ``95 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def share_text(share: float) -> str:
    """A share of one as percent: ``98 %``, ``0.4 %``."""
    percent = 100 * share
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def plural(count: int, noun: str, many: str | None = None) -> str:
    """``1 file``, ``4 files``; ``many`` where the plural is no plain s."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def listed(items: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; after ``most`` items ``a, b and 7 more``."""
    if len(items) > most:
        kept = list(items[: most - 1])
        return f"{', '.join(kept)} and {len(items) - len(kept)} more"
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"

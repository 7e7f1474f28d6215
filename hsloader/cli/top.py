"""hsloader top: every loader of this user on this machine, live, found through the memory of their rings."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Traceback, clear_errors
from hsloader.errors import HsloaderError
from hsloader.monitor.words import listed, rate_text, share_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from hsloader.monitor.overview import LoaderRow

__all__ = ["top"]

_NONE = "no hsloader loader of this user runs on this machine"
_BAR = 8
_STYLES = {"trainer-bound": "green", "starting": "dim", "feeder-stuck": "red"}


@clear_errors
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, after one interval, and stop.")] = False,
    interval: Annotated[float, typer.Option(metavar="S", min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    as_json: Json = False,
    traceback: Traceback = False,
) -> int:
    """Show all running loaders, live.

    Speed, data wait, ring, position, and what the limit is. Ctrl-C ends it.
    """
    if not Path("/proc/self/fd").is_dir():
        raise HsloaderError(f"hsloader top finds loaders through /proc, which this system ({sys.platform}) has not")
    if as_json:
        rows, _ = next(_looks(interval))
        output.print_json([row.as_dict() for row in rows])
    elif once or not sys.stdout.isatty():
        _print(*next(_looks(interval)))
    else:
        _watch(interval)
    return 0


def _looks(interval: float) -> Iterator[tuple[list[LoaderRow], str]]:
    """The loaders over one interval after another, and a sentence about those that cannot be read."""
    from hsloader.monitor.gpu import GpuReader
    from hsloader.monitor.neighbours import find_rings
    from hsloader.monitor.overview import overview

    before = find_rings()
    while True:
        gpus, foreign = GpuReader(), set[int]()
        gpus.sample()
        time.sleep(interval)
        gpus.sample()
        after = find_rings(foreign=foreign)
        yield overview(before, after, gpus.result()[0]), _foreign_text(foreign)
        before = after


def _foreign_text(pids: set[int]) -> str:
    if not pids:
        return ""
    who = listed([str(pid) for pid in sorted(pids)])
    return f"pid {who}: a loader of another version of hsloader; look with the hsloader that is installed there"


def _watch(interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(Text("looking ..."), auto_refresh=False) as live:
        for rows, note in _looks(interval):
            live.update(_table(rows, note), refresh=True)


def _print(rows: list[LoaderRow], note: str) -> None:
    if rows:
        output.columns([_HEAD, *(_cells(row) for row in rows)], right=(0, 1, 3, 4, 5, 6))
    elif not note:
        output.line(_NONE)
    for row in rows:
        output.line(output.printable(f"  pid {row.pid}: {row.verdict}"))
    if note:
        output.line(note)


_HEAD = ("pid", "rank", "dataset", "decoded", "tokens/s", "data wait", "GPU", "ring", "epoch: batch", "left")


def _cells(row: LoaderRow) -> tuple[str, ...]:
    rank = "-" if row.rank is None else f"{row.rank}/{row.world}" if row.world else str(row.rank)
    of = f" of {row.epoch_batches:,}" if row.epoch_batches else ""
    return (
        str(row.pid),
        rank,
        output.printable(Path(row.dataset).name + (f" {row.split}" if row.split not in ("", "train") else "")),
        rate_text(row.decoded_bytes_per_second),
        f"{row.tokens_per_second:,.0f}",
        share_text(row.data_wait_share),
        "-" if row.gpu is None else share_text(row.gpu),
        _ring(row),
        f"{row.epoch}: {row.position:,}{of}",
        "-" if row.eta is None else time_text(row.eta),
    )


def _ring(row: LoaderRow) -> str:
    """A bar of what is ready (full), being read (half) and neither, and the number ready."""
    width = min(_BAR, row.slots)
    ready = round(width * row.ready / row.slots)
    reading = min(width - ready, -(-width * row.reading // row.slots))
    return f"{'█' * ready}{'▒' * reading}{'·' * (width - ready - reading)} {row.ready}/{row.slots}"


def _table(rows: list[LoaderRow], note: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(note or f"{_NONE}; waiting for one (ctrl-C ends)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if number in (0, 1, 3, 4, 5, 6) else "left", no_wrap=True)
    verdicts = []
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
        advice = f" (try: {row.advice})" if row.advice else ""
        text = f"{row.pid}: {output.printable(row.verdict)}{output.printable(advice)}"
        verdicts.append(Text(text, style=_STYLES.get(row.limit, "yellow")))
    return Group(table, Text(""), *verdicts, *([Text(note, style="dim")] if note else []))

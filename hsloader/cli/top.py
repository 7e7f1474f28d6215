"""hsloader top: every loader of this user on this machine, live, found through the memory of their rings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Traceback, clear_errors
from hsloader.monitor.words import rate_text, share_text, time_text

if TYPE_CHECKING:
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
    if as_json or once:
        rows = _look(interval)
        if as_json:
            output.print_json([row.as_dict() for row in rows])
        else:
            _print(rows)
        return 0
    return _watch(interval)


def _look(interval: float) -> list[LoaderRow]:
    from hsloader.monitor.gpu import GpuReader
    from hsloader.monitor.neighbours import find_rings
    from hsloader.monitor.overview import overview

    gpus = GpuReader()
    before = find_rings()
    gpus.sample()
    time.sleep(interval)
    gpus.sample()
    return overview(before, find_rings(), gpus.result()[0])


def _watch(interval: float) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(_table(_look(min(interval, 0.3))), console=console, auto_refresh=False, screen=False) as live:
        while True:
            try:
                live.update(_table(_look(interval)), refresh=True)
            except KeyboardInterrupt:
                return 0


def _print(rows: list[LoaderRow]) -> None:
    if not rows:
        output.line(_NONE)
        return
    cells = [_cells(row) for row in rows]
    output.columns([_HEAD, *cells], right=(0, 1, 3, 4, 5, 6))
    for row in rows:
        output.line(output.printable(f"  pid {row.pid}: {row.verdict}"))


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


def _table(rows: list[LoaderRow]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(f"{_NONE}; waiting for one (ctrl-C ends)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if number in (0, 1, 3, 4, 5, 6) else "left", no_wrap=True)
    verdicts = []
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
        advice = f" (try: {row.advice})" if row.advice else ""
        text = f"{row.pid}: {output.printable(row.verdict)}{output.printable(advice)}"
        verdicts.append(Text(text, style=_STYLES.get(row.limit, "yellow")))
    return Group(table, Text(""), *verdicts)

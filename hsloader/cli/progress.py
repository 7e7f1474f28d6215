"""Progress on stderr: a bar with rate and time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hsloader.cli import output

if TYPE_CHECKING:
    import rich.progress

    from hsloader.conversion.report import Progress

__all__ = ["ProgressDisplay", "show_progress"]

_LINE_SECONDS = 5.0


class ProgressDisplay:
    """Shows the stages of some work; use as a context manager and call ``show`` as often as you like.

    Bars vanish when they are done with: what stays on the terminal is what the command says at the end.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._bars: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._measured = False
        self._stage = ""
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the bars away, so that something else can be printed; the next ``show`` brings new ones."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None

    def show(
        self,
        stage: str,
        done: int,
        total: int,
        *,
        unit: str = "bytes",
        rate: float | None = None,
        seconds_left: float | None = None,
        note: str = "",
    ) -> None:
        """Say where a stage stands. ``total`` 0: not known; ``unit``: ``"bytes"`` or a noun in the plural.

        Rate (units a second) and time left are worked out where they are not given.
        """
        if self._quiet:
            return
        now = time.monotonic()
        if stage != self._stage:
            self._end_stage()
            self._stage, self._began = stage, now
        seconds = now - self._began
        if rate is None:
            rate = done / seconds if seconds > 0 else 0.0
        if seconds_left is None and total and rate:
            seconds_left = max(0.0, (total - done) / rate)
        amount, speed = _amount(done, total, unit), _speed(rate, unit)
        share = f"{100 * done / total:.0f} %" if total else ""
        left = f"{output.duration_text(seconds_left)} left" if seconds_left is not None and done < total else ""
        if not self._terminal:
            if now - self._spoke >= _LINE_SECONDS:
                self._spoke = now
                parts = [part for part in (share, amount, speed, left, note) if part]
                print(f"{stage}: {', '.join(parts)}", file=sys.stderr, flush=True)
            return
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        self._measured = bool(total)
        texts: dict[str, Any] = {"share": share, "amount": amount, "speed": speed, "left": left, "note": note}
        if self._task is None:
            self._task = self._bars.add_task(stage, total=total or None, completed=done, **texts)
        else:
            self._bars.update(self._task, total=total or None, completed=done, **texts)

    def _end_stage(self) -> None:
        """Let the bar of a stage that another one follows stand still; one whose end nobody knew goes away."""
        if self._bars is not None and self._task is not None:
            if self._measured:
                self._bars.update(self._task, total=1, completed=1, share="100 %", speed="", left="")
            else:
                self._bars.remove_task(self._task)
        self._task = None


def show_progress(display: ProgressDisplay, progress: Progress) -> None:
    """Show where a conversion stands."""
    stages = {"find": "find", "describe": "plan", "measure": "measure", "convert": "convert", "finish": "finish"}
    noted = [output.count(progress.samples, "sample")] if progress.samples else []
    if progress.quarantined:
        noted.append(f"{output.count(progress.quarantined)} set aside")
    display.show(
        stages.get(progress.stage, progress.stage),
        progress.done,
        progress.total,
        unit="bytes" if progress.stage in ("convert", "export") else "files",
        rate=progress.rate or None,
        seconds_left=progress.seconds_left,
        note=", ".join(noted) or progress.note,
    )


def _bars() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[share]:>5}", markup=False),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[speed]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=8,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{output.bytes_text(done)} of {output.bytes_text(total)}" if total else output.bytes_text(done)
    return f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"


def _speed(rate: float, unit: str) -> str:
    if rate <= 0:
        return ""
    return output.rate_text(rate) if unit == "bytes" else f"{rate:{',.0f' if rate >= 9.5 else '.1g'}} {unit}/s"

"""What the commands print: numbers for people, one JSON document for programs, one clear line for an error.

Text goes to stdout, progress and errors to stderr.  Names come from file systems, so they are made printable first: a
file name must not move the cursor.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence

import typer

from hsloader.monitor import words

__all__ = [
    "bytes_text",
    "columns",
    "count",
    "duration_text",
    "error",
    "facts",
    "heading",
    "histogram",
    "in_options",
    "line",
    "listing",
    "named",
    "next_command",
    "path_text",
    "print_json",
    "printable",
    "rate_text",
    "ratio_text",
    "training_line",
]

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
# Keywords of hsloader.convert and hsloader.bench, alone or with a value; not in a path or a call.  One that is a word
# of English is a keyword only where a text begins with its value.
_KEYWORD = re.compile(
    r"(?:^(?P<word>gpus|seconds|threads)(?==)|(?<![\w/.'\"-])(?<!\w\()(?P<name>bf16_as|segment_size|typical_length"
    r"|trim_padding|hidden_size|num_layers|layer_ids|layer_convention|norm_state|vocab_size|read_back|delete_source"
    r"|allow_unknown|tokens_per_second|step_ms|tokens_per_step|scratch_bytes|drop_cache))"
    r"(?:=(?P<value>'[^']*'|\.\.\.|-?[\w.]*\w)|(?![\w/=]|\.\w))"
)
_IN_PYTHON = re.compile(r" \(in Python [a-z_]+=\w+\)")
_OPTIONS = {"read_back": "--no-read-back", "scratch_bytes": "--scratch"}  # what is not called as in Python
_LISTED = 20  # of a long list of files, so many are shown; --json has all


def bytes_text(number: float) -> str:
    """Bytes with three digits and a decimal unit: ``"98.4 MB"``."""
    for unit in _UNITS:
        if abs(number) < 999.5 or unit == _UNITS[-1]:
            break
        number /= 1000
    if unit == "bytes":
        return count(int(number), "byte")
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:.0f} {unit}"


def rate_text(bytes_a_second: float) -> str:
    """A rate, in GB/s from 0.1 GB/s on, so that rates of one report compare at a glance."""
    if bytes_a_second >= 1e8:
        return f"{bytes_a_second / 1e9:.2f} GB/s"
    return f"{bytes_text(bytes_a_second)}/s"


def ratio_text(before: float, after: float) -> str:
    """``"1.47x smaller"``; empty where nothing was stored."""
    if not before or not after:
        return ""
    return f"{before / after:.2f}x smaller" if before >= after else f"{after / before:.2f}x larger"


def duration_text(seconds: float) -> str:
    """Seconds with the two largest units that matter: ``"1 h 25 min"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def count(number: int, noun: str = "", plural: str = "") -> str:
    """``"1 sample"``, ``"10,000 samples"``; without a noun the number alone."""
    if not noun:
        return f"{number:,}"
    return words.plural(number, noun, plural or None)


def named(count_text: str, names: Sequence[str], most: int = 3) -> str:
    """``"3 that are no samples: a, b, c"``; of more than ``most`` only some, empty for none."""
    if not names:
        return ""
    shown = ", ".join(map(printable, names[:most]))
    return f"{count_text}: {shown}{', ...' if len(names) > most else ''}"


def printable(text: object) -> str:
    """``text`` with everything that is not printable written as an escape (``\\n``, ``\\x1b``, ``\\xff``)."""
    made = []
    for character in str(text):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as os.fsdecode keeps it
            made.append(f"\\x{code - 0xDC00:02x}")
        elif character.isprintable():
            made.append(character)
        else:
            made.append(character.encode("unicode_escape", errors="backslashreplace").decode("ascii"))
    return "".join(made)


def path_text(path: str | os.PathLike[str]) -> str:
    """A path as short as it can be typed here: relative where it lies below the current folder."""
    text = os.fspath(path)
    if text.startswith(os.sep):
        relative = os.path.relpath(text)
        if not relative.startswith(os.pardir):
            text = relative
    return printable(text)


def line(text: str = "", *, style: str | None = None, err: bool = False) -> None:
    """One line of text, never wrapped: what is copied from a terminal must stay in one piece."""
    if style is None:
        typer.echo(text, err=err)
    else:
        colours = {"good": typer.colors.GREEN, "bad": typer.colors.RED, "warn": typer.colors.YELLOW}
        typer.secho(text, err=err, fg=colours.get(style), bold=style == "bold", dim=style == "dim")


def heading(text: str) -> None:
    """A heading, set off by an empty line."""
    line()
    line(text, style="bold")


def facts(rows: Iterable[tuple[str, str] | None]) -> None:
    """Labelled values, one a line, the values in one column; ``None`` and empty values are left out."""
    shown = [row for row in rows if row and row[1]]
    width = max((len(label) for label, _ in shown), default=0)
    for label, value in shown:
        line(f"  {label:<{width}}  {value}")


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Rows of cells in aligned columns; those in ``right`` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line("  " + "  ".join(cells).rstrip())


def histogram(title: str, classes: Sequence[tuple[int, int, int]], smallest: int, largest: int, median: int) -> None:
    """How numbers spread: a bar for each of ``classes`` (least, most, how many)."""
    if not classes:
        return
    spread = f"{count(smallest)} to {count(largest)}, median {count(median)}" if smallest < largest else count(largest)
    heading(f"{title}: {spread}")
    most = max(number for _, _, number in classes)
    rows = [
        (count(low), "-", count(high), count(number), "\u2588" * max(1, round(30 * number / most)))
        for low, high, number in classes
    ]
    columns(rows, right=(0, 2, 3))


def listing(title: str, rows: Sequence[tuple[str, str]], *, style: str = "warn") -> None:
    """A titled list of (name, reason), cut after a screenful with word of how many more there are."""
    if not rows:
        return
    line()
    line(title, style=style)
    for name, reason in rows[:_LISTED]:
        line(f"  {printable(name)}: {printable(reason)}" if reason else f"  {printable(name)}")
    if len(rows) > _LISTED:
        line(f"  ... and {count(len(rows) - _LISTED)} more (all of them with --json)")


def next_command(*arguments: str, why: str = "next") -> None:
    """The command to type next, ready to be copied."""
    import shlex

    line()
    line(f"{why}: {' '.join(shlex.quote(argument) for argument in arguments)}")


def training_line(path: str | os.PathLike[str]) -> None:
    """How a training script reads the dataset at ``path``."""
    line(f"in training: for batch in hsloader.DataLoader({path_text(path)!r}, trainer=...)")


def print_json(document: object) -> None:
    """The one JSON document of a ``--json`` run."""
    json.dump(document, sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
    sys.stdout.flush()


def in_options(text: str) -> str:
    """A text of the API with its keywords as the options they are here (``norm_state='pre'``: ``--norm-state pre``).

    What is to be written in a training script (``hsloader.DataLoader(norm_state='pre')``) stays Python.
    """
    return _KEYWORD.sub(_option, _IN_PYTHON.sub("", text))


def _option(match: re.Match[str]) -> str:
    name, value = match["name"] or match["word"], (match["value"] or "").strip("'")
    option = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
    if value in ("", "True", "False"):
        return option
    return f"{option}={value}" if name == "delete_source" else f"{option} {value}"


def error(problem: BaseException) -> None:
    """One error, on stderr, without a traceback."""
    if isinstance(problem, OSError) and problem.strerror:
        where = f"{printable(problem.filename)}: " if problem.filename else ""
        message = f"{where}{problem.strerror}"
    else:
        text = in_options(str(problem))
        message = "\n".join(printable(part) for part in text.splitlines()) or type(problem).__name__
    typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
    typer.echo(message, err=True)

"""Writes a report as one self-contained HTML page with plots; needs matplotlib (``pip install 'hsloader[report]'``)."""

from __future__ import annotations

import base64
import html
import importlib
import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsloader.benchmark.results import BenchReport, Measurement
from hsloader.benchmark.words import HEADINGS, PART_TITLES, cells, machine_text, rate

__all__ = ["render_page", "write_page"]

_BLUE, _TEAL, _GREY, _ORANGE, _INK = "#2563eb", "#0d9488", "#94a3b8", "#ea580c", "#0f172a"

# Keeps a number readable where the line of what is needed crosses it.
_UNDERLAY = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}

_STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #f1f5f9; color: #0f172a; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 48px }
h1 { font-size: 22px; margin: 0 0 2px } h2 { font-size: 16px; margin: 0 0 10px }
.dim { color: #64748b; overflow-wrap: anywhere } .card { background: #fff; border: 1px solid #e2e8f0;
border-radius: 10px; padding: 18px 20px; margin-top: 16px }
.verdict { border-left: 5px solid #2563eb; font-size: 17px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); gap: 12px; margin-top: 16px }
.tile { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 12px 14px }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 16px; margin-top: 16px }
.plots .card { margin: 0 } img { width: 100%; height: auto; display: block }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th { text-align: left;
font-weight: 500; color: #64748b; border-bottom: 1px solid #e2e8f0; padding: 4px 10px 4px 0 }
th:first-child { width: 54% }
td { padding: 4px 10px 4px 0; border-bottom: 1px solid #f1f5f9 } td.n, th.n { text-align: right }
pre { background: #0f172a; color: #e2e8f0; border-radius: 8px; padding: 12px 14px; overflow-x: auto; margin: 8px 0 0 }
ul { margin: 0; padding-left: 20px }
"""


def write_page(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write the page; ``ImportError`` names the extra if matplotlib is missing."""
    Path(path).write_text(render_page(report), encoding="utf-8")


def render_page(report: BenchReport) -> str:
    """The page as text: no script, no link, nothing fetched from anywhere."""
    plots = [(title, _plot(draw, report)) for title, wanted, draw in _PLOTS if wanted(report)]
    shown = "".join(
        f'<div class="card"><h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" '
        f'src="data:image/svg+xml;base64,{image}"></div>'
        for title, image in plots
    )
    tables = "".join(_table(title, report.of(part)) for part, title in PART_TITLES.items() if report.of(part))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>hsloader bench: {html.escape(_printable(report.path))}</title><style>{_STYLE}</style><main>"
        f'<h1>hsloader bench</h1><div class="dim">{html.escape(_printable(report.path))}: '
        f"{html.escape(report.subject)}<br>{html.escape(machine_text(report))}</div>"
        f'<div class="card verdict">{html.escape(_sentence(report))}</div>{_tiles(report)}'
        f'<div class="plots">{shown}</div>'
        f'<div class="card"><h2>Recommended</h2>as Python<pre>{html.escape(report.options_python())}</pre>'
        f'<div style="margin-top:10px">as JSON</div><pre>{html.escape(report.options_json())}</pre></div>{tables}'
        + (f'<div class="card"><h2>Notes</h2><ul>{notes}</ul></div>' if notes else "")
        + f'<p class="dim">Measured in {report.seconds:.0f} s. The page cache was asked before each read (mincore); '
        "cold means that under 5 % of the bytes were in it, warm over 95 %. A share compares with the most that the "
        "other figures of this run allow.</p></main></html>\n"
    )


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _sentence(report: BenchReport) -> str:
    sentence = report.verdict.sentence
    return sentence[:1].upper() + sentence[1:] + "."


def _tiles(report: BenchReport) -> str:
    limits = _limits(report)
    shown = [(f"{rate(value)}", name) for name, value, _ in limits]
    if report.verdict.headspace is not None:
        shown.append((f"{report.verdict.headspace:.2f}x", "headspace"))
    shown.append((f"{report.ratio:.2f}x", "smaller than the tensors"))
    return '<div class="tiles">' + "".join(_tile(value, name) for value, name in shown) + "</div>"


def _tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span class="dim">{html.escape(name)}</span></div>'


def _table(title: str, rows: Sequence[Measurement]) -> str:
    texts = [cells(row) for row in rows]
    used = [i for i in range(len(HEADINGS)) if any(text[i] for text in texts)]
    numeric = {2, 3, 4, 5}
    head = "".join(f"<th{_numeric(i, numeric)}>{html.escape(HEADINGS[i])}</th>" for i in used)
    body = "".join(
        "<tr>" + "".join(f"<td{_numeric(i, numeric)}>{html.escape(text[i])}</td>" for i in used) + "</tr>"
        for text in texts
    )
    return f'<div class="card"><h2>{html.escape(title)}</h2><table><tr>{head}</tr>{body}</table></div>'


def _numeric(column: int, numeric: set[int]) -> str:
    return ' class="n"' if column in numeric else ""


# The plots. matplotlib's object interface only: pyplot would keep figures and choose a window system.


def _plot(draw: Callable[[BenchReport, Any], None], report: BenchReport) -> str:
    """The drawing as SVG in base64."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("a report with plots needs matplotlib: pip install 'hsloader[report]'") from error
    settings = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GREY}
    settings |= {"text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    with matplotlib.rc_context(
        {**settings, "svg.fonttype": "path", "svg.hashsalt": "hsloader", "axes.axisbelow": True, "axes.grid": False}
    ):
        figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")
        draw(report, figure.subplots())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _limits(report: BenchReport) -> list[tuple[str, float, str]]:
    """(name, decoded bytes a second, colour) of what each part allows, and what was reached."""
    cold = [m.rate for m in report.of("disk") if m.state != "warm" and not m.from_memory]
    found = [("disk x ratio, GB/s", max(cold, default=0.0) * report.ratio, _BLUE)]
    found.append(("decode, GB/s", max((m.rate for m in report.of("decode")), default=0.0), _BLUE))
    found.append(("transfer, GB/s", max((m.rate for m in report.of("transfer")), default=0.0), _BLUE))
    for state in ("cold", "warm"):
        rates = [m.rate for m in report.of("pipeline") if m.state == state]
        found.append((f"pipeline {state}, GB/s", max(rates, default=0.0), _TEAL))
    found.append(("stock way, GB/s", max((m.rate for m in report.of("stock")), default=0.0), _ORANGE))
    return [entry for entry in found if entry[1] > 0]


def _draw_limits(report: BenchReport, axes: Any) -> None:
    rows = _limits(report)[::-1]
    # A bus of 50 GB/s would press all others into the axis: it is cut off and its number told.
    others = [value for name, value, _ in rows if not name.startswith("transfer")]
    most = 1.6 * max([*others, report.need.total if report.need else 0.0]) or math.inf
    names = [name.removesuffix(", GB/s") for name, _, _ in rows]
    axes.barh(
        names, [min(value, most) / 1e9 for _, value, _ in rows], color=[colour for *_, colour in rows], height=0.6
    )
    for place, (_, value, _) in enumerate(rows):
        end = (min(value, most) / 1e9, place)
        text = rate(value) if value <= most else f"{rate(value)} \u2192"
        axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", bbox=_UNDERLAY, zorder=3)
    if report.need is not None:
        axes.axvline(report.need.total / 1e9, color=_ORANGE, linestyle="--", linewidth=1.5)
        axes.annotate(
            f"needed {rate(report.need.total)}",
            (report.need.total / 1e9, 1.0),
            (4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=_ORANGE,
        )
    axes.set_xlim(0, 1.15 * min(most, max(value for _, value, _ in rows)) / 1e9)
    if report.need is not None:
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.25 * report.need.total / 1e9))
    axes.set_xlabel("GB/s of decoded tensors")
    axes.tick_params(axis="y", length=0)


def _draw_disk(report: BenchReport, axes: Any) -> None:
    found = [m for m in report.of("disk") if m.state != "warm" and m.settings.get("pattern")]
    groups: dict[str, dict[str, Measurement]] = {}
    for m in found:
        kind = "random" if m.settings["pattern"] == "random" else "seq"
        label = f"{kind}\n{m.settings['block'] / 2**20:.3g} MiB\nx{m.settings['depth']}"
        groups.setdefault(label, {})[m.settings["way"]] = m
    for offset, way, colour in ((-0.2, "buffered", _GREY), (0.2, "O_DIRECT", _BLUE)):
        heights = [group[way].rate / 1e9 if way in group else 0.0 for group in groups.values()]
        if any(heights):
            bars = axes.bar([i + offset for i in range(len(groups))], heights, 0.38, color=colour, label=way)
            for bar, group in zip(bars, groups.values(), strict=True):
                if way in group and group[way].from_memory:
                    bar.set_hatch("///")
                    bar.set_edgecolor("white")
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("GB/s")
    axes.set_ylim(0, 1.25 * max(m.rate for m in found) / 1e9)
    axes.legend(frameon=False, ncols=2, loc="upper left")
    if any(m.from_memory for m in found):
        axes.set_xlabel("hatched: served from memory")


def _draw_decode(report: BenchReport, axes: Any) -> None:
    rows = sorted(report.of("decode"), key=lambda m: int(m.settings["threads"]))
    counts = [int(m.settings["threads"]) for m in rows]
    axes.plot(counts, [m.limit / 1e9 for m in rows], color=_GREY, linestyle=":", label="one thread x threads")
    axes.plot(counts, [m.rate / 1e9 for m in rows], color=_BLUE, marker="o", label="frames in memory")
    warm: dict[int, float] = {}
    for m in report.of("pipeline"):
        if m.state == "warm" and m.settings.get("device") != "cuda":
            warm[m.settings["threads"]] = max(warm.get(m.settings["threads"], 0.0), m.rate)
    if warm:
        places = sorted(warm)
        axes.plot(places, [warm[n] / 1e9 for n in places], color=_TEAL, marker="s", label="pipeline, pages in memory")
    axes.set_xticks(counts)
    axes.set_xlabel("decode threads")
    axes.set_ylabel("GB/s of decoded tensors")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _draw_ways(report: BenchReport, axes: Any) -> None:
    rows: dict[str, dict[str, float]] = {}
    for m in [*report.of("pipeline"), *report.of("stock")]:
        if m.state in ("cold", "warm"):
            name = m.name if m.part == "stock" else f"hsloader {m.name}"
            rows.setdefault(name, {})[m.state] = m.rate
    names = list(rows)[::-1]
    for offset, state, colour in ((0.2, "cold", _BLUE), (-0.2, "warm", _TEAL)):
        widths = [rows[name].get(state, 0.0) / 1e9 for name in names]
        if any(widths):
            axes.barh([i + offset for i in range(len(names))], widths, 0.38, color=colour, label=state)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GB/s of decoded tensors")
    axes.legend(frameon=False, loc="lower right")


_PLOTS: Sequence[tuple[str, Callable[[BenchReport], object], Callable[[BenchReport, Any], None]]] = (
    ("What each part allows, and what was reached", _limits, _draw_limits),
    ("The disk, pages not in memory", lambda r: [m for m in r.of("disk") if m.state != "warm"], _draw_disk),
    ("Decoding by threads", lambda report: report.of("decode"), _draw_decode),
    (
        "The pipeline and the stock way",
        lambda r: [m for m in [*r.of("pipeline"), *r.of("stock")] if m.state in ("cold", "warm")],
        _draw_ways,
    ),
)

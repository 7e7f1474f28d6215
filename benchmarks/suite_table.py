"""The suite's results as a Markdown table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEADINGS = (
    "contender",
    "bf16 as",
    "cold GB/s",
    "cold, after the first batch",
    "warm GB/s",
    "first batch, cold",
    "CPU s/GB, warm",
    "memory",
    "on disk",
    "convert GB/s",
)
HEAD = f"| {' | '.join(HEADINGS)} |"


def table(results: dict[str, Any]) -> str:
    """One table a set of samples, the fastest cold reader first."""
    parts = []
    for kind, held in results["sets"].items():
        disk = max(held["disk"].values(), default=0.0)
        parts.append(
            f"**{kind}**: {held['samples']} samples, about {held['tokens']} tokens of hidden size {held['hidden']}, "
            f"four layers, {held['bytes'] / 1e9:.2f} GB of tensors; raw disk {disk / 1e9:.2f} GB/s\n\n{HEAD}\n"
            + "|---" * len(HEADINGS)
            + "|"
        )
        rows = sorted(held["contenders"].values(), key=lambda row: -row.get("cold", {}).get("rate", 0.0))
        parts.append("\n".join(_row(row) for row in rows) + "\n")
    return "\n".join(parts)


def _row(row: dict[str, Any]) -> str:
    if "missing" in row or "failed" in row:
        return (
            f"| {row['name']} | {row['holds']} | {row.get('missing') or 'failed: ' + row['failed'].splitlines()[-1]} |"
        )
    cold, warm = row["cold"], row["warm"]
    cells = (
        row["name"],
        row["holds"],
        f"{cold['rate'] / 1e9:.2f}",
        f"{cold['after_first'] / 1e9:.2f}",
        f"{warm['rate'] / 1e9:.2f}",
        f"{cold['first']:.2f} s",
        f"{warm['cpu_a_gb']:.2f}",
        f"{max(cold['memory'], warm['memory']) / 1e6:.0f} MB",
        f"{row['stored'] / 1e9:.2f} GB",
        f"{row['conversion_rate'] / 1e9:.2f}" if "conversion_rate" in row else "(as it is)",
    )
    return "| " + " | ".join(cells) + " |"


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of GB/s, cold and warm, one panel a set."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "hsloader"}
    with rc_context(style):
        sets = results["sets"]
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        panels = figure.subplots(1, len(sets), squeeze=False)[0]
        for axes, (kind, held) in zip(panels, sets.items(), strict=True):
            rows = [row for row in held["contenders"].values() if "cold" in row]
            rows.sort(key=lambda row: row["cold"]["rate"])
            places = range(len(rows))
            for offset, state, colour in ((0.2, "cold", "#2563eb"), (-0.2, "warm", "#0d9488")):
                widths = [row[state]["rate"] / 1e9 for row in rows]
                axes.barh([place + offset for place in places], widths, 0.38, color=colour, label=f"{state} page cache")
                for place, width in zip(places, widths, strict=True):
                    axes.annotate(
                        f"{width:.2f}",
                        (width, place + offset),
                        (3, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
            axes.axvline(max(held["disk"].values(), default=0) / 1e9, color="#ea580c", linestyle="--", label="raw disk")
            axes.set_yticks(list(places), [row["name"] for row in rows])
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel("GB/s of decoded tensors in the consumer")
            axes.set_title(f"{kind}: {held['tokens']} tokens of {held['hidden']} values", loc="left")
            axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

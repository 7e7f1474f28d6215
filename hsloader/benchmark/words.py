"""The lines of a report as text cells, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsloader.benchmark.results import BenchReport, Measurement, Part

__all__ = ["HEADINGS", "PART_TITLES", "cells", "machine_text", "rate"]

PART_TITLES: Mapping[Part, str] = {
    "disk": "Disk, bytes of files",
    "decode": "Check and decode frames in memory, decoded bytes",
    "pipeline": "Pipeline: dataset to ring, decoded bytes",
    "transfer": "Copies to GPU memory",
    "stock": "The stock way: torch.load in a DataLoader, bytes of tensors",
}

HEADINGS: Sequence[str] = ("", "pages", "GB/s", "of limit", "first batch", "CPU s/GB", "")


def rate(bytes_a_second: float) -> str:
    """GB/s with three digits, without the unit."""
    value = bytes_a_second / 1e9
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def cells(item: Measurement) -> list[str]:
    """A measurement as the cells of ``HEADINGS``."""
    return [
        item.name,
        item.state,
        rate(item.rate),
        "" if item.share is None else f"{100 * item.share:.0f} %",
        "" if item.first_seconds is None else f"{item.first_seconds:.2f} s",
        "" if item.cpu_seconds_a_gb is None else f"{item.cpu_seconds_a_gb:.2f}",
        item.note,
    ]


def machine_text(report: BenchReport) -> str:
    """The machine in one line."""
    machine: Mapping[str, Any] = report.machine
    parts = [
        str(machine.get("processor", "")),
        f"{machine.get('cores')} cores",
        f"{machine.get('memory', 0) / 2**30:.0f} GiB of memory",
        str(machine.get("file_system", "")),
        f"Linux {machine.get('kernel', '')}",
        f"hsloader {machine.get('hsloader', '')}",
    ]
    return ", ".join(part for part in parts if part)

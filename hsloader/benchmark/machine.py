"""What the benchmark ran on, as a report says it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import hsloader
from hsloader.reader.limits import cpu_share, memory_available, memory_total
from hsloader.reader.modes import file_system

__all__ = ["describe_machine"]


def describe_machine(folder: Path) -> dict[str, Any]:
    """Processor, cores, memory, file system, versions; plain values."""
    kind, local = file_system(folder)
    return {
        "processor": _processor(),
        "cores": cpu_share(1),
        "memory": memory_total(),
        "memory_available": memory_available(),
        "file_system": kind,
        "local": local,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "hsloader": hsloader.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()

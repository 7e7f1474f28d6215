"""Python frames of busy threads from py-spy, where that is installed; doctor works without."""

from __future__ import annotations

import json
import shutil
import subprocess

__all__ = ["frames_of"]

_SHOWN = 3  # innermost frames


def frames_of(pid: int, patience: float = 3.0) -> tuple[dict[int, tuple[str, ...]], str]:
    """The innermost Python frames of each thread of a process by thread id, and why there are none.

    py-spy is started only if it is on the PATH; it needs the right to trace the process and pauses it for
    milliseconds.
    """
    program = shutil.which("py-spy")
    if program is None:
        return {}, "Python lines of busy threads are not shown: py-spy is not installed (pip install py-spy)"
    try:
        found = subprocess.run(
            [program, "dump", "--json", "--pid", str(pid)], capture_output=True, timeout=patience, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"Python lines of busy threads are not shown: py-spy failed ({error})"
    if found.returncode:
        last = found.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {}, f"Python lines of busy threads are not shown: py-spy says {''.join(last) or found.returncode}"
    try:
        return parse_dump(found.stdout), ""
    except (ValueError, KeyError, TypeError) as error:
        return {}, f"Python lines of busy threads are not shown: py-spy's output is not understood ({error!r})"


def parse_dump(text: bytes) -> dict[int, tuple[str, ...]]:
    """``py-spy dump --json`` as frames ``function (file:line)`` by system thread id."""
    frames = {}
    for thread in json.loads(text):
        tid = thread.get("os_thread_id")
        if tid is not None:
            frames[int(tid)] = tuple(
                f"{f['name']} ({f.get('short_filename') or f['filename']}:{f['line']})"
                for f in thread["frames"][:_SHOWN]
            )
    return frames

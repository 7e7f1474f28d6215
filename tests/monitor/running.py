"""Real processes for the tests of doctor: scripts that say when they have reached the state under test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def script(folder: Path, body: str, *, ready: int = 1, patience: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``body`` in a fresh Python until the block ends.

    The block begins when the script, or its children, have called ``ready()`` so many times.  Afterwards the whole
    session is killed, orphans included.
    """
    file = folder / "script.py"
    file.write_text("import os, sys, time\ndef ready(): os.write(1, b'+')\n" + textwrap.dedent(body))
    process = subprocess.Popen(
        [sys.executable, str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    try:
        os.set_blocking(process.stdout.fileno(), False)
        seen, deadline = 0, time.monotonic() + patience
        while seen < ready:
            assert process.poll() is None, "the script ended before it was ready"
            assert time.monotonic() < deadline, "the script was not ready in time"
            seen += len(process.stdout.read(ready) or b"")
            time.sleep(0.01)
        yield process
    finally:
        _kill_session(process.pid)
        process.wait()
        process.stdout.close()


def _kill_session(pid: int) -> None:
    # Workers of a killed trainer notice only after seconds, and a deadlocked one never does.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)

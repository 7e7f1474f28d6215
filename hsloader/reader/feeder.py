"""The feeder process: raises its limits, attaches the ring, serves until its trainer hangs up or ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from hsloader._launch import Parent
from hsloader.reader.counters import FeederCounter
from hsloader.reader.engine import Engine, EngineSettings
from hsloader.reader.helpers import Helpers
from hsloader.reader.ring import Ring
from hsloader.reader.serving import serve

__all__ = ["main"]

_NICE = 5  # where cores are short, a thread that launches kernels gets three times what a decoder gets


def main(parent: Parent) -> None:
    """Entry of the process; see ``launch``. Descriptors: ``ring``, and ``stderr`` where the trainer has one."""
    begun = time.monotonic_ns()
    _be_a_feeder()
    ring = Ring.attach(parent.fds["ring"])
    ring.feeder[FeederCounter.STARTED_AT] = begun
    settings = EngineSettings.of(parent.args)
    helpers = Helpers(ring, parent, settings)  # forks, so before any thread
    engine = Engine(ring, settings, parent.channel)
    engine.start()
    stderr = parent.fds.get("stderr")

    def say(line: str) -> None:
        if stderr is not None:
            with contextlib.suppress(OSError):
                os.write(stderr, line.encode())

    serve(engine, parent.channel, helpers, parent_fd=parent.pidfd, parent_gone=parent.gone, say=say)
    helpers.end()
    # Threads may hang in a read of a dead server; nothing of theirs is worth waiting for.
    os._exit(0)


def _be_a_feeder() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("hsl-feeder")  # what top and ps show
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError, ValueError):
        # Two or three descriptors a shard, 512 shards: more than the usual soft limit of 1,024.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

"""A feeder whose main thread ends while another thread stays, as one does that hangs in a read of a dead server."""

from __future__ import annotations

import ctypes
import platform
import threading
import time

from hsloader._launch import Parent

_EXIT = {"x86_64": 60, "aarch64": 93}


def main(parent: Parent) -> None:
    """Leave a thread behind."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    ctypes.CDLL(None).syscall(_EXIT[platform.machine()], 0)

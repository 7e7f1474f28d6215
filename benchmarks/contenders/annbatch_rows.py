"""annbatch: not run. It reads fixed-width rows of AnnData files, needs Python 3.12, knows no samples of many rows."""

from __future__ import annotations

NAME = "annbatch"
HOLDS = ""
MISSING = "needs Python 3.12, where no torch wheel could be had, and reads fixed-width rows, not samples of many rows"

"""Where the inputs shared beside the checkout lie: real samples, golden batches, input cases."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

needs_shared = pytest.mark.skipif(
    not (SHARED / "cases").is_dir(), reason=f"the shared inputs (cases, golden, data) are not at {SHARED}"
)

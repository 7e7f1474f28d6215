"""Print the N-th command of README.md: the text of its N-th ```bash block.

``.ci/run`` runs what this prints, so that the README cannot promise what CI does not do.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def commands(markdown: str) -> list[str]:
    """The texts of the ```bash blocks, in order."""
    return [block.strip() for block in re.findall(r"^```bash\n(.*?)^```$", markdown, flags=re.S | re.M)]


if __name__ == "__main__":
    readme = Path(__file__).resolve().parents[1] / "README.md"
    print(commands(readme.read_text())[int(sys.argv[1]) - 1])

"""What the README and docs/ say is true: their commands and Python snippets are run, their links lead somewhere.

Each page runs in a folder of its own that holds ``dump`` (four small samples as speculators 0.4 writes them) and
``data.hs`` (their dataset). Lines ``$ hsloader ...`` of its ``console`` blocks and its ``python`` blocks run in the
order of the page; the Python blocks of a page share their names.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import hsloader
from hsloader.cli.demo_data import DemoShape, write_samples

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.S | re.M)


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _blocks(page: Path) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in _BLOCK.finditer(page.read_text())]


def _commands(block: str) -> list[list[str]]:
    lines = [line[2:] for line in block.splitlines() if line.startswith("$ hsloader ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def _runs(page: Path) -> bool:
    return any(kind == "python" or (kind == "console" and _commands(text)) for kind, text in _blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if _runs(page)], ids=_id)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump").mkdir()
    write_samples(tmp_path / "dump", DemoShape(samples=4, mean_length=60, hidden_size=256, decoder_layers=8))
    hsloader.convert(tmp_path / "dump", tmp_path / "data.hs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text in _blocks(page):
        if kind == "python":
            exec(compile(text, _id(page), "exec"), names)
        elif kind == "console":
            for command in _commands(text):
                done = subprocess.run(
                    [sys.executable, "-m", "hsloader", *command],
                    capture_output=True,
                    text=True,
                    check=False,
                    env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
                )
                assert done.returncode == 0, f"hsloader {shlex.join(command)}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{_id(page)} links to {target}, which is not there"


def _texts_of_the_code() -> list[str]:
    """Every string of the package, with a mark where a value is put in."""
    texts = []
    for path in sorted((ROOT / "hsloader").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_troubleshooting_is_keyed_by_messages_that_exist() -> None:
    """Headings are messages as printed, with ... where they differ from case to case."""
    texts = _texts_of_the_code()
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, flags=re.M)
    assert headings
    for heading in headings:
        pieces = [piece.strip() for piece in heading.split("...") if piece.strip()]
        assert pieces, heading
        for piece in pieces:
            assert any(piece in text for text in texts), f"no message of hsloader contains {piece!r}"


def test_the_readme_has_its_two_commands() -> None:
    done = [
        subprocess.run(
            [sys.executable, ROOT / "tools" / "readme_command.py", str(n)], capture_output=True, text=True, check=True
        ).stdout.strip()
        for n in (1, 2)
    ]
    assert done == [
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt . && .venv/bin/hsloader demo",
        ".venv/bin/pip install -c constraints.txt '.[test]' && .venv/bin/python -m pytest",
    ]

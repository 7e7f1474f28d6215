"""The public surface: which names there are, what importing them costs, and that the rooms keep their places."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hsloader

PACKAGE = Path(hsloader.__file__).parent

# The public surface. Whoever adds a name adds it here, in docs/python.md and in CHANGELOG.md.
PUBLIC = [
    "ConversionError",
    "DamageError",
    "DataLoader",
    "DatasetError",
    "FeederError",
    "HiddenStateDataset",
    "HsloaderError",
    "IncompatibleError",
    "LoaderError",
    "ReadOptions",
    "SettingsChangedError",
    "SourceError",
    "StateError",
    "StoreBusyError",
    "UniformNoise",
    "Writer",
    "bench",
    "convert",
    "export",
    "inspect",
    "open_dataset",
    "verify",
]

# A room may import those that stand after it, never those before it (CONTRIBUTING.md draws the picture).
ROOMS = [
    "cli",
    "benchmark",
    "torch_dataset",
    "loader",
    "loading",
    "device",
    "batches",
    "order",
    "reader",
    "conversion",
    "formats",
    "store",
    "remote",
    "monitor",
    "errors",
]

# Rooms that the reading process imports: numpy and bits only, ready in a blink.
TORCH_FREE = {"order", "reader", "store", "remote", "monitor", "errors"}


def _modules(room: str) -> list[Path]:
    single = PACKAGE / f"{room}.py"
    return [single] if single.exists() else sorted((PACKAGE / room).rglob("*.py"))


def _imports(path: Path, *, lazy: bool) -> set[str]:
    """The absolute module names that ``path`` imports: at module level, or anywhere if ``lazy``."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    in_functions = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in typing_only or (id(node) in in_functions and not lazy):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the absolute name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def test_the_public_names_are_the_pinned_ones() -> None:
    assert hsloader.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC
    assert sorted(hsloader._HOMES) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_says_what_it_is(name: str) -> None:
    value = getattr(hsloader, name)
    assert (value.__doc__ or "").strip(), f"hsloader.{name} has no docstring"


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'opendataset'; it has .*open_dataset"):
        _ = hsloader.opendataset  # type: ignore[attr-defined]


def test_no_room_shadows_a_public_name() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not rooms & set(PUBLIC), "importing that room would replace the public name by a module"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hsloader", ("torch", "zarr", "numpy", "typer", "rich")),
        ("import hsloader.store.dtypes", ("torch", "zarr")),
        ("import hsloader.cli.main", ("torch", "zarr", "numpy")),
    ],
)
def test_importing_is_cheap(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(*sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], f"`{statement}` imports {done.stdout.strip()}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    below = set(ROOMS[ROOMS.index(room) :])
    for path in _modules(room):
        for name in _imports(path, lazy=True):
            parts = name.split(".")
            if parts[0] == "hsloader" and len(parts) > 1 and parts[1] in ROOMS:
                assert parts[1] in below, f"{path}: {room} imports {name}, which stands above it"


@pytest.mark.parametrize("room", sorted(TORCH_FREE))
def test_the_reading_side_imports_no_torch(room: str) -> None:
    for path in _modules(room):
        heavy = {name for name in _imports(path, lazy=False) if name.split(".")[0] in ("torch", "zarr")}
        if path.name == "bfloat16.py":  # zarr's data type is registered there, and loaded only beside zarr
            heavy = {name for name in heavy if name.split(".")[0] == "torch"}
        assert not heavy, f"{path} imports {', '.join(heavy)} at module level"


def test_every_module_says_what_it_is_for() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not begin with a docstring"

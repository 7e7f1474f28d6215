"""The packed root copy of the samples tables: one array for the first m segments, so that opening reads one file.

It is derived and immutable: a longer one is written beside it, the manifest names the new one, the old one goes.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np

from hsloader.errors import DamageError
from hsloader.store.files import fsync_directory, read_limited, write_new
from hsloader.store.manifest import BYTES_LIMIT, Manifest, PackedTable
from hsloader.store.samples import COLUMNS, Table, check_table
from hsloader.store.stored_segment import Segment
from hsloader.store.zarr_json import chunk_name, group_document, json_bytes, plain_document

__all__ = ["read_tables", "remove_stale", "write_packed"]

_DIRECTORY = "packed"


def read_tables(root: Path, manifest: Manifest) -> Table:
    """The samples tables of all segments, joined: int64 ``[columns, samples]``.

    Read from the packed copy as far as there is one, from the segments after it. Raises ``DamageError``.
    """
    tables: list[Table] = []
    packed = manifest.packed
    if packed is not None:
        tables.append(_read_packed(root, manifest, packed))
    loose = manifest.segments[packed.segments if packed is not None else 0 :]
    tables.extend(Segment(root, entry).table() for entry in loose)
    if not tables:
        return np.empty((len(COLUMNS), 0), np.int64)
    return tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)


def write_packed(root: Path, manifest: Manifest, scratch: Path) -> PackedTable:
    """Write the packed copy of all listed segments (the manifest's lock is held) and describe it."""
    table = np.ascontiguousarray(read_tables(root, manifest))
    data = table.tobytes()
    digest = hashlib.sha256(data).hexdigest()
    name = f"{len(manifest.segments):06d}-{digest[:16]}"
    parent = root / _DIRECTORY
    if not parent.is_dir():
        parent.mkdir()
        write_new(parent / "zarr.json", json_bytes(group_document()))
    made = scratch / f"packed-{name}"
    for stale in (made, parent / name):  # left by a killed process, since we hold the lock and nobody lists it
        if stale.exists():
            shutil.rmtree(stale)
    made.mkdir()
    write_new(made / chunk_name(0, 2), data)
    write_new(made / "zarr.json", json_bytes(plain_document("int64", table.shape)))
    fsync_directory(made)
    made.rename(parent / name)
    fsync_directory(parent)
    fsync_directory(root)
    return PackedTable(
        path=f"{_DIRECTORY}/{name}", segments=len(manifest.segments), samples=table.shape[1], digest=digest
    )


def remove_stale(root: Path, manifest: Manifest) -> list[Path]:
    """Delete the packed copies that the manifest (whose lock is held) does not name."""
    parent = root / _DIRECTORY
    keep = None if manifest.packed is None else root / manifest.packed.path
    stale = [path for path in parent.iterdir() if path.is_dir() and path != keep] if parent.is_dir() else []
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def _read_packed(root: Path, manifest: Manifest, packed: PackedTable) -> Table:
    path = root / packed.path / chunk_name(0, 2)
    data = read_limited(path, BYTES_LIMIT, "the packed samples table", size=len(COLUMNS) * packed.samples * 8)
    found = hashlib.sha256(data).hexdigest()
    if found != packed.digest:
        raise DamageError(f"{path}: the manifest says sha256 {packed.digest}, the file has {found}; restore it")
    table = np.frombuffer(data, "<i8").reshape(len(COLUMNS), packed.samples)
    start = 0
    for entry in manifest.segments[: packed.segments]:
        check_table(table[:, start : start + entry.samples], entry.rows, entry.tokens, path)
        start += entry.samples
    return table

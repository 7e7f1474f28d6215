"""Forgeries: changed bytes under digests that fit them again. Refused by name or read as data, in bounded memory.

Digests keep out accidents. What a forger can still do is lie about numbers, so each of them is checked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

import hsloader
from hsloader.errors import DamageError, HsloaderError
from hsloader.store.manifest import FORMAT, canonical
from tests.store.making import random_sample, write_dataset

SEGMENT = "segments/000000"
LENGTHS = (60, 3, 30, 1)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "d"
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, length) for length in LENGTHS]
    write_dataset(path, samples, typical_length=10, shard_bytes=60_000)
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(path: Path) -> Any:
    return json.loads(path.read_bytes())


def sign(path: Path) -> None:
    """Make every size, checksum and digest above the segment's files fit what lies there now."""
    segment, manifest = path / SEGMENT, load(path / "manifest.json")
    document = load(segment / "zarr.json")
    meta = document["attributes"]["hsloader"]
    for name, table in meta["tables"].items():
        data = next((segment / name).glob("c.*")).read_bytes()
        table.update(digest=sha256(data), size=len(data), zarr_json=sha256((segment / name / "zarr.json").read_bytes()))
    for name, array in meta["arrays"].items():
        for shard, file in zip(array["shards"], sorted((segment / name).glob("c.*")), strict=True):
            shard["size"] = file.stat().st_size
            with file.open("rb") as opened:
                opened.seek(-4, os.SEEK_END)
                shard["index_crc32c"] = int.from_bytes(opened.read(), "little")
    (segment / "zarr.json").write_text(json.dumps(document))
    seal(path, manifest)


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with digests and fingerprints that fit."""
    entry = manifest["segments"][0]
    entry["digest"] = sha256((path / SEGMENT / "zarr.json").read_bytes())
    meta = load(path / SEGMENT / "zarr.json")["attributes"]["hsloader"]
    entry.update({key: meta[key] for key in ("samples", "tokens", "rows", "raw_bytes", "stored_bytes") if key in meta})
    first = sha256(canonical({"format": FORMAT, "fields": manifest["fields"]}))
    manifest["fingerprint"] = sha256(bytes.fromhex(first) + canonical(entry))
    del manifest["digest"]
    manifest["digest"] = sha256(canonical(manifest))
    (path / "manifest.json").write_text(json.dumps(manifest))


def forged(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the segment's metadata and sign it."""
    document = load(path / SEGMENT / "zarr.json")
    change(document["attributes"]["hsloader"])
    (path / SEGMENT / "zarr.json").write_text(json.dumps(document))
    seal(path, load(path / "manifest.json"))


def set_table(path: Path, column: int, sample: int, value: int) -> None:
    file = path / SEGMENT / "samples/c.0.0"
    table = np.frombuffer(file.read_bytes(), "<i8").reshape(6, -1).copy()
    table[column, sample] = value
    file.write_bytes(table.tobytes())
    sign(path)


def set_extras(path: Path, data: bytes) -> None:
    (path / SEGMENT / "extras/c.0").write_bytes(data)
    ends = np.full(len(LENGTHS), len(data), "<i8")
    (path / SEGMENT / "extras_end/c.0").write_bytes(ends.tobytes())
    sign(path)


def set_index(path: Path, size: int, offset: int, length: int) -> None:
    """Stretch the first shard to ``size`` bytes (sparse) and let its first chunk be anywhere."""
    file = path / SEGMENT / "hidden_states/c.0.0.0"
    slots = load(path / SEGMENT / "zarr.json")["attributes"]["hsloader"]["arrays"]["hidden_states"]["shard_chunks"]
    data = file.read_bytes()
    index = np.frombuffer(data[-16 * slots - 4 : -4], "<u8").reshape(-1, 2).copy()
    index[0] = offset, length
    body = len(data) - 16 * slots - 4
    with file.open("r+b") as opened:
        opened.truncate(body)
        opened.seek(size)
        opened.write(index.tobytes() + struct.pack("<I", crc32c(index.tobytes())))
    sign(path)


def set_hidden(key: str, value: Any) -> Callable[[Path], None]:
    return lambda path: forged(path, lambda meta: meta["arrays"]["hidden_states"].__setitem__(key, value))


def set_field(key: str, value: Any) -> Callable[[Path], None]:
    return lambda path: forged(path, lambda meta: meta["fields"][0].__setitem__(key, value))


def set_ids_chunk(path: Path) -> None:
    def change(meta: dict[str, Any]) -> None:
        meta["arrays"]["input_ids"].update(chunk_rows=(1 << 29) - 1)

    forged(path, change)


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a first row that wraps round": (lambda p: set_table(p, 0, 3, 2**63 - 1), "contradicts"),
    "a length that wraps round": (lambda p: set_table(p, 1, 3, 2**63 - 1), "contradicts"),
    "extras that are a list": (lambda p: set_extras(p, b"[1]"), "expected a JSON object"),
    "extras that are no JSON": (lambda p: set_extras(p, b'{"a": NaN}'), "NaN"),
    "extras too deep": (lambda p: set_extras(p, b'{"a":' * 50_000), "too deep"),
    "another shape": (set_field("shape", [3, 32]), "manifest says bfloat16 .3, 64., the segment has"),
    "another type": (set_field("dtype", "int16"), "the segment has"),
    "a chunk above all": (set_ids_chunk, "chunk_rows"),
    "a chunk of no rows": (set_hidden("chunk_rows", 0), "chunk_rows"),
    "slots without end": (set_hidden("shard_chunks", 1 << 40), "shard_chunks"),
    "rows without end": (lambda p: forged(p, lambda meta: meta.update(rows=1 << 47)), "shards"),
    "a frame of a terabyte": (lambda p: set_index(p, 1 << 41, 1 << 39, 1 << 40), "a frame of 1,099,511,627,776 bytes"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_lies_are_refused_where_they_are_touched(tmp_path: Path, sound: Path, kind: str) -> None:
    shutil.copytree(sound, tmp_path / "d")
    change, words = FORGERIES[kind]
    change(tmp_path / "d")
    if kind != "a frame of a terabyte":  # its gap alone takes minutes to read
        assert not hsloader.verify(tmp_path / "d").ok

    def read() -> None:
        with hsloader.open_dataset(tmp_path / "d") as ds:
            for i in range(len(ds)):
                for use in (ds.extras, *(lambda i, f=f: ds.read(i, f) for f in ds.fields)):
                    use(i)

    with pytest.raises(DamageError, match=words):
        read()


def test_a_signed_dataset_is_read_when_nothing_was_changed(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "d")
    sign(tmp_path / "d")
    assert hsloader.verify(tmp_path / "d").ok


def test_a_gap_of_hundreds_of_megabytes_is_read_in_pieces(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "d")
    set_index(tmp_path / "d", 1 << 29, (1 << 29) - 100, 100)
    code = (
        "import resource, sys, hsloader; hsloader.verify(sys.argv[2], threads=1)\n"
        "most = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + int(sys.argv[3])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "print([p.kind for p in hsloader.verify(sys.argv[1], threads=1).problems])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d"), str(sound), str(200 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'chunk'" in done.stdout


def test_random_forgeries_are_refused_or_read_as_data(tmp_path: Path, sound: Path) -> None:
    """Bytes of any file changed, everything above signed again: no other error than ours, no verify that fails."""
    rng = random.Random(0)
    files = sorted(p.relative_to(sound) for p in (sound / SEGMENT).rglob("*") if p.is_file())
    for number in range(40):
        path = tmp_path / str(number)
        shutil.copytree(sound, path)
        victim = path / files[number % len(files)]
        data = bytearray(victim.read_bytes())
        for _ in range(rng.choice((1, 3, 20))):
            place = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[place] ^= 1 << rng.randrange(8)
            else:
                word = struct.pack("<Q", rng.choice((0, 1, 255, 2**31, 2**40, 2**63 - 1, 2**64 - 1)))
                data[place - place % 8 : place - place % 8 + 8] = word
        victim.write_bytes(data)
        # Where the metadata are metadata no more the old digests stay, and do not fit.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
            sign(path)
        assert hsloader.verify(path).path == str(path)
        try:
            with hsloader.open_dataset(path) as ds:
                for i in range(len(ds)):
                    for use in (ds.name, ds.extras, *(lambda i, f=f: ds.read(i, f) for f in ds.fields)):
                        try:
                            use(i)
                        except HsloaderError:
                            continue
        except HsloaderError:
            continue
        finally:
            shutil.rmtree(path)

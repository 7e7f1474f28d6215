"""The manifest: bytes, fingerprints, and refusal of everything that no hsloader wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hsloader.errors import DamageError, DatasetError, IncompatibleError
from hsloader.store.fields import Field
from hsloader.store.manifest import Manifest, PackedTable, Provenance, SegmentEntry, canonical, read_manifest
from tests.store.making import FIELDS


def _entry(number: int, **changes: Any) -> SegmentEntry:
    values = {"samples": 3, "tokens": 40, "rows": 64, "raw_bytes": 4000, "stored_bytes": 3000, "digest": "ab" * 32}
    return SegmentEntry(path=f"segments/{number:06d}", **{**values, **changes})


MANIFEST = Manifest(
    fields=FIELDS,
    provenance=Provenance(model="m", layer_ids=(2, 18), norm_state="pre", notes=("checked",)),
    segments=(_entry(0), _entry(2)),
    packed=PackedTable(path="packed/000001-abcdef", segments=1, samples=3, digest="cd" * 32),
)


def _signed(document: dict[str, Any]) -> bytes:
    """The document with a digest that fits it, as a forger would."""
    body = {key: value for key, value in document.items() if key != "digest"}
    return json.dumps({**body, "digest": hashlib.sha256(canonical(body)).hexdigest()}).encode()


def _changed(path: tuple[str | int, ...], value: Any) -> bytes:
    document = json.loads(MANIFEST.to_bytes())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return _signed(document)


def test_a_manifest_comes_back_and_its_bytes_are_stable() -> None:
    data = MANIFEST.to_bytes()
    assert Manifest.parse(data, "m") == MANIFEST
    assert Manifest.parse(data, "m").to_bytes() == data


def test_a_grown_dataset_proves_its_first_segments() -> None:
    grown = MANIFEST.grown([_entry(3)])
    assert grown.fingerprints(2)[-1] == MANIFEST.fingerprint
    assert grown.fingerprints()[:3] == MANIFEST.fingerprints()
    assert grown.first(2).fingerprint == MANIFEST.fingerprint
    assert grown.fingerprint != MANIFEST.fingerprint
    assert MANIFEST.first(0).packed is None


def test_fingerprints_follow_order_fields_and_entries_but_not_provenance() -> None:
    others = [
        Manifest(fields=FIELDS[:1], segments=MANIFEST.segments),
        Manifest(fields=FIELDS, segments=MANIFEST.segments[::-1]),
        Manifest(fields=FIELDS, segments=(_entry(0, tokens=41), _entry(2))),
    ]
    assert len({MANIFEST.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert Manifest(fields=FIELDS, segments=MANIFEST.segments).fingerprint == MANIFEST.fingerprint


def test_unknown_keys_are_ignored() -> None:
    assert Manifest.parse(_changed(("newer",), {"x": 1}), "m") == MANIFEST


def test_another_version_and_unknown_features_are_refused_with_both_values() -> None:
    with pytest.raises(IncompatibleError, match="format 2, this hsloader reads format 1"):
        Manifest.parse(_changed(("format",), 2), "m")
    with pytest.raises(IncompatibleError, match="uses flux, warp"):
        Manifest.parse(_changed(("features",), ["warp", "flux"]), "m")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("segments", 0, "samples"), -1),
        (("segments", 0, "samples"), 0),
        (("segments", 0, "samples"), 2**62),
        (("segments", 0, "samples"), 10**400),
        (("segments", 0, "samples"), "3"),
        (("segments", 0, "samples"), 3.0),
        (("segments", 0, "samples"), True),
        (("segments", 0, "samples"), None),
        (("segments", 0, "tokens"), 2),
        (("segments", 0, "rows"), 39),
        (("segments", 0, "stored_bytes"), 2**63),
        (("segments", 0, "digest"), "xyz"),
        (("segments", 0, "path"), "../../etc/passwd"),
        (("segments", 0, "path"), "segments/../../000000"),
        (("segments", 0, "path"), "segments/0"),
        (("segments", 0, "path"), "segments/000002"),
        (("segments",), {}),
        (("segments",), [[]]),
        (("fields",), []),
        (("fields", 0, "dtype"), "complex64"),
        (("fields", 0, "shape"), [0]),
        (("fields", 0, "shape"), [2**31, 2**31]),
        (("fields", 0, "shape"), [1] * 17),
        (("fields", 0, "name"), "../x"),
        (("fields", 0, "name"), "last_hidden_state"),
        (("fields", 0, "codec"), "rot13"),
        (("provenance", "norm_state"), "between"),
        (("provenance", "layer_ids"), [1, "2"]),
        (("provenance", "hidden_size"), -5),
        (("packed_samples", "segments"), 3),
        (("packed_samples", "samples"), 4),
        (("packed_samples", "path"), "packed/../x"),
        (("fingerprint",), "00" * 32),
    ],
)
def test_each_number_is_checked_even_under_a_right_digest(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(DamageError, match=r"^the-file: "):
        Manifest.parse(_changed(path, value), "the-file")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"format": 1}',
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b'{"format": ' + b"9" * 6000 + b"}",
        b"\xff\xfe{}",
        b"[" * 200_000,
        b'{"format":' * 200_000,
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(DamageError, match=r"^the-file: "):
        Manifest.parse(data, "the-file")


def test_every_flipped_bit_is_noticed() -> None:
    data = bytearray(MANIFEST.to_bytes())
    for position in range(0, len(data), 7):
        data[position] ^= 0x10
        with pytest.raises(DatasetError):
            Manifest.parse(bytes(data), "m")
        data[position] ^= 0x10


def test_a_folder_without_a_manifest_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not an hsloader dataset"):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "nothing")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DamageError, match="not a regular file"):
        read_manifest(tmp_path)


def test_values_of_a_field_are_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="norm_state"):
        Provenance(norm_state="before")
    with pytest.raises(ValueError, match="field name"):
        Field(name="samples", dtype="int8")

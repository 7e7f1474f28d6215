"""Write producers' files back: the same keys, dtypes, shapes and values that the layout's reader took.

torch is imported here, when the first file is written; nothing else in this room needs it.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hsloader.errors import ConversionError
from hsloader.formats.casting import exact_cast
from hsloader.formats.safetensors_file import METADATA
from hsloader.store.dtypes import dtype_of
from hsloader.store.fields import Field
from hsloader.store.samples import check_path_name, sample_key

__all__ = [
    "NO_PLACE",
    "USUAL_FIELDS",
    "WRITABLE",
    "SampleWriter",
    "checked_state",
    "name_file",
    "publish",
    "safetensors_bytes",
    "safetensors_metadata",
    "sample_writer",
]

Array = npt.NDArray[Any]

WRITABLE = (
    "speculators-list",
    "speculators-pair",
    "speculators-arrow",
    "specforge-eagle3",
    "specforge-dspark",
    "specforge-dflash",
)
# What a layout has no place for, of the usual fields; all others go into the file under their own names.
NO_PLACE = {"specforge-dflash": frozenset({"last_hidden_state"})}
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})  # file systems without hard links
_NAME_BYTES = 255  # of a file's name on Linux
USUAL_FIELDS = frozenset({"input_ids", "loss_mask", "hidden_states", "last_hidden_state"})
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


class SampleWriter(Protocol):
    """Writes samples below a folder. A context manager: what the folder needs beside them is written at the end."""

    def __enter__(self) -> SampleWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(
        self, name: str, values: Mapping[str, Array], fields: Mapping[str, Field], extras: Mapping[str, object]
    ) -> str:
        """Write one sample, ``values`` as bits ``[S, *shape]`` of ``fields``; returns its name below the folder."""
        ...


def sample_writer(layout: str, root: Path | str) -> SampleWriter:
    """The writer of a layout below ``root``. ``ValueError`` with the layouts there are."""
    if layout not in WRITABLE:
        raise ValueError(f"layout {layout!r} cannot be written; there are {', '.join(WRITABLE)}")
    if layout == "speculators-arrow":
        from hsloader.formats.arrow_writing import ArrowFolderWriter

        return ArrowFolderWriter(Path(root))
    return _TorchWriter(layout, Path(root))


class _TorchWriter:
    """One torch file a sample."""

    def __init__(self, layout: str, root: Path) -> None:
        self._layout = layout
        self._root = root
        self._written: dict[str, str] = {}  # the files' names and their samples'

    def __enter__(self) -> _TorchWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def write(
        self, name: str, values: Mapping[str, Array], fields: Mapping[str, Field], extras: Mapping[str, object]
    ) -> str:
        """Write one sample as a torch file, whole or not at all; an existing file is not overwritten.

        ``ConversionError`` if no file of the sample's name can be, beside those of the others.
        """
        import torch

        scaled = [key for key in values if fields[key].scale is not None]
        if scaled:
            raise ValueError(
                f"{', '.join(scaled)}: fp8 states with scales, which only the layout speculators-arrow has a place for"
            )
        tensors = {key: _tensor(torch, bits, fields[key]) for key, bits in values.items()}
        record = _RECORDS[self._layout](tensors)
        for key, value in extras.items():
            record.setdefault(key, value)
        for key, tensor in tensors.items():
            if key not in USUAL_FIELDS:
                record.setdefault(key, tensor)
        buffer = io.BytesIO()
        torch.save(record, buffer)
        data = buffer.getvalue()
        written = file_name(self._layout, name)
        if written.endswith(".gz"):
            data = gzip.compress(data, 6, mtime=0)
        try:
            self._publish(written, name, data)
        except FileExistsError:
            if written == name and self._written.get(written) in (None, written):
                raise
            # a.ckpt and a.pt of the source, where both are to end in .pt
            written = _distinct(written, name)
            self._publish(written, name, data)
        self._written[written] = name
        return written

    def _publish(self, written: str, name: str, data: bytes) -> None:
        try:
            publish(self._root / written, data)
        except OSError as error:
            problem = self._no_place(written, error)
            if problem is None:
                raise
            raise ConversionError(
                f"sample {name!r} cannot be written to {str(self._root / written)!r}: {problem}; the layout "
                "speculators-arrow numbers its files instead, or read the dataset with hsloader.open_dataset and write "
                "them where you like"
            ) from error

    def _no_place(self, written: str, error: OSError) -> str | None:
        """Why no file can be called ``written``; ``None`` if something else is wrong, or just the file is there."""
        path = PurePosixPath(written)
        if error.errno == errno.ENAMETOOLONG:
            longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
            where = f"a part of it has {longest:,} bytes" if longest > _NAME_BYTES else "it is too long as a whole"
            return f"{where} (file systems take {_NAME_BYTES} bytes for a name, 4,095 for a path)"
        for parent in path.parents:
            if (self._root / parent).exists() and not (self._root / parent).is_dir():
                other = self._written.get(str(parent))
                return f"{str(parent)!r} is no folder, but the file of {'another' if other is None else repr(other)}"
        if (self._root / written).is_dir():
            other = next((s for file, s in self._written.items() if file.startswith(f"{written}/")), None)
            return f"this is a folder already, for {'another' if other is None else repr(other)}"
        return None


def _tensor(torch: Any, bits: Array, field: Field) -> Any:
    """The values as a torch tensor of the dtype that the source had."""
    target = field.source_dtype or field.dtype
    if not field.type.is_float and target != field.dtype:
        if dtype_of(target).is_float:
            return torch.from_numpy(np.array(bits)).to(getattr(torch, target))
        bits = exact_cast(bits, field.dtype, target, field.name)
    elif field.type.is_float:
        target = field.dtype
    item = dtype_of(target).item_size
    signed = np.ascontiguousarray(bits).view(f"i{item}") if bits.size else np.empty(bits.shape, f"i{item}")
    return torch.from_numpy(signed.copy()).view(getattr(torch, target))


def _list_record(tensors: Mapping[str, Any]) -> dict[str, Any]:
    layers = [layer.contiguous() for layer in _aux(tensors).unbind(1)] if "hidden_states" in tensors else []
    return _with_tokens(tensors, {"hidden_states": [*layers, _last(tensors)]})


def _pair_record(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return _with_tokens(tensors, {"hidden_state": _aux(tensors).flatten(1), "target": _last(tensors)})


def _eagle3_record(tensors: Mapping[str, Any]) -> dict[str, Any]:
    aux = _aux(tensors).flatten(1)[None] if "hidden_states" in tensors else None
    return _with_tokens(tensors, {"hidden_state": _last(tensors)[None], "aux_hidden_state": aux})


def _dspark_record(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**_dflash_record(tensors), "target_last_hidden_states": _last(tensors)[None]}


def _dflash_record(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return _with_tokens(tensors, {"hidden_states": _aux(tensors).flatten(1)[None]})


def _aux(tensors: Mapping[str, Any]) -> Any:
    return checked_state(tensors, "hidden_states", "[tokens, layers, hidden size]", 3)


def _last(tensors: Mapping[str, Any]) -> Any:
    return checked_state(tensors, "last_hidden_state", "[tokens, hidden size]", 2)


def checked_state(values: Mapping[str, Any], name: str, shape: str, axes: int) -> Any:
    """A sample's states or ids; ``ValueError`` if they are not there, or have not the ``axes`` of ``shape``."""
    if name not in values:
        raise ValueError(f"this layout needs {name}, which the dataset does not have")
    found = values[name]
    if found.ndim != axes:
        raise ValueError(f"this layout needs {name} as {shape}; the dataset has it as {list(found.shape)}")
    return found


def _with_tokens(tensors: Mapping[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    tokens = {key: tensors[key] for key in ("input_ids", "loss_mask") if key in tensors}
    return {**tokens, **states}


_RECORDS = {
    "speculators-list": _list_record,
    "speculators-pair": _pair_record,
    "specforge-eagle3": _eagle3_record,
    "specforge-dspark": _dspark_record,
    "specforge-dflash": _dflash_record,
}


def file_name(layout: str, name: str) -> str:
    """Where a sample called ``name`` goes, with a suffix of the layout; ``ValueError`` if it would leave the folder."""
    check_path_name(name)
    path = PurePosixPath(name.replace("#", "-"))
    suffixes = (".ckpt", ".ckpt.gz") if layout.startswith("specforge") else (".pt",)
    if path.name.endswith(suffixes):
        return str(path) if len(os.fsencode(path.name)) <= _NAME_BYTES else _distinct(str(path), name)
    stem = path.name.removesuffix(".gz")
    for suffix in (".ckpt", ".pt", ".pth", ".safetensors"):
        stem = stem.removesuffix(suffix)
    made = str(path.with_name(stem + suffixes[0]))
    return made if len(os.fsencode(stem + suffixes[0])) <= _NAME_BYTES else _distinct(made, name)


def _distinct(written: str, name: str) -> str:
    """Another file name for the sample ``name`` where ``written`` is taken or too long: with some of the name's key."""
    path = PurePosixPath(written)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    end = f"-{sample_key(name):016x}{suffix}"
    stem = os.fsencode(path.name.removesuffix(suffix))[: _NAME_BYTES - len(end)]
    return str(path.with_name(os.fsdecode(stem) + end))


def publish(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all; ``FileExistsError`` if it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".hsloader-{os.getpid()}.tmp")  # not the name and more: names may be at their limit
    try:
        temporary.write_bytes(data)
        name_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def name_file(temporary: Path, path: Path) -> None:
    """Give a written file its name; ``FileExistsError`` if that is taken. The temporary name may be there after it."""
    try:
        os.link(temporary, path)  # unlike a rename, a link never replaces a file
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # nobody else is expected to write here
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)


def safetensors_metadata(extras: Mapping[str, object]) -> Mapping[str, str]:
    """What of a sample's extras a safetensors header has a place for: texts that a header held. Empty if nothing."""
    found = extras.get(METADATA)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return {}
    return found


def safetensors_bytes(tensors: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of arrays of bits by name, each with its torch dtype name; widest items first."""
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    parts: list[bytes] = []
    at = 0
    for name, (dtype, bits) in sorted(tensors.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        data = np.ascontiguousarray(bits).tobytes()
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(bits.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])

"""Writer: appends samples to a dataset one by one from Python, and publishes them together."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from hsloader.errors import DatasetError, IncompatibleError
from hsloader.store.arrays import as_array_like, as_bits, declared_fields, dtype_name, infer_field
from hsloader.store.compatible import check_compatible
from hsloader.store.encoding import ChunkEncoders
from hsloader.store.fields import CODECS, Field, check_field_set
from hsloader.store.layout import SHARD_BYTES, choose_layout
from hsloader.store.manifest import Manifest, Provenance, SegmentEntry
from hsloader.store.packed import read_tables
from hsloader.store.publish import Root, TemporaryDirectory
from hsloader.store.samples import COLUMNS, check_path_name, mask_counts, sample_key
from hsloader.store.segment import SegmentWriter
from hsloader.store.zarr_json import BF16_AS

__all__ = ["SEGMENT_BYTES", "Writer"]

SEGMENT_BYTES = 8 << 30

Bits = npt.NDArray[Any]


class ProvenanceOptions(TypedDict, total=False):
    """The provenance keywords of ``Writer``; see ``Provenance``."""

    producer: str | None
    model: str | None
    hidden_size: int | None
    num_layers: int | None
    layer_ids: Iterable[int] | None
    layer_ids_as_written: Iterable[int] | None
    layer_convention: str | None
    norm_state: str
    vocab_size: int | None
    tokenizer: str | None
    source_layout: str | None
    notes: Iterable[str]


class Writer:
    """Writes samples to the dataset at ``path``::

        with hsloader.Writer("data.hs", norm_state="pre", layer_ids=[2, 18, 33]) as writer:
            for ids, mask, states, last in dump():
                writer.append(input_ids=ids, loss_mask=mask, hidden_states=states, last_hidden_state=last)

    Everything is published when the block ends, and nothing if it ends with an exception. A sample that is refused
    (``ValueError``, ``TypeError``) leaves no trace, and the writer goes on. Several writers may write to one dataset at
    once, each in its own process or thread, with ``append=True``.

    ``fields``: ``{name: dtype}`` or ``{name: (dtype, shape of one token)}``; by default what the first sample has.
    ``append``: whether the dataset may exist already.  ``typical_length``: the usual tokens of a sample (default: those
    of the first); it decides the sizes of chunks.  ``codec``: ``"lossless"`` or ``"none"``.  ``segment_bytes``: raw
    bytes at which a segment is closed.  ``threads``: that encode the chunks of a sample.  ``allow_unknown``: append
    although the dataset or the keywords do not say the norm state or the layers.  The other keywords say where the
    states come from: ``producer``, ``model``, ``norm_state`` (``"pre"``, ``"post"``), ``layer_ids`` ("after layer i",
    0-based), ``hidden_size``, ``num_layers``, ``vocab_size``, ``tokenizer``, ``notes`` ...
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, Any] | Iterable[Field] | None = None,
        *,
        append: bool = False,
        typical_length: int | None = None,
        codec: str = "lossless",
        bf16_as: str = "bfloat16",
        segment_bytes: int = SEGMENT_BYTES,
        shard_bytes: int = SHARD_BYTES,
        threads: int = 1,
        allow_unknown: bool = False,
        **provenance: Unpack[ProvenanceOptions],
    ) -> None:
        for key, value in (("segment_bytes", segment_bytes), ("shard_bytes", shard_bytes), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{key} is {value}; expected at least 1")
        if typical_length is not None and typical_length < 1:
            raise ValueError(f"typical_length is {typical_length}; expected at least 1, or None")
        for key, given, known in (("codec", codec, CODECS), ("bf16_as", bf16_as, BF16_AS)):
            if given not in known:
                raise ValueError(f"{key} is {given!r}; expected one of {', '.join(known)}")
        self.provenance = _provenance(provenance)
        self._fields = None if fields is None else declared_fields(fields, codec)
        self._typical_length = typical_length
        self._codec = codec
        self._bf16_as = bf16_as
        self._segment_bytes = segment_bytes
        self._shard_bytes = shard_bytes
        self._allow_unknown = allow_unknown
        self._root = Root.create(path)
        self._listed = _Listed(self._root)
        if self._listed.manifest is not None:
            if not append:
                raise DatasetError(
                    f"{self._root.path}: there is a dataset already; use append=True, or choose another path"
                )
            self._fields = self._fields or self._listed.manifest.fields
            check_compatible(
                self.path, self._listed.manifest, self._fields, self.provenance, allow_unknown=allow_unknown
            )
        self._root.clean()
        self._encoders = ChunkEncoders(threads)
        self._open: _OpenSegment | None = None
        self._sealed: list[_SealedSegment] = []
        self._keys: set[int] = set()
        self._process = os.getpid()
        self._interrupted = False
        self._closed = False

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def path(self) -> Path:
        """The dataset's path."""
        return self._root.path

    @property
    def fields(self) -> tuple[Field, ...] | None:
        """The fields; None before the first sample if none were given."""
        return self._fields

    def append(self, *, name: str | None = None, extras: dict[str, Any] | None = None, **fields: Any) -> None:
        """Append one sample: for every field a torch tensor or numpy array ``[tokens, *shape]``.

        ``name``: unique in the dataset and a path below a folder (``export`` writes a file of that name); by default
        the segment's number and a running number.  ``extras``: small values that JSON can hold.  bfloat16 and fp8 come
        as torch tensors, or as uint16 and uint8 bits of a declared field.  Raises ``ValueError`` or ``TypeError`` for a
        sample that does not fit, ``OSError`` for a full disk.
        """
        with self._in_one_piece():
            self._append(name, extras, fields)

    def _append(self, name: str | None, extras: dict[str, Any] | None, fields: Mapping[str, Any]) -> None:
        if isinstance(name, str):  # what is none is refused with its type below
            check_path_name(name)
        values = {key: as_array_like(key, value) for key, value in fields.items()}
        fields_of_it = self._fields
        if fields_of_it is None:
            fields_of_it = tuple(infer_field(key, value, self._codec) for key, value in values.items())
            check_field_set(fields_of_it)
        sample, length = _checked(name, fields_of_it, values)
        self._fields = fields_of_it  # inferred ones count from the first sound sample on
        segment = self._segment(length)
        called = name if name is not None else f"{segment.number:06d}#{segment.writer.samples}"
        key = sample_key(called)
        if key in self._keys or self._listed.has(key):
            raise ValueError(f"sample {called!r}: the dataset has a sample of that name already")
        try:
            self._write(segment.writer, called, length, sample, extras)
        except OSError as error:
            raise self._disk_error(error, f"sample {called!r}", "append it again") from error
        self._keys.add(key)
        if segment.writer.raw_bytes >= self._segment_bytes:
            self._seal()

    def publish(self) -> None:
        """Publish what was appended so far; a later exception does not take it back."""
        with self._in_one_piece():
            self._publish()

    def _publish(self) -> None:
        self._seal()
        if not self._sealed:
            return
        assert self._fields is not None
        with self._root.lock():
            self._listed.refuse_duplicates(self._keys)
            entries = [sealed.entry for sealed in self._sealed]
            self._root.append_segments(entries, self._fields, self.provenance, allow_unknown=self._allow_unknown)
        for sealed in self._sealed:
            sealed.resources.close()
        self._sealed.clear()
        self._keys.clear()
        self._listed = _Listed(self._root)

    def close(self) -> None:
        """Publish everything and end; what a ``with`` block does at its end."""
        if self._closed:
            return
        try:
            self.publish()
            self._root.pack()
        finally:
            self.abort()

    def abort(self) -> None:
        """End without publishing what was not published yet. In a forked child: leave all to the parent."""
        self._closed = True
        if os.getpid() != self._process:
            return
        self._encoders.close()
        if self._open is not None:
            opened, self._open = self._open, None
            opened.resources.close()
            self._root.release_numbers(opened.number, 1, unused=True)
        for sealed in reversed(self._sealed):
            with contextlib.suppress(ValueError):  # listed by a commit whose answer was lost
                self._root.discard(sealed.entry.number)
            # First the owner's note of the number goes, then the number: else another writer's segment would bear it.
            sealed.resources.close()
            self._root.release_numbers(sealed.entry.number, 1, unused=True)
        self._sealed.clear()

    @contextlib.contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """What Ctrl-C cut short cannot be continued: it may come between any two steps.

        Whoever catches it and goes on must not find some of the samples published and others not.
        """
        if self._closed:
            raise ValueError(f"{self.path}: the writer is closed")
        if self._interrupted:
            raise ValueError(
                f"{self.path}: the writer was interrupted in the middle of an append or publish; what was not "
                "published before is not going to be; write it again with another writer"
            )
        if os.getpid() != self._process:
            raise ValueError(
                f"{self.path}: the writer was opened by process {self._process} and cannot be used by its forked child "
                f"{os.getpid()}; open another one with append=True there"
            )
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise

    def _segment(self, length: int) -> _OpenSegment:
        """The open segment; a new one if none is."""
        if self._open is None:
            assert self._fields is not None
            layout = choose_layout(self._fields, self._typical_length or length, shard_bytes=self._shard_bytes)
            with contextlib.ExitStack() as stack:
                number = self._root.reserve()
                temporary = stack.enter_context(self._root.temporary())
                writer = stack.enter_context(SegmentWriter(temporary.path, self._fields, layout, bf16_as=self._bf16_as))
                self._open = _OpenSegment(number, temporary, writer, stack.pop_all())
            self._typical_length = self._typical_length or length
        return self._open

    def _write(
        self, writer: SegmentWriter, name: str, length: int, sample: Mapping[str, Bits], extras: dict[str, Any] | None
    ) -> None:
        assert self._fields is not None
        try:
            writer.begin(name, length)
            for field in self._fields:
                if not field.is_token_field:
                    rows = sample[field.name].reshape(length, field.width)
                    chunks = [rows[start:stop] for start, stop in writer.chunks(field.name, length)]
                    for frame in self._encoders.encode(writer.codec(field.name), chunks):
                        writer.append(field.name, frame)
            mask = next((f for f in self._fields if f.name == "loss_mask" and f.shape == ()), None)
            loss_tokens, first = (-1, -1) if mask is None else mask_counts(sample[mask.name], mask.dtype)
            tokens = {field.name: sample[field.name] for field in self._fields if field.is_token_field}
            writer.commit(tokens, loss_tokens=loss_tokens, first_supervised=first, extras=extras)
        except BaseException:
            writer.rollback()
            raise

    def _seal(self) -> None:
        """Seal the open segment and put it in its place, not listed yet."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        if not opened.writer.samples:
            opened.resources.close()
            self._root.release_numbers(opened.number, 1, unused=True)
            return
        try:
            opened.writer.seal()
            entry = self._root.place(opened.temporary, opened.number)
        except BaseException as error:
            opened.resources.close()
            self._root.release_numbers(opened.number, 1, unused=True)
            if isinstance(error, OSError):
                what = f"segment {opened.number} with {opened.writer.samples} samples"
                raise self._disk_error(error, what, "write them again") from error
            raise
        self._sealed.append(_SealedSegment(entry, opened.resources))

    def _disk_error(self, error: OSError, what: str, remedy: str) -> OSError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        free = shutil.disk_usage(self.path).free
        return OSError(
            error.errno,
            f"no space left while writing {what}: {free:,} bytes are free at {self.path}; it is not published; "
            f"make room and {remedy}",
            error.filename or str(self.path),
        )


@dataclass(frozen=True, slots=True)
class _OpenSegment:
    number: int
    temporary: TemporaryDirectory
    writer: SegmentWriter
    resources: contextlib.ExitStack


@dataclass(frozen=True, slots=True)
class _SealedSegment:
    entry: SegmentEntry
    resources: contextlib.ExitStack  # keeps the owner's lock until the manifest lists the segment


class _Listed:
    """The keys of the samples that the dataset lists, to refuse a name that is there already."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.manifest = root.manifest()
        self._keys = self._read_keys(self.manifest)

    def has(self, key: int) -> bool:
        at = int(np.searchsorted(self._keys, np.uint64(key)))
        return at < len(self._keys) and int(self._keys[at]) == key

    def refuse_duplicates(self, keys: set[int]) -> None:
        """Under the lock: look again, in case another writer listed samples of the same names meanwhile."""
        present = self._root.manifest()
        if present is None or (self.manifest is not None and present.fingerprint == self.manifest.fingerprint):
            return
        self.manifest, self._keys = present, self._read_keys(present)
        twice = [key for key in keys if self.has(key)]
        if twice:
            raise IncompatibleError(
                f"{self._root.path}: another writer published {len(twice)} samples of the same names meanwhile; "
                "expected names that are unique in the dataset"
            )

    def _read_keys(self, manifest: Manifest | None) -> npt.NDArray[np.uint64]:
        if manifest is None:
            return np.empty(0, np.uint64)
        table = read_tables(self._root.path, manifest)
        return np.sort(table[COLUMNS.index("key")].view(np.uint64))


def _checked(name: str | None, fields: tuple[Field, ...], values: Mapping[str, Any]) -> tuple[dict[str, Bits], int]:
    """The sample's bits and length, checked against the fields."""
    called = "the sample" if name is None else f"sample {name!r}"
    expected = [field.name for field in fields]
    if set(values) != set(expected):
        raise ValueError(f"{called}: expected the fields {', '.join(expected)}, found {', '.join(values) or 'none'}")
    lengths = {key: value.shape[0] if len(value.shape) else 0 for key, value in values.items()}
    length = int(lengths[expected[0]])
    if length < 1:
        raise ValueError(f"{called}, field {expected[0]}: expected at least one token, found none")
    sample = {}
    for field in fields:
        value = values[field.name]
        wanted, found = [length, *field.shape], [int(n) for n in value.shape]
        try:
            if wanted != found:
                raise TypeError
            sample[field.name] = as_bits(value, field.dtype)
        except TypeError:
            raise ValueError(
                f"{called}, field {field.name}: expected {field.dtype} {wanted}, found {dtype_name(value)} {found}"
            ) from None
    return sample, length


def _provenance(options: ProvenanceOptions) -> Provenance:
    given: dict[str, Any] = dict(options)
    unknown = sorted(set(given) - set(Provenance.__slots__))
    if unknown:
        raise TypeError(f"unknown keywords {', '.join(unknown)}; provenance has {', '.join(Provenance.__slots__)}")
    return Provenance(**given)

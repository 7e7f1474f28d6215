"""Torch's format from before zip: a magic number, three pickles, the object, a list of storage keys, the storages.

Source: ``torch.serialization._legacy_save``.  It has no checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block
from hsloader.formats.pickle_globals import PickleError, Storage, short
from hsloader.formats.pickle_reader import MAX_PICKLE, PickleCutError, read_pickle
from hsloader.formats.reading import pread_exactly
from hsloader.formats.torch_zip import storage_finder
from hsloader.formats.windows import Window

__all__ = ["LEGACY_MAGIC", "no_storages", "read_torch_legacy"]

LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_PROTOCOL = 1001
_NOTE = "a legacy torch file has no checksums: its bytes are not verified"


class _Legacy:
    """One parse of the pickles at the beginning."""

    def __init__(self, data: bytes) -> None:
        self.blocks: dict[str, Block] = {}
        protocol, at = read_pickle(data, no_storages, len(LEGACY_MAGIC))
        system, at = read_pickle(data, no_storages, at)
        if type(protocol) is not int or protocol != _PROTOCOL or not isinstance(system, dict):
            raise PickleError(f"a legacy torch file of protocol {short(protocol)}, expected {_PROTOCOL}")
        if system.get("little_endian") is not True:
            raise PickleError("a legacy torch file that is not little-endian, which is not read")
        self.value, at = read_pickle(data, storage_finder(self._block, 6), at)
        keys, self.end = read_pickle(data, no_storages, at)
        # Text before anything else: hashing what a file nested may take forever.
        self.keys = [key for key in keys if type(key) is str] if type(keys) is list else []
        if type(keys) is not list or len(keys) != len(self.blocks) or set(self.keys) != self.blocks.keys():
            raise PickleError("the list of storages of the legacy torch file does not match its tensors")

    def _block(self, key: str, nbytes: int) -> Block:
        return self.blocks.setdefault(key, Block(key, nbytes))


def no_storages(reference: tuple[object, ...]) -> Storage:
    """The ``find_storage`` of a pickle that has no tensors."""
    raise PickleError(f"a pickle that should hold plain values refers to a storage ({len(reference)} values)")


def read_torch_legacy(
    window: Window, path: str, fd: int | None, size: int
) -> tuple[object, str, Callable[[Block], int] | None, list[Block]]:
    """The object, a note about checksums, the function that locates blocks, and the blocks.

    ``fd`` and ``size`` of the file, or ``fd`` None while only the beginning of a gzip file is looked at.
    """
    legacy = _parse(window, path)
    if fd is None:
        return legacy.value, _NOTE, None, list(legacy.blocks.values())
    offsets: dict[str, int] = {}
    at = legacy.end
    for key in legacy.keys:
        block = legacy.blocks[key]
        raw = pread_exactly(fd, 8, at, path, f"the size of storage {key[:40]}")
        numel = struct.unpack("<q", raw)[0]
        if at + 8 + block.size > size or numel < 0 or (numel and block.size % numel) or (not numel and block.size):
            raise SourceError(
                path,
                f"truncated: storage {key[:40]} of {numel} elements needs {block.size} bytes at {at + 8} of {size}",
            )
        offsets[key] = at + 8
        at += 8 + block.size
    if at != size:
        raise SourceError(path, f"the file has {size} bytes, its storages end at {at}")
    return legacy.value, _NOTE, lambda block: offsets[block.name], list(legacy.blocks.values())


def _parse(window: Window, path: str) -> _Legacy:
    """Parse as much of the beginning as the pickles need."""
    count = 1 << 13
    while True:
        data = window.first(count)
        try:
            return _Legacy(data)
        except PickleCutError as error:
            if len(data) < count or count >= MAX_PICKLE:
                raise SourceError(path, f"legacy torch file: {error}") from None
            count = min(8 * count, MAX_PICKLE)
        except PickleError as error:
            raise SourceError(path, f"legacy torch file: {error}") from None

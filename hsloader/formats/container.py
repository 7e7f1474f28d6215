"""Which container a file is, told by its first bytes and never by its name, and its object tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block, Tensor
from hsloader.formats.gz import claimed_bytes, read_zip_head
from hsloader.formats.pickle_reader import MAX_PICKLE
from hsloader.formats.safetensors_file import NOTE, looks_like_safetensors, read_safetensors
from hsloader.formats.torch_legacy import LEGACY_MAGIC, read_torch_legacy
from hsloader.formats.torch_zip import HEAD, LOCAL_MAGIC, read_torch_zip
from hsloader.formats.windows import GZIP_MAGIC, FileWindow, GzipWindow

__all__ = ["Container", "read_container"]


@dataclass(frozen=True, slots=True)
class Container:
    """A file's object tree (tensors are descriptors) and how to find its blocks.

    ``kind`` is ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``.  For a gzip file of which only the beginning
    was looked at, ``inflated_limit`` bounds the bytes it may inflate to; its blocks cannot be read yet.
    """

    kind: str
    value: object
    note: str = ""
    locate: Callable[[Block], int] | None = None
    inflated_limit: int | None = None


def read_container(fd: int, path: str, size: int) -> Container:
    """What the file holds; ``SourceError`` says what it looks like if it is no container of tensors."""
    if size == 0:
        raise SourceError(path, "the file is empty (0 bytes)")
    head = os.pread(fd, HEAD, 0)
    if head.startswith(LOCAL_MAGIC):
        value, note, locate = read_torch_zip(fd, path, size, head)
        return Container("torch zip", value, note, locate)
    if head.startswith(GZIP_MAGIC):
        return _gzip_head(fd, path, size)
    if head.startswith(LEGACY_MAGIC):
        value, note, locate_legacy, _ = read_torch_legacy(FileWindow(fd), path, fd, size)
        return Container("torch legacy", value, note, locate_legacy)
    if looks_like_safetensors(head):
        return Container("safetensors", read_safetensors(FileWindow(fd), path, size), NOTE)
    raise SourceError(path, looks_like(head, size))


def _gzip_head(fd: int, path: str, size: int) -> Container:
    """What the beginning of a gzip file says; its sizes are claims until it is inflated."""
    window = GzipWindow(fd, path)
    head = window.first(256)
    if head.startswith(LOCAL_MAGIC):
        value, blocks, end = read_zip_head(window, path)
        return Container("torch zip", value, inflated_limit=claimed_bytes(path, blocks, end, size))
    if head.startswith(LEGACY_MAGIC):
        value, note, _, blocks = read_torch_legacy(window, path, None, size)
        return Container("torch legacy", value, note, inflated_limit=claimed_bytes(path, blocks, MAX_PICKLE, size))
    if looks_like_safetensors(head):
        tensors = read_safetensors(window, path, None)
        blocks = [t.block for t in tensors.values() if isinstance(t, Tensor)]
        return Container("safetensors", tensors, NOTE, inflated_limit=claimed_bytes(path, blocks, MAX_PICKLE, size))
    raise SourceError(path, f"gzip of something that is {looks_like(head, len(head))}")


def looks_like(head: bytes, size: int) -> str:
    """What a file that is no container of tensors seems to be."""
    text = head[:256].lstrip().lower()
    if text.startswith((b"<!doctype", b"<html")):
        kind = "an HTML page (a failed download?)"
    elif text.startswith(b"version https://git-lfs"):
        kind = "a git-lfs pointer: fetch the file itself with `git lfs pull`"
    elif head.startswith(b"\x89PNG"):
        kind = "a PNG picture"
    elif head.startswith(b"PK"):
        kind = "a zip archive that does not begin with a member"
    elif head.startswith(b"\x93NUMPY"):
        kind = "a numpy array"
    elif head.startswith(b"\x80"):
        kind = "a bare pickle, which is not read"
    elif size < 16:
        kind = f"too small ({size} {'byte' if size == 1 else 'bytes'}; truncated?)"
    elif text[:1] in (b"{", b"["):
        kind = "JSON"
    else:
        kind = f"unrecognised; it begins with {head[:8].hex(' ')}"
    return f"not a torch or safetensors file: {kind}"

"""Which container a file is, told by its first bytes and never by its name, and its object tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block
from hsloader.formats.torch_zip import HEAD, LOCAL_MAGIC, read_torch_zip

__all__ = ["Container", "read_container"]


@dataclass(frozen=True, slots=True)
class Container:
    """A file's object tree (tensors are descriptors) and how to find its blocks.

    ``kind`` is ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``; ``gzip`` says that the file was inflated for
    it, ``complete`` is false while only the head of a gzip file was looked at.
    """

    kind: str
    value: object
    note: str = ""
    locate: Callable[[Block], int] | None = None
    gzip: bool = False
    complete: bool = True


def read_container(fd: int, path: str, size: int) -> Container:
    """What the file holds; ``SourceError`` says what it looks like if it is no container of tensors."""
    if size == 0:
        raise SourceError(path, "the file is empty (0 bytes)")
    head = os.pread(fd, HEAD, 0)
    if head.startswith(LOCAL_MAGIC):
        value, note, locate = read_torch_zip(fd, path, size, head)
        return Container("torch zip", value, note, locate)
    raise SourceError(path, looks_like(head))


def looks_like(head: bytes) -> str:
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
    elif text[:1] in (b"{", b"["):
        kind = "JSON"
    else:
        kind = f"unrecognised; it begins with {head[:8].hex(' ')}"
    return f"not a torch or safetensors file: {kind}"

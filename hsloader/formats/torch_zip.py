"""Torch zip archives: the directory, the pickle and the places of the records, from the file's two ends.

Planning reads the last and the first few KiB; a record's local header is compared with the directory when the
record is first read (``locate``).  Whatever two readers of a zip could see differently is refused: members that
overlap or appear twice, local headers that disagree, compressed or encrypted members.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from hsloader.errors import SourceError
from hsloader.formats.blocks import Block
from hsloader.formats.pickle_globals import STORAGES, Global, PickleError, Storage, short
from hsloader.formats.pickle_reader import MAX_PICKLE, FindStorage, read_pickle
from hsloader.formats.reading import crc32, pread_exactly
from hsloader.store.dtypes import dtype_of

__all__ = ["HEAD", "LOCAL_MAGIC", "Member", "read_directory", "read_torch_zip", "storage_finder"]

HEAD = 16384  # bytes of a file's beginning that planning looks at
_TAIL = 8192
LOCAL_MAGIC = b"PK\x03\x04"
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_MAX_MEMBERS = 100_000
_MAX_DIRECTORY = 32 << 20
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENCRYPTED, _DESCRIPTOR = 0x1 | 0x40 | 0x2000, 0x8


@dataclass(slots=True)
class Member:
    """One entry of the directory."""

    name: str
    header: int  # offset of its local header
    size: int
    crc: int
    flags: int
    limit: int = 0  # where the next member or the directory begins


def read_torch_zip(fd: int, path: str, size: int, head: bytes) -> tuple[object, str, Callable[[Block], int]]:
    """The object of a torch archive, a note about its checksums, and the function that locates its blocks.

    ``head`` are the file's first bytes (``HEAD`` of them, or all).  ``SourceError`` says what is wrong with the file.
    """
    members = read_directory(fd, path, size)
    pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        found = ", ".join(list(members)[:4])
        raise SourceError(
            path, f"a zip archive with {len(pickles)} members data.pkl (expected one): not a torch file; it has {found}"
        )
    root = pickles[0][: -len("data.pkl")]
    if f"{root}version" not in members:
        raise SourceError(path, f"a torch archive without the record {root}version: the file is incomplete")
    order = members.get(f"{root}byteorder")
    if order is not None and _content(fd, path, order, head, 16) != b"little":
        raise SourceError(path, "a torch archive whose byteorder record does not say 'little': big-endian is not read")
    pickle = members[pickles[0]]
    data = _content(fd, path, pickle, head, MAX_PICKLE)

    def find_block(key: str, nbytes: int) -> Block:
        member = members.get(f"{root}data/{key}")
        if member is None:
            raise PickleError(f"the record data/{key} ({nbytes} bytes) is missing from the archive")
        return Block(f"data/{key}", member.size, header=member.header, crc=member.crc)

    try:
        value, end = read_pickle(data, storage_finder(find_block, 5))
    except PickleError as error:
        raise SourceError(path, f"data.pkl: {error}") from None
    if end != len(data):
        raise SourceError(path, f"data.pkl has {len(data) - end} bytes after its end")
    checked = all(m.crc for n, m in members.items() if n.startswith(f"{root}data/") and m.size)
    note = "" if checked else "records without a checksum (CRC 0): their bytes are not verified"

    def locate(block: Block) -> int:
        member = members[root + block.name]
        local = pread_exactly(
            fd, _LOCAL.size + len(member.name.encode("utf-8", "surrogateescape")), member.header, path, "a local header"
        )
        start = _payload_start(path, member, local)
        if start + member.size > member.limit:
            raise SourceError(path, f"zip member {member.name[:80]} runs into what follows it (they overlap)")
        return start

    return value, note, locate


def storage_finder(find_block: Callable[[str, int], Block], values: int) -> FindStorage:
    """A ``find_storage`` for persistent ids of ``values`` items, whose blocks come from ``find_block(key, nbytes)``."""

    def find_storage(reference: tuple[object, ...]) -> Storage:
        if len(reference) != values or reference[0] != "storage" or not isinstance(reference[1], Global):
            raise PickleError("the pickle refers to something that is not a storage")
        kind, key, place, numel = reference[1], reference[2], reference[3], reference[4]
        if kind.name != "UntypedStorage" and kind.name not in STORAGES:
            raise PickleError(f"the pickle has a storage of the class {kind}")
        if type(key) is not str or len(key) > 64 or type(place) is not str:
            raise PickleError("the pickle refers to a storage without a name or device")
        if values == 6 and reference[5] is not None:
            raise PickleError("the pickle refers to a view of a storage, which is not read (save the tensor again)")
        if place == "meta":
            raise PickleError("a tensor was saved on the meta device: it has a shape and no data")
        if type(numel) is not int or not 0 <= numel <= 1 << 60:
            raise PickleError(f"storage {key} claims {short(numel)} elements: out of range")
        nbytes = numel * (dtype_of(kind.dtype).item_size if kind.dtype else 1)
        block = find_block(key, nbytes)
        if block.size != nbytes:
            raise PickleError(
                f"record {block.name} holds {block.size} bytes, the pickle's storage of {numel} elements needs {nbytes}"
            )
        return Storage(kind.dtype, block)

    return find_storage


def read_directory(fd: int, path: str, size: int) -> dict[str, Member]:
    """The members by name; ``SourceError`` if the directory is cut off, or its members overlap or repeat."""
    count, length, start = _end_record(fd, path, size)
    if count > _MAX_MEMBERS or length > _MAX_DIRECTORY:
        raise SourceError(path, f"the zip directory claims {count} members in {length} bytes: over the limit")
    data = pread_exactly(fd, length, start, path, "the zip directory")
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        member, at = _central(path, data, at)
        if member.name in members:
            raise SourceError(path, f"the zip directory lists {member.name[:80]} twice")
        members[member.name] = member
    if at != length:
        raise SourceError(path, f"the zip directory has {length - at} bytes after its last member")
    limit = start
    for member in sorted(members.values(), key=lambda m: m.header, reverse=True):
        end = member.header + _LOCAL.size + len(member.name) + member.size
        if end > limit:
            raise SourceError(
                path, f"zip member {member.name[:80]} reaches to {end}, what follows begins at {limit} (they overlap)"
            )
        member.limit = limit
        limit = member.header
    return members


def _end_record(fd: int, path: str, size: int) -> tuple[int, int, int]:
    """Members, bytes and offset of the directory, from the end record (zip64 or not)."""
    tail_start = max(0, size - _TAIL)
    tail = pread_exactly(fd, size - tail_start, tail_start, path, "the end of the zip archive")
    at = len(tail) - 22
    if at < 0 or tail[at : at + 4] != _END:
        at = tail.rfind(_END)
        if at < 0 or len(tail) < at + 22 or at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") != len(tail):
            raise SourceError(
                path, f"truncated: a zip archive of {size} bytes without its end record (the writer was killed?)"
            )
    disk, first_disk, here, count, length, start = struct.unpack_from("<HHHHII", tail, at + 4)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR64:
        where = int.from_bytes(tail[at - 12 : at - 4], "little")
        if where + 56 > size:
            raise SourceError(path, f"truncated: the zip64 end record would be at {where}, the file has {size} bytes")
        record = pread_exactly(fd, 56, where, path, "the zip64 end record")
        if record[:4] != _END64:
            raise SourceError(path, "the zip64 end record is not where its locator says")
        disk, first_disk, here, count, length, start = struct.unpack_from("<IIQQQQ", record, 16)
        end = where
    else:
        end = tail_start + at
    if disk or first_disk or here != count:
        raise SourceError(path, "a zip archive in several parts, which is not read")
    if start + length != end:
        raise SourceError(
            path, f"the zip directory ({length} bytes at {start}) does not end at its end record ({end}): truncated?"
        )
    return count, length, start


def _central(path: str, data: bytes, at: int) -> tuple[Member, int]:
    """The directory entry at ``at``, and the position after it."""
    if at + _CENTRAL.size > len(data):
        raise SourceError(path, "the zip directory is shorter than its members need (truncated)")
    (magic, _, _, flags, method, _, _, crc, packed, size, name_len, extra_len, comment_len, disk, _, _, header) = (
        _CENTRAL.unpack_from(data, at)
    )
    after_name = at + _CENTRAL.size + name_len
    end = after_name + extra_len + comment_len
    if magic != b"PK\x01\x02" or end > len(data) or disk not in (0, 0xFFFF):
        raise SourceError(path, "the zip directory is damaged: an entry is not one")
    name = data[at + _CENTRAL.size : after_name].decode("utf-8", "surrogateescape")
    if 0xFFFFFFFF in (packed, size, header):
        extra = data[after_name : after_name + extra_len]
        packed, size, header = _zip64(path, name, extra, (packed, size, header))
    if flags & _ENCRYPTED:
        raise SourceError(path, f"zip member {name[:80]} is encrypted")
    if method != 0 or packed != size:
        how = "deflate" if method == 8 else f"method {method}"
        raise SourceError(
            path,
            f"zip member {name[:80]} is compressed ({how}, {packed} of {size} bytes): torch stores its records "
            "plainly; unpack the archive and zip it again without compression (zip -0)",
        )
    return Member(name, header, size, crc, flags), end


def _zip64(path: str, name: str, extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """The 64-bit numbers (packed, size, header) of an entry's extra field, in place of those that are all ones."""
    packed, size, header = numbers
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{len(body) // 8}Q", body))
            try:
                size = next(wide) if size == 0xFFFFFFFF else size
                packed = next(wide) if packed == 0xFFFFFFFF else packed
                header = next(wide) if header == 0xFFFFFFFF else header
            except StopIteration:
                break
            return packed, size, header
        at += 4 + length
    raise SourceError(path, f"zip member {name[:80]} lacks the 64-bit sizes that its entry promises")


def _content(fd: int, path: str, member: Member, head: bytes, limit: int) -> bytes:
    """The bytes of a small member, checked against its CRC-32."""
    if member.size > limit:
        raise SourceError(path, f"zip member {member.name[:80]} has {member.size} bytes, at most {limit} are read")
    local = head[member.header : member.header + 256]
    if len(local) < 256:
        local = pread_exactly(fd, _LOCAL.size, member.header, path, f"the header of {member.name[:80]}")
        local += os.pread(fd, 226, member.header + _LOCAL.size)
    start = _payload_start(path, member, local)
    if start + member.size > member.limit:
        raise SourceError(path, f"zip member {member.name[:80]} runs into what follows it (they overlap)")
    data = head[start : start + member.size]
    if len(data) < member.size:
        data = pread_exactly(fd, member.size, start, path, member.name[:80])
    if member.crc and crc32(data) != member.crc:
        raise SourceError(path, f"the CRC-32 of {member.name[:80]} is wrong: the file is damaged (checksum)")
    return data


def _payload_start(path: str, member: Member, local: bytes) -> int:
    """Where a member's bytes begin, from its local header, which must agree with the directory."""
    magic, _, flags, method, _, _, crc, packed, size, name_len, extra_len = _LOCAL.unpack_from(local)
    name = member.name.encode("utf-8", "surrogateescape")
    if magic != LOCAL_MAGIC:
        raise SourceError(path, f"there is no local header of {member.name[:80]} at {member.header}: damaged")
    if name_len != len(name) or local[_LOCAL.size : _LOCAL.size + name_len] != name[: len(local) - _LOCAL.size]:
        raise SourceError(
            path, f"damaged: the local header at {member.header} names another member than {member.name[:80]}"
        )
    if method or flags & _ENCRYPTED or (flags ^ member.flags) & _DESCRIPTOR:
        raise SourceError(path, f"the local header of {member.name[:80]} disagrees with the directory (flags)")
    if not flags & _DESCRIPTOR:
        sizes = {packed, size} - {0xFFFFFFFF}
        if (sizes and sizes != {member.size}) or crc != member.crc:
            raise SourceError(
                path, f"the local header of {member.name[:80]} disagrees with the directory (size or CRC)"
            )
    return member.header + _LOCAL.size + int(name_len) + int(extra_len)

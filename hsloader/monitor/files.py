"""Which open files are data that a training run reads, and what kind of file system they lie on."""

from __future__ import annotations

from collections.abc import Iterable

from hsloader.monitor.procfs import Mount

__all__ = ["file_system_text", "is_data_file", "is_remote", "mount_of"]

_NOT_DATA = ("/dev/", "/proc/", "/sys/", "pipe:", "socket:", "anon_inode:", "/memfd:", "/SYSV")
_SHARED = ("/dev/shm/torch_", "/dev/shm/psm_", "/dev/shm/sem.", "/dev/shm/wnsm_", "/dev/shm/nccl-", "/dev/shm/mp-")
_CODE = (".py", ".pyc", ".so", ".pyd", ".cubin", ".ptx", ".ttf", ".mo", ".cache", ".gresource", ".lock")
_NOT_MAPPED_DATA = ("/usr/lib/locale/", "/usr/share/", "/usr/lib/", "/lib/", "/etc/", "/usr/local/cuda")

_REMOTE = frozenset({
    "nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "ceph", "9p", "afs", "beegfs", "gpfs", "wekafs", "glusterfs",
    "pvfs2", "orangefs", "gfs2", "ocfs2", "panfs", "mxfs", "vastnfs", "virtiofs", "fuse", "fuseblk",
})  # fmt: skip
_NAMES = {"nfs": "NFS", "nfs4": "NFS", "lustre": "Lustre", "gpfs": "GPFS", "beegfs": "BeeGFS", "ceph": "Ceph"}


def is_data_file(path: str, mapped: bool = False) -> bool:
    """Whether a path that a process has open (or ``mapped``) may be training data: no device, library or code."""
    if not path.startswith("/") or path.startswith(_NOT_DATA):
        return path.startswith("/dev/shm/") and not path.startswith(_SHARED) and not path.endswith(" (deleted)")
    if path.endswith(_CODE) or ".so." in path:
        return False
    return not mapped or not path.startswith(_NOT_MAPPED_DATA)


def is_remote(kind: str) -> bool:
    """Whether a file system type answers over a network or through another process, and so may not answer."""
    return kind in _REMOTE or kind.startswith("fuse.")


def file_system_text(kind: str, server: str | None) -> str:
    """``NFS server nas1``, ``fuse.s3fs``, ``ext4``."""
    name = _NAMES.get(kind, kind)
    return f"{name} server {server}" if server else name


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path lies on, by its text alone: a look at it would hang with its file server."""
    above = [m for m in mounts if path == m.point or path.startswith(m.point.rstrip("/") + "/")]
    # Of two on the same point the later covers the earlier, as a file server's mount covers the automounter's.
    return max(reversed(above), key=lambda m: len(m.point), default=None)

"""How long planning takes: 10,000 samples of 100 MB are described from their headers; the limit is 0.2 ms a file, warm.

    python benchmarks/planning.py [--files N] [--folder DIR] [--cold]

Makes sparse copies of one archive of zeros (about 50 KB of disk each, a minute for 10,000), surveys them with one
thread and with eight, and prints seconds, milliseconds a file and the bytes that were read.  Beside it, what
``torch.load(mmap=True)`` takes to learn the same.  ``--cold`` drops the files from the page cache before each run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from hsloader.formats.survey import survey

TOKENS, HIDDEN, LAYERS = 1745, 7168, 4
PAGE = 4096
LIMIT_MS = 0.2
PEERS = 500  # files that torch.load opens


def make_archive(path: Path) -> None:
    """One sample of 100 MB whose states are zeros."""
    torch.save(
        {
            "input_ids": torch.arange(TOKENS),
            "hidden_states": [torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(LAYERS)],
            "loss_mask": torch.ones(TOKENS, dtype=torch.int64),
        },
        path,
    )


def make_copies(archive: Path, folder: Path, count: int) -> None:
    """Sparse copies of the archive: only pages that are not zero are written."""
    data = archive.read_bytes()
    starts = [at for at in range(0, len(data), PAGE) if data[at : at + PAGE].strip(b"\0")]
    pages = [(at, data[at : at + PAGE]) for at in starts]
    for i in range(count):
        group = folder / f"rows_{i // 2000 * 2000}-{i // 2000 * 2000 + 2000}"
        group.mkdir(exist_ok=True)
        fd = os.open(group / f"data_{i}.pt", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, len(data))
        for at, page in pages:
            os.pwrite(fd, page, at)
        os.close(fd)


def drop_cache(folder: Path) -> None:
    """Write the files back and drop them from the page cache."""
    for path in folder.rglob("*.pt"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bytes_read() -> int:
    """Bytes that this process has read with system calls."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.split()[1])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="hsloader-planning-") as name:
        root = Path(name)
        source = root / "source"
        source.mkdir()
        make_archive(root / "one.pt")
        make_copies(root / "one.pt", source, arguments.files)
        size = (root / "one.pt").stat().st_size
        print(f"{arguments.files} files of {size / 1e6:.1f} MB, {arguments.files * size / 1e9:.0f} GB in all")
        for threads in (1, 8):
            if arguments.cold:
                drop_cache(source)
            before, began, busy = bytes_read(), time.perf_counter(), time.process_time()
            found = survey(source, threads=threads)
            seconds, read = time.perf_counter() - began, bytes_read() - before
            assert len(found.samples) == arguments.files
            per_file, cpu = seconds / arguments.files * 1e3, (time.process_time() - busy) / arguments.files * 1e3
            print(
                f"{threads} thread{'s' * (threads > 1)}: {seconds:.2f} s, {per_file:.3f} ms a file (limit {LIMIT_MS} "
                f"ms, warm), CPU {cpu:.3f} ms; {read / arguments.files / 1e3:.1f} kB of each file read"
            )
        peers = sorted(source.rglob("*.pt"))[:PEERS]
        began = time.perf_counter()
        for path in peers:
            torch.load(path, mmap=True, weights_only=True)
        print(f"torch.load(mmap=True): {(time.perf_counter() - began) / len(peers) * 1e3:.3f} ms a file")


if __name__ == "__main__":
    main()

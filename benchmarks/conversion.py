"""How fast one core converts, beside what reading, checking, encoding, writing and decoding cost on their own.

    python benchmarks/conversion.py [--gigabytes 1] [--folder /tmp] [--source FOLDER] [--segment-size BYTES]

Makes its own samples (hidden size 7168, three auxiliary layers and the last state, bf16, about 100 MB each) in a
temporary folder, converts them pinned to one core with and without the read-back, prints rates, ratio and the peak of
RssAnon, and deletes everything.  The parts are measured in CPU time and in what a conversion finds: the source in the
page cache but not in the processor's, a new file to write, fsync included.  Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hsloader.conversion.checks import StateCheck
from hsloader.conversion.digests import rows_digest
from hsloader.formats.reading import crc32
from hsloader.store.appending import AppendedFile
from hsloader.store.codec import Codec
from hsloader.store.fields import Field

HIDDEN, LAYERS, TOKENS = 7168, 3, 1750
WRITTEN = 160  # frames in the file that is written to measure writing
CHILD = """
import json, os, resource, sys
os.sched_setaffinity(0, {int(sys.argv[4])})
from hsloader import convert
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
convert  # imported on first use
before = cpu()
report = convert(sys.argv[1], sys.argv[2], workers=1, threads=1, read_back=sys.argv[3] == "yes",
                 segment_size=int(sys.argv[5]) or None)
print(json.dumps({"seconds": report.seconds, "cpu": cpu() - before, "raw": report.raw_bytes,
                  "stored": report.stored_bytes, "samples": report.converted}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of samples to make (default 1)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the temporary folder is made")
    parser.add_argument("--source", help="convert this folder instead of samples made here")
    parser.add_argument(
        "--segment-size", type=int, default=0, help="raw bytes of a segment (default: as convert has it)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsloader-benchmark-", dir=options.folder) as folder:
        source = Path(options.source) if options.source else make_samples(Path(folder), options.gigabytes)
        print(f"parts, one thread, {HIDDEN} wide bf16 states:")
        total = 0.0
        for name, rate in parts(Path(folder), source).items():
            total += 1 / rate if name not in ("decode", "digest") else 0
            print(f"  {name:<34} {rate:7.2f} GB/s   {1 / rate:6.3f} CPU s a raw GB")
        print(
            f"  {'all but decode and digest, summed':<34} {1 / total:7.2f} GB/s   {total:6.3f} s a raw GB  (the limit)"
        )
        for read_back, target in (("no", 0.5), ("yes", 0.38)):
            measure(source, Path(folder) / "dst", read_back, target, options.segment_size)


def make_samples(folder: Path, gigabytes: float) -> Path:
    """Write speculators samples, their values cut from one block of noise at different places."""
    import torch

    source = folder / "source"
    source.mkdir()
    noise = torch.randn(64 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    layer_bytes = 2 * HIDDEN * TOKENS
    for i in range(max(1, round(gigabytes * 1e9 / (layer_bytes * (LAYERS + 1))))):
        layers = [
            noise[((4 * i + k) * 911_027) % (len(noise) - layer_bytes // 2) :][: layer_bytes // 2].reshape(
                TOKENS, HIDDEN
            )
            for k in range(LAYERS + 1)
        ]
        record = {
            "input_ids": torch.arange(TOKENS) + i,
            "hidden_states": [layer.clone() for layer in layers],
            "loss_mask": (torch.arange(TOKENS) > TOKENS // 3).long(),
        }
        torch.save(record, source / f"data_{i}.pt")
    return source


def parts(folder: Path, source: Path) -> dict[str, float]:
    """GB (raw) a CPU second of each part on one thread, over chunks as a conversion cuts them."""
    field = Field(name="hidden_states", dtype="bfloat16", shape=(LAYERS, HIDDEN))
    codec = Codec(field, 64)
    values = np.random.default_rng(0).standard_normal((64, LAYERS * HIDDEN), np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    layers = [np.ascontiguousarray(bits[:, k * HIDDEN : (k + 1) * HIDDEN]) for k in range(LAYERS)]
    encoder, check = codec.encoder(), StateCheck("bfloat16", np.dtype("<u2"))
    frame = bytes(encoder.encode(layers))
    out = np.empty(codec.chunk_bytes, np.uint8)
    files = itertools.cycle(sorted(path for path in source.rglob("*") if path.is_file()))
    path = folder / "written"
    memory = memoryview(bytearray(bits.nbytes // LAYERS))

    def read() -> int:
        with open(next(files), "rb", buffering=0) as file:
            return sum(iter(lambda: file.readinto(memory), 0))

    def write() -> int:
        file = AppendedFile(os.fspath(path))
        for _ in range(WRITTEN):
            file.append([memoryview(frame)])
        file.complete()
        file.sync()
        file.close()
        path.unlink()
        return WRITTEN * bits.nbytes

    def of_a_chunk(work: Callable[[], object]) -> Callable[[], int]:
        def one() -> int:
            work()
            return bits.nbytes

        return one

    return {
        "read (page cache)": _rate(read),
        "CRC-32 of the source": _rate(of_a_chunk(lambda: crc32(bits))),
        "finite values, zero states": _rate(of_a_chunk(lambda: check(layers))),
        "shuffle, zstd, crc32c (encode)": _rate(of_a_chunk(lambda: encoder.encode(layers))),
        "write and fsync": _rate(write),
        "digest": _rate(of_a_chunk(lambda: rows_digest(layers))),
        "decode": _rate(of_a_chunk(lambda: codec.decode(memoryview(frame), out))),
    }


def _rate(work: Callable[[], int]) -> float:
    """GB a CPU second; ``work`` tells the bytes it went through."""
    work()
    size, began = 0, time.process_time()
    while time.process_time() - began < 0.4:
        size += work()
    return size / (time.process_time() - began) / 1e9


def measure(source: Path, dst: Path, read_back: str, target: float, segment_size: int) -> None:
    """Convert in a process of its own on one core, watching its anonymous memory."""
    core = min(os.sched_getaffinity(0))
    for path in source.rglob("*"):  # into the page cache
        if path.is_file():
            path.read_bytes()
    command = [sys.executable, "-c", CHILD, str(source), str(dst), read_back, str(core), str(segment_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.01)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    shutil.rmtree(dst)
    raw = found["raw"] / 1e9
    proof = "with read-back" if read_back == "yes" else "without read-back"
    print(
        f"\nconvert, one core, {proof}: {found['samples']} samples, {raw:.2f} GB raw\n"
        f"  rate          {raw / found['seconds']:6.3f} GB/s    (target {target}; fsync included)\n"
        f"  CPU time      {raw / found['cpu']:6.3f} GB a CPU second    ({found['cpu'] / raw:.2f} s a raw GB)\n"
        f"  ratio         {found['raw'] / found['stored']:6.3f}\n"
        f"  RssAnon peak  {peak / 1e6:6.0f} MB    (target below 1074)"
    )


def _anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    main()

"""How fast one core converts, beside what reading, checking, encoding, writing and decoding cost on their own.

    python benchmarks/conversion.py [--gigabytes 1] [--folder /tmp] [--source FOLDER]

Makes its own samples (hidden size 7168, three auxiliary layers and the last state, bf16, about 100 MB each) in a
temporary folder, converts them pinned to one core with and without the read-back, prints rates, ratio and the peak of
RssAnon, and deletes everything.  Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
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
from hsloader.store.codec import Codec
from hsloader.store.fields import Field

HIDDEN, LAYERS, TOKENS = 7168, 3, 1750
CHILD = """
import json, os, resource, sys
os.sched_setaffinity(0, {int(sys.argv[4])})
from hsloader import convert
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
convert  # imported on first use
before = cpu()
report = convert(sys.argv[1], sys.argv[2], workers=1, threads=1, read_back=sys.argv[3] == "yes")
print(json.dumps({"seconds": report.seconds, "cpu": cpu() - before, "raw": report.raw_bytes,
                  "stored": report.stored_bytes, "samples": report.converted}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of samples to make (default 1)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the temporary folder is made")
    parser.add_argument("--source", help="convert this folder instead of samples made here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsloader-benchmark-", dir=options.folder) as folder:
        source = Path(options.source) if options.source else make_samples(Path(folder), options.gigabytes)
        print(f"parts, one thread, {HIDDEN} wide bf16 states:")
        total = 0.0
        for name, rate in parts(Path(folder)).items():
            total += 1 / rate if name not in ("decode", "digest") else 0
            print(f"  {name:<34} {rate:7.2f} GB/s   {1 / rate:6.3f} s a raw GB")
        print(
            f"  {'all but decode and digest, summed':<34} {1 / total:7.2f} GB/s   {total:6.3f} s a raw GB  (the limit)"
        )
        for read_back, target in (("no", 0.5), ("yes", 0.38)):
            measure(source, Path(folder) / "dst", read_back, target)


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


def parts(folder: Path) -> dict[str, float]:
    """GB/s (raw) of each part on one thread, over chunks as a conversion cuts them."""
    field = Field(name="hidden_states", dtype="bfloat16", shape=(LAYERS, HIDDEN))
    codec = Codec(field, 64)
    values = np.random.default_rng(0).standard_normal((64, LAYERS * HIDDEN), np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    layers = [np.ascontiguousarray(bits[:, k * HIDDEN : (k + 1) * HIDDEN]) for k in range(LAYERS)]
    encoder, check = codec.encoder(), StateCheck("bfloat16", np.dtype("<u2"))
    frame = bytes(encoder.encode(layers))
    out = np.empty(codec.chunk_bytes, np.uint8)
    path = folder / "chunks"
    path.write_bytes(bits.tobytes() * 40)
    with open(path, "rb") as reading, open(folder / "written", "wb") as writing:
        places = iter(range(10**9))
        return {
            "read (page cache)": _rate(
                lambda: os.preadv(reading.fileno(), [out.data], (next(places) % 40) * codec.chunk_bytes), bits.nbytes
            ),
            "CRC-32 of the source": _rate(lambda: crc32(bits), bits.nbytes),
            "finite values, zero states": _rate(lambda: check(layers), bits.nbytes),
            "shuffle, zstd, crc32c (encode)": _rate(lambda: encoder.encode(layers), bits.nbytes),
            "write (page cache)": _rate(
                lambda: os.pwrite(writing.fileno(), frame, (next(places) % 200) * len(frame)), bits.nbytes
            ),
            "digest": _rate(lambda: rows_digest(layers), bits.nbytes),
            "decode": _rate(lambda: codec.decode(memoryview(frame), out), bits.nbytes),
        }


def _rate(work: Callable[[], object], size: int) -> float:
    work()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.4:
        work()
        count += 1
    return size * count / (time.perf_counter() - began) / 1e9


def measure(source: Path, dst: Path, read_back: str, target: float) -> None:
    """Convert in a process of its own on one core, watching its anonymous memory."""
    core = min(os.sched_getaffinity(0))
    for path in source.rglob("*"):  # into the page cache
        if path.is_file():
            path.read_bytes()
    command = [sys.executable, "-c", CHILD, str(source), str(dst), read_back, str(core)]
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

"""How far frames shrink hidden states, how fast they are made and decoded, and what the limits are.

    python benchmarks/frames.py [--states FOLDER] [--threads N]

Reads every ``*.pt`` file of FOLDER (``hidden_states`` a list of ``[tokens, hidden]`` bf16 tensors, the last one the
last state), takes the auxiliary layers as one field and repeats them until source, frames and output are well beyond
the caches.  Figures are GB of raw states a second, medians of five.  Beside them: memcpy, zstd alone on the top plane
(the limit if shuffling, framing and checksums cost nothing), and the planes' order-0 entropy, which bounds the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs.zstd
import numpy as np
import torch

from hsloader.store.codec import Codec
from hsloader.store.fields import Field
from hsloader.store.frames import entropy_compressor

RAW_BYTES = 192 * 1024 * 1024
REPEATS = 5

Array = np.ndarray[Any, Any]


def load_layers(folder: Path) -> list[Array]:
    """The auxiliary layers of all samples, one ``[tokens, hidden]`` array of bits each."""
    samples = [torch.load(path, weights_only=True)["hidden_states"] for path in sorted(folder.glob("*.pt"))]
    layers = zip(*samples, strict=True)
    return [torch.cat(layer).view(torch.uint16).numpy() for layer in layers][:-1]


def speed(work: Callable[[], object], raw: int) -> float:
    """GB/s of ``work`` over ``raw`` bytes: the median of five after one run to warm up."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return raw / statistics.median(times[1:]) / 1e9


def entropy(plane: Array) -> float:
    """Order-0 entropy of bytes, in bits."""
    share = np.bincount(plane.reshape(-1), minlength=256) / plane.size
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def threaded(
    pool: ThreadPoolExecutor, threads: int, work: Callable[[int, range], None], chunks: int
) -> Callable[[], None]:
    """``work(thread, its chunks)`` in all threads at once, to be timed."""
    shares = [range(thread, chunks, threads) for thread in range(threads)]

    def run() -> None:
        for _ in pool.map(work, range(threads), shares):
            pass

    return run


def measure(layers: Sequence[Array], chunk_rows: int, threads: int) -> str:
    """One row of the table: the field in chunks of ``chunk_rows``."""
    tokens, hidden = layers[0].shape
    codec = Codec(Field(name="hidden_states", dtype="bfloat16", shape=(len(layers), hidden)), chunk_rows)
    parts = [[layer[row : row + chunk_rows] for layer in layers] for row in range(0, tokens - chunk_rows, chunk_rows)]
    raw = len(parts) * codec.chunk_bytes
    encoders = [codec.encoder() for _ in range(threads)]
    frames = [bytes(encoders[0].encode(part)) for part in parts]
    outs = np.zeros((len(parts), codec.chunk_bytes), np.uint8)

    def encode(thread: int, chunks: range) -> None:
        for chunk in chunks:
            encoders[thread].encode(parts[chunk])

    def decode(_: int, chunks: range) -> None:
        for chunk in chunks:
            codec.decode(memoryview(frames[chunk]), outs[chunk])

    everything = range(len(parts))
    figures = [speed(lambda: encode(0, everything), raw), speed(lambda: decode(0, everything), raw)]
    with ThreadPoolExecutor(threads) as pool:
        figures += [speed(threaded(pool, threads, work, len(parts)), raw) for work in (encode, decode)]
    shape = f"{chunk_rows:>5} rows {codec.chunk_bytes // 1024:>6} KiB in blocks of {codec.block_bytes // 1024:>4} KiB"
    return f"{shape}  {raw / sum(map(len, frames)):.4f}  " + "  ".join(f"{figure:>7.2f}" for figure in figures)


def limits(layers: Sequence[Array]) -> list[str]:
    """What memcpy and zstd do by themselves, and the entropy bound."""
    rows = np.concatenate([layer[: 16 * 1024 * 1024 // layer.shape[1]] for layer in layers])
    planes = rows.view(np.uint8).reshape(-1, 2)
    top = np.ascontiguousarray(planes[:, 1])
    bound = 16 / (entropy(planes[:, 0]) + entropy(top))
    pieces = [top[start : start + 144 * 1024].data for start in range(0, len(top), 144 * 1024)]
    compressor = entropy_compressor()
    streams = [compressor.compress(piece) for piece in pieces]
    target, plane = np.empty_like(rows), np.empty(144 * 1024, np.uint8)

    def compress() -> None:
        for piece in pieces:
            compressor.compress(piece)

    def decompress() -> None:
        for stream, piece in zip(streams, pieces, strict=True):
            numcodecs.zstd.decompress(stream, plane[: len(piece)])

    return [
        f"memcpy                       {speed(lambda: np.copyto(target, rows), rows.nbytes):6.2f} GB/s",
        f"zstd, top plane, compress    {speed(compress, rows.nbytes):6.2f} GB/s of raw states",
        f"zstd, top plane, decompress  {speed(decompress, rows.nbytes):6.2f} GB/s of raw states",
        f"order-0 entropy of planes    {bound:6.4f} as a ratio",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "real"
    parser.add_argument("--states", type=Path, default=default, help="folder of .pt files with bf16 states")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    layers = load_layers(options.states)
    times = -(-RAW_BYTES // sum(layer.nbytes for layer in layers))
    repeated = [np.tile(layer, (times, 1)) for layer in layers]
    print(f"{len(layers)} layers of hidden size {layers[0].shape[1]}, {len(layers[0])} tokens, repeated {times} times")
    print("\n".join(limits(repeated)))
    print(f"\n{'chunk':<39}  ratio   encode  decode  encode  decode (GB/s; 1 thread, {options.threads} threads)")
    for chunk_rows in (16, 32, 64, 128, 256):
        print(measure(repeated, chunk_rows, options.threads))


if __name__ == "__main__":
    main()

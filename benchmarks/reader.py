"""How fast the reader fills batches, beside the limits of decoding and of the disk measured in the same run.

    python benchmarks/reader.py [--folder FOLDER] [--hidden N] [--gib N] [--threads 1 2] [--modes mmap pread direct]

Writes a dataset of synthetic states (three auxiliary layers and the last one, bf16, ~1,700 tokens a sample), then
prints GB of decoded states a second: the decode limit (threads that decode the same frames from the page cache into
memory that has its pages, nothing else), the disk limit (the same files read cold, times the compression ratio), and
the reader with a warm and with a cold page cache. Batches are four samples of at most 2,048 tokens.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hsloader.monitor.counters import ThreadCounter
from hsloader.reader.client import FeederClient
from hsloader.reader.options import ReadOptions
from hsloader.reader.pieces import PIECES, BatchRequest, span_offsets
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.pages import page_memory
from hsloader.store.writer import Writer

FIELDS = {"input_ids": "int32", "loss_mask": "uint8"}
BATCH = 4
LONGEST = 2048
REPEATS = 3


def write_dataset(path: Path, hidden: int, raw_bytes: float) -> Dataset:
    """Synthetic states: normal values under a scale of their own for each dimension, as real states have."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 1.0, hidden)).astype(np.float32)
    fields = {"hidden_states": ("bfloat16", (3, hidden)), "last_hidden_state": ("bfloat16", (hidden,)), **FIELDS}
    block = rng.normal(size=(512, hidden)).astype(np.float32)
    with Writer(path, fields, typical_length=1700, threads=os.cpu_count() or 1) as writer:
        written = 0.0
        while written < raw_bytes:
            length = int(rng.integers(1200, 2300))
            rows = block[rng.integers(0, len(block), length * 4)] * rng.choice([-1, 1], (length * 4, 1)) * scale
            bits = (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(length, 4, hidden)
            writer.append(
                hidden_states=np.ascontiguousarray(bits[:, :3]),
                last_hidden_state=np.ascontiguousarray(bits[:, 3]),
                input_ids=rng.integers(0, 100_000, length).astype(np.int32),
                loss_mask=np.ones(length, np.uint8),
            )
            written += bits.nbytes
    return open_dataset(path)


def shard_files(dataset: Dataset) -> list[Path]:
    """The state fields' shards."""
    found = []
    for segment in dataset.segments:
        for name, field in dataset.fields.items():
            if not field.is_token_field:
                array = segment.array(name)
                found += [array.shard_path(shard) for shard in range(array.shards)]
    return found


def in_threads(threads: int, work: Callable[[int], int]) -> float:
    """GB/s of ``work(thread)``, which returns bytes."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(threads)))
        begun = time.perf_counter()
        done = sum(pool.map(work, range(threads)))
        return done / (time.perf_counter() - begun) / 1e9


def decode_limit(dataset: Dataset, threads: int) -> None:
    """Print GB/s of decoded states: the frames of all shards from the page cache into pre-faulted memory."""
    jobs = []
    for segment in dataset.segments:
        for name, field in dataset.fields.items():
            if field.is_token_field:
                continue
            array = segment.array(name)
            for number in range(array.shards):
                shard = array.open_shard(number)
                data = np.frombuffer(mmap.mmap(shard.fd, shard.size, prot=mmap.PROT_READ), np.uint8)
                held = array.records[number].chunks
                jobs += [(array.codec, data[o : o + n]) for o, n in shard.index[:held].astype(np.int64).tolist()]
    room = np.ones((threads, 1 << 27), np.uint8)
    for _, frame in jobs:
        frame.sum()

    def work(thread: int) -> int:
        at = done = 0
        for codec, frame in jobs[thread::threads]:
            if at + codec.chunk_bytes > room.shape[1]:
                at = 0
            codec.decode(frame, room[thread, at : at + codec.chunk_bytes])
            at += codec.chunk_bytes
            done += codec.chunk_bytes
        return done

    used = time.process_time()
    rates = [in_threads(threads, work) for _ in range(REPEATS)]
    used = time.process_time() - used
    total = sum(codec.chunk_bytes for codec, _ in jobs) * REPEATS / 1e9
    print(
        f"decode limit, {threads} threads: {statistics.median(rates):.2f} GB/s "
        f"({total / used:.2f} GB a second of CPU time)"
    )


def disk_limit(dataset: Dataset) -> float:
    """GB/s of the files from a cold disk, 4 MiB at a time with eight threads: by O_DIRECT or buffered, the faster."""
    return max(disk_rate(dataset, direct) for direct in (True, False))


def disk_rate(dataset: Dataset, direct: bool) -> float:
    """GB/s of one of the two ways."""
    forget(dataset)
    jobs = [(path, at) for path in shard_files(dataset) for at in range(0, path.stat().st_size, 4 << 20)]
    lock = threading.Lock()

    def work(_: int) -> int:
        buffer = page_memory(4 << 20).data
        done = 0
        while True:
            with lock:
                if not jobs:
                    return done
                path, at = jobs.pop(0)
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            done += os.preadv(fd, [buffer], at)
            os.close(fd)

    return in_threads(8, work)


def forget(dataset: Dataset) -> None:
    """Take the shards out of the page cache."""
    for path in shard_files(dataset):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def batches(dataset: Dataset, seed: int) -> Iterator[BatchRequest]:
    """All samples once, in random order, padded to the longest of the batch."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    lengths = np.minimum(dataset.lengths, LONGEST)
    for start in range(0, len(order) - BATCH + 1, BATCH):
        samples = order[start : start + BATCH]
        rows = int(lengths[samples].max())
        pieces = [
            (field, sample, 0, int(lengths[sample]), i * rows)
            for field in range(len(dataset.fields))
            for i, sample in enumerate(samples.tolist())
        ]
        yield BatchRequest((rows * BATCH,) * len(dataset.fields), np.array(pieces, PIECES))


def stream(client: FeederClient, dataset: Dataset, seed: int, epochs: int = 1) -> float:
    """GB/s of rows delivered, without padding, over ``epochs`` epochs one behind the other."""
    width = sum(field.row_bytes for field in dataset.fields.values())
    asked = enumerate(batch for number in range(epochs) for batch in batches(dataset, seed + number))
    waiting: list[int] = []
    begun = time.perf_counter()
    delivered = 0.0
    client.abandon()
    pending = next(asked, None)
    while pending or waiting:
        while pending and client.free and client.submit(*pending):
            delivered += sum(int(piece["stop"]) for piece in pending[1].pieces if piece["field_index"] == 0) * width
            waiting.append(pending[0])
            pending = next(asked, None)
        client.wait(waiting[0])
        client.done(waiting.pop(0))
    return delivered / (time.perf_counter() - begun) / 1e9


def measure(dataset: Dataset, options: ReadOptions, *, cold: bool) -> None:
    """Print a line for one way to read."""
    widths = [field.row_bytes for field in dataset.fields.values()]
    size = span_offsets([LONGEST * BATCH] * len(widths), widths)[1]
    rates, seconds, cpu, decoded, reads = [], 0.0, 0.0, 0.0, [0.0, 0.0]
    rounds = REPEATS if cold else 1
    for number in range(rounds):
        # A map keeps its pages: for a cold cache each epoch has a feeder of its own.
        budget = 4 * size + (16 << 20)
        with FeederClient(dataset, list(dataset.fields), slot_bytes=size, budget=budget, options=options) as client:
            warm_up(client, dataset)
            if cold:
                forget(dataset)
            else:
                stream(client, dataset, 0)  # maps the shards
            before, used = client.stats(), cpu_seconds(client)
            rates += [stream(client, dataset, number, 1 if cold else 4) for number in range(1 if cold else REPEATS)]
            after = client.stats()
            cpu += cpu_seconds(client) - used
            seconds += after["decode_seconds"] - before["decode_seconds"]
            decoded += (after["decoded_bytes"] - before["decoded_bytes"]) / 1e9
            reads[0] += (after["read_bytes"] - before["read_bytes"]) / 1e9
            reads[1] += after["read_seconds"] - before["read_seconds"]
    print(
        f"{options.mode:>7} {options.threads} decoders, {'cold' if cold else 'warm'}:"
        f" {statistics.median(rates):6.2f} GB/s (feeder {decoded / cpu:.2f} GB a second of CPU time; a decoder at work "
        f"{decoded / seconds:.2f} GB/s, a read thread at work {reads[0] / max(1e-3, reads[1]):.2f} GB/s encoded)"
    )


def warm_up(client: FeederClient, dataset: Dataset) -> None:
    """Give all slots their pages and have the feeder ready, without touching a state field's shard."""
    ids = list(dataset.fields).index("input_ids")
    rows = tuple(LONGEST * BATCH if number != ids else 1 for number in range(len(dataset.fields)))
    for key in range(client.slots):
        client.submit(key, BatchRequest(rows, np.array([(ids, 0, 0, 1, 0)], PIECES)))
    for key in range(client.slots):
        client.wait(key)


def cpu_seconds(client: FeederClient) -> float:
    """User and system time of the feeder and its helpers so far."""
    total = 0
    for pid in {int(pid) for pid in client.ring.threads[:, ThreadCounter.PROCESS]}:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def first_batch(dataset: Dataset) -> None:
    """Print how long after construction the first batch is there, with a warm cache."""
    widths = [field.row_bytes for field in dataset.fields.values()]
    size = span_offsets([LONGEST * BATCH] * len(widths), widths)[1]
    begun = time.perf_counter()
    with FeederClient(dataset, list(dataset.fields), slot_bytes=size, budget=4 * size + (16 << 20)) as client:
        client.submit(0, next(batches(dataset, 0)))
        client.wait(0)
        print(f"first batch {time.perf_counter() - begun:.2f} s after construction (ring {4 * size / 2**30:.1f} GiB)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the dataset is made (default: a temporary folder)")
    parser.add_argument("--dataset", type=Path, help="a dataset of an earlier run, made there if it does not exist")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--gib", type=float, default=1.5, help="raw bytes of the dataset")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", default=["mmap", "pread", "direct"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = args.dataset or Path(folder) / "data.hs"
        dataset = open_dataset(path) if path.exists() else write_dataset(path, args.hidden, args.gib * 2**30)
        ratio = dataset.manifest.raw_bytes / dataset.manifest.stored_bytes
        print(f"{dataset}\n{dataset.manifest.raw_bytes / 1e9:.2f} GB raw, ratio {ratio:.3f}, {os.cpu_count()} cores")
        disk = disk_limit(dataset)
        print(f"disk limit {disk:.2f} GB/s encoded, {disk * ratio:.2f} GB/s decoded")
        for threads in args.threads:
            decode_limit(dataset, threads)
        first_batch(dataset)
        for cold in (False, True):
            for mode in args.modes:
                for threads in args.threads:
                    measure(dataset, ReadOptions(mode=mode, threads=threads), cold=cold)
        dataset.close()


if __name__ == "__main__":
    main()

"""How fast batches reach a GPU from a warm page cache, and how little that disturbs the training step.

    python benchmarks/gpu.py [--out FOLDER] [--data FOLDER] [--gigabytes 8] [--only PART ...]

Writes ``gpu.json`` into FOLDER (default: $OUT, else the working folder) and prints a line a figure:

* throughput: decoded bytes a second into GPU memory, against torch.load in the best stock setting, and against the
  limits measured in the same run: decoding on all cores, filling the ring without a GPU, copying pinned memory;
* launch: a step of 600 small kernels, alone and while the loader delivers about 2 GB/s;
* compute: a step of 50 ms of matrix products that needs 100 MB, alone and with the loader, and its wait for data;
* first_batch: seconds from the construction of a loader with 1 GiB of budget to the first batch on the GPU;
* memory: growth over an epoch beyond the state after the first batch;
* parts: where the microseconds inside ``next()`` go;
* sweep (only where it is asked for): throughput by the reader's settings.

About 4 minutes on 16 cores.  ``--device cpu`` with small sizes only tries the script itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_parts import parts, sweep
from loader_data import Samples, anonymous_bytes, machine, state_bytes, stock_loader, warm_caches

import hsloader
from hsloader.benchmark.decoding import frames_of, measure_decoding
from hsloader.benchmark.timing import Deadline
from hsloader.monitor.counters import TrainerCounter

_KERNELS = 600
_LAUNCH_STEP = 0.014
_LAUNCH_RATE = 2e9
_PREFETCH = 2 << 30


class Bench:
    """The settings, the data, and the results so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        self.hidden, self.tokens = arguments.hidden, arguments.tokens
        self.seconds = arguments.seconds
        self.rounds = arguments.rounds
        self.cores = len(os.sched_getaffinity(0))
        self.dataset = folder / "data.hs"
        self.files = folder / "files"
        samples = Samples(self.hidden, self.tokens)
        self.count = max(8, int(arguments.gigabytes * 1e9) // samples.bytes)
        self.sample_bytes = samples.bytes
        self.results: dict[str, Any] = {"machine": machine(), "settings": vars(arguments) | {"samples": self.count}}
        begun = time.perf_counter()
        samples.write_dataset(self.dataset, self.count, self.cores)
        self.paths = samples.write_files(self.files, min(self.count, max(4, self.count // 4)))
        warm_caches(folder)
        self.say("setup", {"seconds": time.perf_counter() - begun})

    def say(self, name: str, figures: dict[str, Any]) -> None:
        """Note figures and print them."""
        self.results[name] = figures
        text = ", ".join(f"{key} {_text(value)}" for key, value in figures.items())
        print(f"{name:12} {text}", flush=True)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def loader(self, max_tokens: int, **settings: Any) -> hsloader.DataLoader:
        settings = {"device": self.device, "read": hsloader.ReadOptions(prefetch=_PREFETCH), **settings}
        return hsloader.DataLoader(
            self.dataset,
            trainer="speculators-0.9",
            max_tokens=max_tokens,
            max_length=min(max_tokens, self.tokens),
            log_every=0,
            **settings,
        )

    def rate(self, **settings: Any) -> tuple[float, dict[str, float]]:
        """Bytes a second of batches of two samples, a barrier after each, once every slot was used; and the stats."""
        with self.loader(2 * self.tokens, **settings) as loader:
            batches = self.endless(loader)
            self.use_every_slot(loader, batches)
            moved, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < self.seconds:
                moved += state_bytes(next(batches))
                self.sync()
            return moved / (time.perf_counter() - begun), loader.stats()

    def use_every_slot(self, loader: hsloader.DataLoader, batches: Iterator[Any]) -> None:
        """Take so many batches that each slot has its pages and is registered: that is once, at the start."""
        for _ in range(loader._connection.client.slots + 2):  # type: ignore[union-attr]
            next(batches)
            self.sync()

    def endless(self, loader: hsloader.DataLoader) -> Iterator[Any]:
        while True:
            yield from loader

    def steps(self, step: Callable[[], None], count: int, batches: Iterator[Any] | None) -> float:
        """Seconds a step, with a batch before each if there are batches."""
        self.sync()
        begun = time.perf_counter()
        for _ in range(count):
            if batches is not None:
                batch = next(batches)
                batch["loss_mask"][0, 0]  # the script touches it, and waits for nothing
            step()
        self.sync()
        return (time.perf_counter() - begun) / count

    def tokens_of(self, size: float) -> int:
        """Tokens whose states take ``size`` bytes."""
        return max(16, int(size / (self.sample_bytes / self.tokens)))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def throughput(bench: Bench) -> None:
    """Batches of two samples as fast as they come, a barrier after each; and the stock ways."""
    rate, stats = bench.rate()
    to_host, _ = bench.rate(device="cpu")
    stock = {}
    for workers, use_mmap in ((0, False), (0, True), (2, True), (4, False), (4, True)):
        name = f"{workers} workers{', mmap' if use_mmap else ''}"
        stock[name] = _stock_rate(bench, workers, use_mmap)
        gc.collect()
    best = max(stock, key=lambda name: stock[name])
    bench.say(
        "throughput",
        {
            "hsloader_gb_s": rate / 1e9,
            "best_stock_gb_s": stock[best] / 1e9,
            "best_stock": best,
            "times_stock": rate / stock[best],
            "to_host_memory_gb_s": to_host / 1e9,
            "limit_decode_gb_s": _decode_limit(bench) / 1e9,
            "limit_copy_gb_s": _copy_limit(bench) / 1e9,
            "read_bytes": stats["read_bytes"],
        },
    )
    bench.results["stock_gb_s"] = {name: value / 1e9 for name, value in stock.items()}


def _stock_rate(bench: Bench, workers: int, use_mmap: bool) -> float:
    loader = stock_loader(bench.paths, workers=workers, use_mmap=use_mmap, tokens=bench.tokens, pin=bench.cuda)
    moved, begun, count = 0, 0.0, 0
    end = time.perf_counter() + 3 * bench.seconds
    while not begun or time.perf_counter() - begun < bench.seconds:
        for batch in loader:
            for value in batch.values():
                value.to(bench.device, non_blocking=True)
            bench.sync()
            count += 1
            if begun:
                moved += state_bytes(batch)
            elif count >= max(2, workers):  # the start of the workers is not counted
                begun = time.perf_counter()
            if begun and time.perf_counter() - begun >= bench.seconds:
                break
        if time.perf_counter() > end:
            break
    return moved / max(time.perf_counter() - begun, 1e-9) if begun else 0.0


def _decode_limit(bench: Bench) -> float:
    """Bytes a second that all cores decode when nothing else is to be done."""
    with hsloader.open_dataset(bench.dataset) as dataset:
        frames = frames_of(dataset, 1 << 30)
    if frames is None:
        return float("nan")
    (found,) = measure_decoding(frames, [bench.cores], Deadline(bench.seconds), seconds=bench.seconds / 2)
    return found.rate


def _copy_limit(bench: Bench) -> float:
    """Bytes a second of a copy of pinned memory to the device."""
    size = min(512 << 20, max(1 << 20, 2 * bench.sample_bytes))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.cuda)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target.copy_(host)
    bench.sync()
    begun = time.perf_counter()
    for _ in range(10):
        target.copy_(host, non_blocking=True)
    bench.sync()
    return 10 * size / (time.perf_counter() - begun)


def _compare(bench: Bench, name: str, step: Callable[[], None], batch_bytes: float) -> None:
    """A step alone and with the loader, in turns of a third of a second: clocks and neighbours change by the second."""
    for _ in range(5):
        step()
    count = max(3, round(0.3 / bench.steps(step, 5, None)))
    pairs: list[tuple[float, float]] = []
    inside = waiting = fed = 0.0
    with bench.loader(bench.tokens_of(batch_bytes)) as loader:
        client = loader._connection.client  # type: ignore[union-attr]
        batches = bench.endless(loader)
        bench.use_every_slot(loader, batches)
        bench.steps(step, count, batches)
        begun = time.perf_counter()
        while time.perf_counter() - begun < bench.rounds * bench.seconds or not pairs:
            alone = bench.steps(step, count, None)
            before = int(client.counters[TrainerCounter.NEXT_NS]), int(client.counters[TrainerCounter.WAIT_NS])
            pairs.append((alone, bench.steps(step, count, batches)))
            inside += (int(client.counters[TrainerCounter.NEXT_NS]) - before[0]) / 1e9
            waiting += (int(client.counters[TrainerCounter.WAIT_NS]) - before[1]) / 1e9
            fed += count * pairs[-1][1]
    ratios = [with_loader / alone for alone, with_loader in pairs]
    bench.say(
        name,
        {
            "alone_ms": statistics.median(alone for alone, _ in pairs) * 1e3,
            "with_loader_ms": statistics.median(with_loader for _, with_loader in pairs) * 1e3,
            "slowdown": statistics.median(ratios),
            "slowdown_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)]
            if len(ratios) > 1
            else ratios,
            "turns": len(pairs),
            "gb_s": batch_bytes * count * len(pairs) / fed / 1e9,
            "inside_next_share": inside / fed,
            "inside_next_ms": inside / (count * len(pairs)) * 1e3,
            "waiting_for_data_share": waiting / fed,
        },
    )


def launch(bench: Bench) -> None:
    """600 small kernels: the step is as fast as Python launches them."""
    step = launching_step(bench)
    _compare(bench, "launch", step, _LAUNCH_RATE * _LAUNCH_STEP if bench.cuda else bench.sample_bytes / 4)


def launching_step(bench: Bench) -> Callable[[], None]:
    """600 small kernels with as much Python around them as a real model has: 14 ms in all, by trial."""
    values = torch.zeros(1024, device=bench.device)
    loops = 0

    def step() -> None:
        for _ in range(_KERNELS):
            values.add_(1.0)
            for _ in range(loops):
                pass

    bench.steps(step, 20, None)
    bare = spent = bench.steps(step, 20, None)
    if bench.cuda and bare < _LAUNCH_STEP:
        loops = 100
        for _ in range(4):  # what a loop costs depends on the clock: each trial corrects the one before
            spent = min(bench.steps(step, 10, None) for _ in range(3))
            loops = max(1, round(loops * (_LAUNCH_STEP - bare) / max(spent - bare, 1e-6)))
    return step


def compute(bench: Bench) -> None:
    """50 ms of matrix products: the GPU is busy, the host waits."""
    size = 8192 if bench.cuda else 128
    # A multiple of some 1.4 ms: 50 ms are met within 2 %.
    left = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    torch.mm(left, left, out=out)
    single = bench.steps(lambda: torch.mm(left, left, out=out), 10, None)  # type: ignore[arg-type]
    wanted = 0.05 if bench.cuda else 0.002
    products = max(1, round(wanted / single))

    def step() -> None:
        for _ in range(products):
            torch.mm(left, left, out=out)
        bench.sync()  # as a loss.item() does

    _compare(bench, "compute", step, 100e6 if bench.cuda else bench.sample_bytes / 2)


def first_batch(bench: Bench) -> None:
    """From construction to a batch on the device, five times; CUDA is initialised."""
    spent = []
    for _ in range(5):
        gc.collect()
        begun = time.perf_counter()
        with bench.loader(bench.tokens, read=hsloader.ReadOptions(prefetch=1 << 30)) as loader:
            next(iter(loader))
            bench.sync()
            spent.append(time.perf_counter() - begun)
    bench.say("first_batch", {"median_s": statistics.median(spent), "worst_s": max(spent)})


def memory(bench: Bench) -> None:
    """RssAnon of trainer and feeder, file descriptors and threads, after the first batch and after an epoch."""
    with bench.loader(2 * bench.tokens) as loader:
        batches = iter(loader)
        next(batches)
        bench.sync()
        client = loader._connection.client  # type: ignore[union-attr]
        pids = [os.getpid(), client.pid]
        before = anonymous_bytes(pids), _counts(pids)
        for batch in batches:
            del batch
        bench.sync()
        after = anonymous_bytes(pids), _counts(pids)
    bench.say(
        "memory",
        {"anonymous_growth_mb": (after[0] - before[0]) / 1e6, "before": before[1], "after": after[1]},
    )


def _counts(pids: list[int | None]) -> dict[str, int]:
    known = [pid for pid in pids if pid is not None]
    return {
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in known),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in known),
    }


def main() -> None:
    """Run what was asked for and write the results, also of a part that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for gpu.json")
    parser.add_argument(
        "--data", default=None, help="folder for the data, removed at the end (default: a temporary one)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of decoded states")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="times as long for each comparison of steps")
    parser.add_argument("--only", nargs="*", default=None, help="parts to run")
    arguments = parser.parse_args()
    known = (first_batch, parts, throughput, launch, compute, memory, sweep)
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
        bench = Bench(arguments, Path(folder))
        for part in known:
            if part.__name__ not in arguments.only if arguments.only else part is sweep:
                continue
            try:
                part(bench)
            finally:
                (Path(arguments.out) / "gpu.json").write_text(json.dumps(bench.results, indent=2))


if __name__ == "__main__":
    main()

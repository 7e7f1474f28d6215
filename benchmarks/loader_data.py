"""What the loader's benchmarks read: a dataset and the same samples as ``.pt`` files, and the stock way to load those.

States are synthetic but compress as real ones (bf16, about 10.7 bits of information in 16).  A few distinct samples are
written over and over: no reader can know.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hsloader

LAYERS = 4  # three for the draft model's input, and the last
DISTINCT = 4


class Samples:
    """Distinct samples of ``tokens`` tokens; ``bytes`` of one sample's states."""

    def __init__(self, hidden: int, tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.hidden, self.tokens = hidden, tokens
        self.bytes = LAYERS * hidden * 2 * tokens
        scales = rng.lognormal(0.0, 0.5, (LAYERS, 1, hidden)).astype(np.float32)
        self._samples = []
        for _ in range(DISTINCT):
            loud = rng.lognormal(0.0, 0.15, (tokens, 1)).astype(np.float32)
            layers = [
                torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32) * scale * loud).to(
                    torch.bfloat16
                )
                for scale in scales
            ]
            self._samples.append((torch.from_numpy(rng.integers(0, 32_000, tokens)), layers))
        self._mask = torch.from_numpy((np.arange(tokens) >= tokens // 3).astype(np.int64))

    def write_dataset(self, path: Path, count: int, threads: int) -> None:
        """``count`` samples as a dataset."""
        stacked = [(ids, torch.stack(layers[:-1], dim=1), layers[-1]) for ids, layers in self._samples]
        with hsloader.Writer(path, typical_length=self.tokens, threads=threads, norm_state="pre") as writer:
            for number in range(count):
                ids, states, last = stacked[number % DISTINCT]
                writer.append(input_ids=ids, loss_mask=self._mask, hidden_states=states, last_hidden_state=last)

    def write_files(self, folder: Path, count: int) -> list[Path]:
        """``count`` samples as speculators 0.4 writes them."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"data_{number}.pt" for number in range(count)]
        for number, path in enumerate(paths):
            ids, layers = self._samples[number % DISTINCT]
            torch.save({"input_ids": ids, "hidden_states": layers, "loss_mask": self._mask}, path)
        return paths


class StockDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A sample a file, shifted and laid out as speculators 0.4 does it, in bf16 (its default, fp32, is slower)."""

    def __init__(self, paths: Sequence[Path], use_mmap: bool) -> None:
        self._paths, self._mmap = list(paths), use_mmap

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        data = torch.load(self._paths[index], weights_only=True, mmap=self._mmap, map_location="cpu")
        *layers, last = data["hidden_states"]
        length = len(data["input_ids"])
        return {
            "hidden_states": torch.cat(layers, dim=-1)[:-1],
            "verifier_last_hidden_states": last[1:],
            "input_ids": data["input_ids"][1:],
            "loss_mask": data["loss_mask"][1:],
            "position_ids": torch.arange(1, length),
        }


def packed(samples: list[dict[str, torch.Tensor]], length: int) -> dict[str, torch.Tensor]:
    """The collate function: samples one after another, cut or zero-padded at ``length``."""
    batch = {}
    for key in samples[0]:
        joined = torch.cat([sample[key] for sample in samples])[:length]
        whole = joined.new_zeros((1, length, *joined.shape[1:]))
        whole[0, : len(joined)] = joined
        batch[key] = whole
    return batch


class Packed:
    """``packed`` for one length, so that workers can be sent it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return packed(samples, self._length)


def stock_loader(paths: Sequence[Path], *, workers: int, use_mmap: bool, tokens: int, pin: bool) -> Any:
    """torch's DataLoader over the files, a sample a batch, four batches prefetched by each worker."""
    return torch.utils.data.DataLoader(
        StockDataset(paths, use_mmap),
        batch_size=1,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        collate_fn=Packed(tokens),
        pin_memory=pin,
    )


def state_bytes(batch: dict[str, Any]) -> int:
    """Bytes of a batch's tensors."""
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


def own_files(folder: Path) -> Iterator[Path]:
    """Every file that the benchmark wrote into ``folder``."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def drop_caches(folder: Path) -> None:
    """Drop the pages of ``folder``'s files, and of no other, from the page cache."""
    for path in own_files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_caches(folder: Path) -> None:
    """Read ``folder``'s files once."""
    for path in own_files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    cuda = torch.cuda.is_available()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hsloader": hsloader.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def anonymous_bytes(pids: Sequence[int | None]) -> int:
    """RssAnon of the processes, in all."""
    total = 0
    for pid in pids:
        if pid is not None:
            total += next(int(line.split()[1]) * 1024 for line in _lines(f"/proc/{pid}/status") if "RssAnon" in line)
    return total

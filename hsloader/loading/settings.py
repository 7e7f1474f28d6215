"""LoaderSettings: everything a script says about its batches, checked as far as that needs no dataset."""

from __future__ import annotations

import contextlib
import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

import torch

from hsloader.batches.noise import GaussianNoise, UniformNoise
from hsloader.batches.orders import ORDER_NAMES
from hsloader.batches.registry import TRAINER_NAMES
from hsloader.batches.trainer import SequenceParallel
from hsloader.errors import LoaderError
from hsloader.monitor.words import plural
from hsloader.order.splits import OWN_SPLITS
from hsloader.reader.options import ReadOptions

__all__ = ["LoaderOptions", "LoaderSettings", "demand_device"]

_ELSEWHERE = {
    "num_workers": "the loader reads ahead by itself, in processes of its own; how many threads decode there is "
    "read=hsloader.ReadOptions(threads=...)",
    "prefetch_factor": "the ring that batches are read ahead into is read=hsloader.ReadOptions(prefetch=...), in bytes",
    "prefetch": "say read=hsloader.ReadOptions(prefetch=...), in bytes",
    "threads": "say read=hsloader.ReadOptions(threads=...)",
    "options": "say read=hsloader.ReadOptions(...)",
    "read_options": "say read=hsloader.ReadOptions(...)",
    "collate_fn": "batches come collated as trainer= has them; with trainer='raw' say collate=",
    "sampler": "say batch_sampler=, which gives lists of dataset indices, or samples=",
    "total_seq_len": "say max_tokens=",
    "dtype": "say hidden_states_dtype=",
}


_COUNTS = ("max_tokens", "batch_size", "max_length", "rank", "world_size")  # whole numbers, or None


def _whole(name: str, value: Any) -> int:
    """``value`` as an int, if it is a whole number of any type; a bool is none here."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name}={value!r}: expected a whole number")


def demand_device(device: torch.device) -> None:
    """``LoaderError`` if torch has no such CUDA device, before anything is read.  Makes no CUDA context."""
    there = torch.cuda.device_count()
    if not there:
        raise LoaderError(f"device={str(device)!r}: torch sees no CUDA device; use device='cpu'")
    if (device.index or 0) >= there:
        raise LoaderError(f"device={str(device)!r}: torch sees {plural(there, 'CUDA device')}, counted from 0")


class LoaderOptions(TypedDict, total=False):
    """The keywords of ``DataLoader``; ``LoaderSettings`` says what they mean."""

    trainer: str
    variant: str | None
    max_tokens: int | None
    batch_size: int | None
    max_length: int | None
    long: Literal["truncate", "drop"]
    hidden_states_dtype: str | None
    sequence_parallel: SequenceParallel | None
    collate: Callable[[list[dict[str, Any]]], Any] | None
    split: str
    val_ratio: float
    split_by: str
    samples: Sequence[int] | None
    min_loss_tokens: int
    seed: int
    epoch: int
    shuffle: bool | None
    order: str
    drop_last: bool | None
    batch_sampler: Iterable[Sequence[int]] | None
    rank: int | None
    world_size: int | None
    device: Any
    pin_memory: bool
    noise: UniformNoise | GaussianNoise | None
    norm_state: Literal["pre", "post"] | None
    layer_ids: Sequence[int] | None
    on_bad: Literal["raise", "skip"]
    stall_after: float
    log_every: float
    metrics_port: int
    nvtx: bool
    read: ReadOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """What ``DataLoader`` and ``HiddenStateDataset`` take.

    The batch: ``trainer`` (a name such as ``"speculators-0.9"``, ``"specforge-0.2"`` or ``"raw"``) and its ``variant``
    (default ``"eagle3"``); ``max_tokens`` of a packed batch or ``batch_size`` samples of a padded one; ``max_length``
    tokens are used of a sample, a longer one is cut or left out (``long="truncate"`` or ``"drop"``);
    ``hidden_states_dtype`` as torch names it (default: the trainer's own); ``sequence_parallel`` (SpecForge);
    ``collate`` makes a batch of raw's list of samples.

    The samples: ``split`` ``"train"``, ``"val"`` or ``"all"``, of which ``val_ratio`` is for validation, by a hash of
    each sample's name (``split_by="name"``) or as the trainer does it (``"trainer"``, ``"contiguous"``,
    ``"shuffled-files"``); ``samples``, explicit dataset indices; ``min_loss_tokens``, supervised tokens that a sample
    must have.

    The order: ``seed``, ``epoch`` to begin with, ``shuffle`` (default: all but ``"val"``); ``order`` ``"hsloader"``
    (the same global sequence for any number of ranks), ``"trainer"`` or one by name; ``drop_last``; or
    ``batch_sampler``, a finite iterable of lists of dataset indices, whose order, split and ranks are the caller's.

    The process: the data-parallel ``rank`` of ``world_size``, ``device`` of the batches, ``pin_memory`` for all tensors
    of CPU ones, ``noise`` on states; ``norm_state`` and ``layer_ids`` say what the script expects of the data.
    ``on_bad``: a sample whose bytes are damaged raises ``DamageError`` or leaves its batch (``"skip"``); an epoch that
    lost more than 16 of them and more than 1 % of those it handed out, and bytes that the system refuses to give,
    always raise.  ``stall_after`` seconds of waiting are reported, and a line of progress comes every ``log_every``
    seconds (0: never).  The counters are served to Prometheus on ``metrics_port`` plus the local rank (0: not at all).
    ``nvtx`` marks the stages of ``next()`` for a profiler, in the whole process.  ``read``: how to read.
    """

    trainer: str
    variant: str | None = None
    max_tokens: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    long: Literal["truncate", "drop"] = "truncate"
    hidden_states_dtype: str | None = None
    sequence_parallel: SequenceParallel | None = None
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    split: str = "train"
    val_ratio: float = 0.0
    split_by: str = "name"
    samples: Sequence[int] | None = None
    min_loss_tokens: int = 0
    seed: int = 0
    epoch: int = 0
    shuffle: bool | None = None
    order: str = "hsloader"
    drop_last: bool | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    rank: int | None = None
    world_size: int | None = None
    device: Any = "cpu"
    pin_memory: bool = False
    noise: UniformNoise | GaussianNoise | None = None
    norm_state: Literal["pre", "post"] | None = None
    layer_ids: Sequence[int] | None = None
    on_bad: Literal["raise", "skip"] = "raise"
    stall_after: float = 10.0
    log_every: float = 30.0
    metrics_port: int = 0
    nvtx: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LoaderSettings:
        """The settings of a script's keywords; ``TypeError`` says what to write instead of one that there is not."""
        names = [item.name for item in fields(cls)]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = _ELSEWHERE.get(name) or (
                    f"did you mean {near[0]}=?" if near else f"there are {', '.join(names)}"
                )
                raise TypeError(f"there is no keyword {name}=: {hint}")
        if "trainer" not in given:
            raise TypeError(f"trainer= is missing: whose batches these shall be, one of {', '.join(TRAINER_NAMES)}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name, known in (
            ("split", ("train", "val", "all")),
            ("split_by", ("name", "trainer", *OWN_SPLITS)),
            ("order", ORDER_NAMES),
            ("on_bad", ("raise", "skip")),
            ("long", ("truncate", "drop")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, known))}")
        if self.norm_state not in (None, "pre", "post"):
            raise ValueError(f"norm_state={self.norm_state!r}: expected 'pre' or 'post'")
        for name in ("seed", "epoch", "min_loss_tokens", *_COUNTS):
            value = getattr(self, name)
            if value is not None or name not in _COUNTS:
                object.__setattr__(self, name, _whole(name, value))  # a state is JSON, which knows no numpy
        if not isinstance(self.read, ReadOptions):
            known = isinstance(self.read, Mapping) and all(isinstance(name, str) for name in self.read)
            inside = ", ".join(f"{name}={value!r}" for name, value in self.read.items()) if known else "..."
            raise TypeError(f"read={self.read!r}: say read=hsloader.ReadOptions({inside})")
        if self.epoch < 0:
            raise ValueError(f"epoch={self.epoch}: epochs count from 0")
        if not 0 <= self.val_ratio < 1:
            raise ValueError(f"val_ratio={self.val_ratio!r}: expected a number from 0 up to, not including, 1")
        port = self.metrics_port
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise ValueError(f"metrics_port={port!r}: expected a TCP port, or 0 for none")
        if not (self.stall_after > 0 and self.log_every >= 0):
            raise ValueError(f"stall_after={self.stall_after}, log_every={self.log_every}: expected seconds above 0")
        self._refuse_other_devices()
        self._refuse_contradictions()

    def _refuse_other_devices(self) -> None:
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: expected 'cpu', 'cuda' or one CUDA device such as 'cuda:1'")
        if device.type == "cuda" and not self.pin_memory:
            demand_device(device)

    def _refuse_contradictions(self) -> None:
        if self.collate is not None and self.trainer != "raw":
            raise ValueError("collate= makes batches of single samples: use it with trainer='raw'")
        if self.samples is not None and (self.val_ratio or self.split != "train" or self.split_by != "name"):
            raise ValueError("samples= names the samples: give no split=, val_ratio= or split_by= with it")
        if self.batch_sampler is None:
            return
        if isinstance(self.batch_sampler, Iterator):
            raise ValueError(
                "batch_sampler= is an iterator, which gives its batches once, and each epoch begins anew: give a list, "
                "or an object with an __iter__ of its own"
            )
        given = {
            "samples": self.samples is not None,
            "val_ratio": bool(self.val_ratio),
            "min_loss_tokens": bool(self.min_loss_tokens),
            "order": self.order != "hsloader",
            "shuffle": self.shuffle is not None,
            "long": self.long != "truncate",
            "max_tokens": self.max_tokens is not None and self.trainer == "raw",
            "rank": self.rank is not None or self.world_size is not None,
        }
        if named := [name for name, wrong in given.items() if wrong]:
            raise ValueError(
                f"batch_sampler= decides which samples come when, on which rank: give no {named[0]}= with it"
            )

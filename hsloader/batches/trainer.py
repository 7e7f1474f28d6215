"""Trainer: one training framework's batches over the fields of one dataset; the contract that its modules fulfil.

The loader asks ``lay_out`` where rows go, has the reader fill the spans (zero where no piece lies), lets ``check`` see
the mask while it is in host memory, and gives the spans, wherever they are by then, to ``finish``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout, Span
from hsloader.batches.states import State, restored, shaped, torch_dtype
from hsloader.errors import DamageError, IncompatibleError
from hsloader.store.fields import Field

__all__ = ["BatchSettings", "SequenceParallel", "Trainer", "field_of", "span_of_scale"]

NormState = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """SpecForge's USP: each rank of a sequence-parallel group gets its slice of every sample.

    ``degree`` ranks share a sample, ``ulysses`` of them in each Ulysses group (``degree / ulysses`` is the ring size),
    slices overlap by ``ttt_length`` tokens.  ``rank`` is the rank within the group, not the data-parallel one.
    """

    rank: int
    degree: int
    ulysses: int
    ttt_length: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1 or not 0 <= self.rank < self.degree:
            raise ValueError(f"sequence-parallel rank {self.rank} of {self.degree}: expected 0 to degree - 1")
        if self.ulysses < 1 or self.degree % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} does not divide the sequence-parallel degree {self.degree}")
        if self.ttt_length < 0:
            raise ValueError(f"ttt_length={self.ttt_length}: expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """What a script says about its batches.  ``max_tokens`` packs by token budget, ``batch_size`` counts samples."""

    max_tokens: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    hidden_states_dtype: str | None = None
    drop_last: bool | None = None
    sequence_parallel: SequenceParallel | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        if self.drop_last and self.max_tokens is not None:
            raise ValueError("drop_last= leaves out a last batch of fewer samples, and packs have no number of them")
        if self.hidden_states_dtype not in (None, "float32", "bfloat16", "float16", "float64"):
            raise ValueError(
                f"hidden_states_dtype={self.hidden_states_dtype!r}: expected a float type such as 'bfloat16'"
            )


class Trainer(ABC):
    """One trainer's batches.  Attributes are fixed at construction; methods are pure and safe in any thread."""

    norm_state: NormState | None = None
    """What the last state must be before (``"pre"``) or after (``"post"``) the final norm; None: it does not care."""
    noise_keys: tuple[str, ...] = ()
    """Batch keys that noise goes to unless told otherwise: what the trainer's own loader noises, or would."""
    token_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    """dtype in the batch of the spans that ``finish`` casts beside the states: ids and masks."""
    own_order: str | None = None
    """Name of the trainer's own order of batches, if it has one worth reproducing."""
    own_split: str | None = None
    """Name of the trainer's own train/validation split (see ``own_split``), if it has one."""
    knows_empty_batches: bool = False
    """Whether a batch that lost all its samples is something the trainer handles."""
    needs_neighbours: bool = False
    """Whether each sample must have two supervised tokens in a row."""
    default_variant: ClassVar[str | None] = None

    def __init__(
        self, name: str, variant: str | None, settings: BatchSettings, *, spans: list[Span], states: list[State]
    ) -> None:
        self.name = name
        self.variant = variant
        self.settings = settings
        self.spans = tuple(spans)
        self.states = tuple(states)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the dataset's fields that are read, each once."""
        return tuple(dict.fromkeys(span.field.name for span in self.spans))

    @property
    def packed(self) -> bool:
        """Whether batches are made by a budget of rows (``settings.max_tokens``), else by a number of samples."""
        return self.settings.max_tokens is not None

    @property
    def batch_size(self) -> int:
        """Samples a batch where they are counted; 1 unless given."""
        return self.settings.batch_size or 1

    @property
    def title(self) -> str:
        """Name and variant, for messages."""
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def drops_last(self, split: str) -> bool:
        """Whether a last batch of fewer than ``batch_size`` samples is left out on this side of the split."""
        return bool(self.settings.drop_last)

    def contract(self, split: str) -> dict[str, str | int | float | bool | None]:
        """The settings that decide which samples make up which batch, for a state."""
        return {
            "trainer": self.name,
            "variant": self.variant,
            "max_tokens": self.settings.max_tokens,
            "batch_size": self.settings.batch_size,
            "max_length": self.settings.max_length,
            "drop_last": self.drops_last(split),
        }

    @abstractmethod
    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of a batch that samples of these lengths take (int64), for packing."""

    @abstractmethod
    def largest_rows(self, lengths: NDArray[np.int64]) -> dict[str, int]:
        """For each span the most rows that a batch of these samples can have."""

    @abstractmethod
    def lay_out(self, samples: NDArray[np.int64], lengths: NDArray[np.int64], bad: Collection[int] = ()) -> BatchLayout:
        """The layout of a batch of ``samples`` (dataset indices, batch order), whole ``lengths`` alike.

        Samples in ``bad`` are left out as the trainer's family does it: a pack closes up, a padded row stays empty, a
        list becomes shorter.
        """

    def lay_out_all(
        self, samples: NDArray[np.int64], lengths: NDArray[np.int64], sizes: Sequence[int], bad: Collection[int] = ()
    ) -> list[BatchLayout]:
        """``lay_out`` of several batches that follow one another: of the first ``sizes[0]`` samples, and so on."""
        edges = pairwise(accumulate(sizes, initial=0))
        return [self.lay_out(samples[start:stop], lengths[start:stop], bad) for start, stop in edges]

    @abstractmethod
    def finish(
        self,
        layout: BatchLayout,
        spans: Mapping[str, torch.Tensor],
        host: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """The batch, exactly as the trainer's own loader gives it.

        ``spans`` are tensors on one device, ``[rows, *shape]`` of the stored dtype or already as in the batch: of the
        one in ``states`` or ``token_dtypes``, in the layout's ``shapes``.  Large tensors of the batch are views of
        them.  ``host`` are the layout's small arrays where they were moved to that device already.
        """

    def cut(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens used of samples of these lengths."""
        limit = self.settings.max_length
        return lengths if limit is None else np.minimum(lengths, limit)

    def wants_mask(self, layout: BatchLayout) -> bool:
        """Whether ``check`` looks at this batch's mask."""
        return self.needs_neighbours or bool(layout.bad)

    def check(self, layout: BatchLayout, mask: NDArray[np.generic] | None) -> None:
        """Look at the batch's loss mask (its span, ``[rows]``, in host memory) for what the trainer cannot take.

        ``DamageError`` for a batch that lost its supervised tokens with its bad samples, ``IncompatibleError`` for a
        sample that the trainer itself would refuse.
        """
        if mask is None:
            return
        if layout.bad and not self.knows_empty_batches and not mask.any():
            lost = ", ".join(str(sample) for sample in layout.samples.tolist() if sample in layout.bad)
            raise DamageError(
                f"samples {lost} are damaged, and without them their batch of {len(layout.samples)} has no supervised "
                f"token, which {self.title} cannot take; use larger batches, or leave these samples out with samples="
            )
        if self.needs_neighbours:
            self._check_neighbours(layout, mask)

    def _check_neighbours(self, layout: BatchLayout, mask: NDArray[np.generic]) -> None:
        number = [span.name for span in self.spans].index("loss_mask")
        supervised = mask != 0
        for piece in layout.pieces[layout.pieces["span"] == number]:
            rows = supervised[piece["row"] : piece["row"] + piece["stop"] - piece["start"]]
            if not (rows[:-1] & rows[1:]).any():
                raise IncompatibleError(
                    f"sample {piece['sample']}: {self.title} needs two supervised tokens in a row within the first "
                    f"{len(rows)}, loss_mask has none; leave such samples out with min_loss_tokens=2 or samples="
                )

    @staticmethod
    def _finished(state: State, layout: BatchLayout, spans: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One of the batch's state tensors, in the batch's dtype and shape."""
        dtype, scale = torch_dtype(state.dtype), spans[state.scale] if state.scale else None
        return shaped(restored(spans[state.span], dtype, scale), dtype, layout.shapes[state.span])

    @staticmethod
    def _host_tensors(
        layout: BatchLayout, device: torch.device, host: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        if host is not None:
            return dict(host)
        return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in layout.host.items()}


def field_of(fields: Mapping[str, Field], name: str, trainer: str) -> Field:
    """The dataset's field of that name; ``IncompatibleError`` with what it has instead."""
    if name in fields:
        return fields[name]
    remedy = {
        "loss_mask": "convert the masks together with the states",
        "last_hidden_state": "convert a source that holds the last layer, or choose a variant that does not need it",
    }.get(name, "convert a source that holds it")
    raise IncompatibleError(
        f"trainer {trainer} needs the field {name!r}, this dataset has {', '.join(fields) or 'no field'}; {remedy}"
    )


def span_of_scale(fields: Mapping[str, Field], state: Field, name: str, trainer: str) -> Span | None:
    """The span with the scales of an fp8 field, called ``name``; None for other fields."""
    return None if state.scale is None else Span(name, field_of(fields, state.scale, trainer))

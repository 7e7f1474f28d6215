"""SpecForge: padded batches ``[B, N]`` of ``batch_size`` samples, N the longest (cut) one.

Sources: ``specforge/data/preprocessing.py`` and ``data/utils.py`` at 3234e24a (0.1.0, 2025-07) and 9a1c9803 (2026-06),
``algorithms/eagle3/data.py``, ``algorithms/common/dflash_family_data.py``, ``launch.py`` of the 0.2.0 wheel.

``"specforge-0.1"`` shifts ids and target left by one and keeps a short last batch.  ``"specforge-2026-06"`` (what
was trained with from November 2025 to July 2026) and ``"specforge-0.2"`` shift nothing and drop a short last batch
while training.  In eagle3 the sample's last supervised position is always off; the DFlash family keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout, Span, pieces_of
from hsloader.batches.states import State, batch_dtype, shaped, torch_dtype
from hsloader.batches.trainer import BatchSettings, SequenceParallel, Trainer, field_of, span_of_scale
from hsloader.store.fields import Field

__all__ = ["SPECFORGE", "SpecForgeTrainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Release:
    variants: tuple[str, ...]
    shift: bool = False
    drop_last: bool = True
    drop_last_val: bool = True
    sequence_parallel: bool = True


SPECFORGE: dict[str, _Release] = {
    "specforge-0.1": _Release(
        variants=("eagle3",), shift=True, drop_last=False, drop_last_val=False, sequence_parallel=False
    ),
    "specforge-2026-06": _Release(variants=("eagle3",)),
    "specforge-0.2": _Release(variants=("eagle3", "dflash", "domino", "dspark"), drop_last_val=False),
}

# Batch key -> dataset field, by variant. The eagle3 names swap meaning between SpecForge's file and its batch.
_STATES = {
    "eagle3": {"hidden_state": "hidden_states", "target": "last_hidden_state"},
    "dflash": {"hidden_states": "hidden_states"},
    "domino": {"hidden_states": "hidden_states"},
    "dspark": {"hidden_states": "hidden_states", "target_last_hidden_states": "last_hidden_state"},
}


class SpecForgeTrainer(Trainer):
    """Batches of one SpecForge era and variant.

    eagle3: ``input_ids``, ``attention_mask``, ``loss_mask`` int64 [B, N]; ``hidden_state`` [B, N, k*H] and ``target``
    [B, N, H] in the stored dtype.  dflash and domino: ``input_ids``, ``loss_mask``, ``hidden_states``; dspark: also
    ``target_last_hidden_states``.  With ``sequence_parallel`` (eagle3): this rank's slice of each sample, and
    ``position_ids`` int64 [B, N * ulysses].
    """

    default_variant = "eagle3"

    def __init__(self, name: str, variant: str, fields: Mapping[str, Field], settings: BatchSettings) -> None:
        self._release = SPECFORGE[name]
        title = f"{name} ({variant})"
        spans = [Span(field, field_of(fields, field, title)) for field in ("input_ids", "loss_mask")]
        states: list[State] = []
        for key, field in _STATES[variant].items():
            span = Span(field, field_of(fields, field, title))
            scale = span_of_scale(fields, span.field, f"{field}_scale", title)
            spans += [span, *([scale] if scale else [])]
            states.append(State(key, field, _stored_dtype(span.field, settings), scale.name if scale else None))
        super().__init__(name, variant, settings, spans=spans, states=states)
        if settings.batch_size is None or settings.max_tokens is not None:
            raise ValueError(f"trainer {name} pads by samples: give batch_size=, no max_tokens=")
        self._eagle3 = variant == "eagle3"
        self._slices = settings.sequence_parallel
        if self._slices and not (self._eagle3 and self._release.sequence_parallel):
            raise ValueError(f"trainer {title} has no sequence-parallel batches")
        self.token_dtypes = {
            "input_ids": torch_dtype(batch_dtype(spans[0].field, integers_as_int64=False)),
            "loss_mask": torch_dtype(batch_dtype(spans[1].field, integers_as_int64=False)),
        }
        self.norm_state = "post" if "last_hidden_state" in _STATES[variant].values() else None
        self.needs_neighbours = not self._eagle3
        self.own_order = "distributed-sampler"
        self.noise_keys = (states[0].key,)

    def drops_last(self, split: str) -> bool:
        if self.settings.drop_last is not None:
            return self.settings.drop_last
        return self._release.drop_last_val if split == "val" else self._release.drop_last

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.cut(lengths)

    def largest_rows(self, lengths: NDArray[np.int64]) -> dict[str, int]:
        longest = np.max(lengths, initial=0, keepdims=True).astype(np.int64)
        columns = self._columns(_Rows.of(self.cut(longest), self._slices))
        return {span.name: self.batch_size * columns[span.name] for span in self.spans}

    def lay_out(self, samples: NDArray[np.int64], lengths: NDArray[np.int64], bad: Collection[int] = ()) -> BatchLayout:
        whole = np.asarray(samples, dtype=np.int64)
        lost = frozenset(bad) & frozenset(whole.tolist())
        rows = _Rows.of(self.cut(np.asarray(lengths, dtype=np.int64)), self._slices)
        columns = self._columns(rows)  # of the plan: a lost sample leaves its row behind
        good = np.array([sample not in lost for sample in whole.tolist()], dtype=bool)
        number = np.arange(len(whole))
        starts, counts = zip(*(self._tokens(span, rows) for span in self.spans), strict=True)
        used = np.where(good, counts, 0)
        firsts = [number * columns[span.name] for span in self.spans]
        shape = (len(whole), columns["input_ids"])
        return BatchLayout(
            samples=whole,
            bad=lost,
            rows={span.name: len(whole) * columns[span.name] for span in self.spans},
            shapes={span.name: self._shape(span, len(whole), columns[span.name]) for span in self.spans},
            tokens=int(used[0].sum()),
            pieces=pieces_of(
                np.arange(len(self.spans))[:, None], whole, starts=np.stack(starts), counts=used, rows=np.stack(firsts)
            ),
            host=self._host(shape, rows, good),
        )

    def _shape(self, span: Span, count: int, columns: int) -> tuple[int, ...]:
        if span.name in self.token_dtypes:
            return count, columns
        if any(state.span == span.name for state in self.states):
            return count, columns, math.prod(span.field.shape)
        return count * columns, *span.field.shape

    def _columns(self, rows: _Rows) -> dict[str, int]:
        """Each span's columns N.  The states that are not the target are not rounded up to the group's degree."""
        longest = int(rows.width.max(initial=0))
        degree = self._slices.degree if self._slices else 1
        rounded = -(-longest // degree) * degree
        exact = ("hidden_states", "hidden_states_scale")
        return {span.name: longest if span.name in exact else rounded for span in self.spans}

    def _tokens(self, span: Span, rows: _Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first token, number of tokens) of each sample that this span holds."""
        starts, ends = rows.starts, rows.ends
        if span.name == "loss_mask" and self._eagle3:
            ends = np.minimum(ends, rows.lengths - 1)
        if self._release.shift and span.name in ("input_ids", "last_hidden_state", "last_hidden_state_scale"):
            starts = starts + 1
        return starts, np.maximum(ends - starts, 0)

    def _host(self, shape: tuple[int, int], rows: _Rows, good: NDArray[np.bool_]) -> dict[str, NDArray[np.generic]]:
        if not self._eagle3:
            return {}
        counts = np.where(good, np.maximum(rows.ends - rows.starts, 0), 0)
        attention = (np.arange(shape[1]) < counts[:, None]).astype(np.int64)
        if not self._slices:
            return {"attention_mask": attention}
        # Positions of the whole Ulysses group's tokens: slice after slice, this rank's ring chunk first.
        group, rank = self._slices.ulysses, self._slices.rank
        chunk = rows.width - self._slices.ttt_length
        first = (rank // group) * chunk * group + (rank % group) * chunk
        place = np.arange(shape[1] * group)
        positions = np.where(place < chunk[:, None], first[:, None] + place, 0)
        positions[~good] = 0
        return {"attention_mask": attention, "position_ids": positions.astype(np.int64)}

    def finish(
        self,
        layout: BatchLayout,
        spans: Mapping[str, torch.Tensor],
        host: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        batch = self._host_tensors(layout, spans["input_ids"].device, host)
        for state in self.states:
            batch[state.key] = self._finished(state, layout, spans)
        for name, dtype in self.token_dtypes.items():
            batch[name] = shaped(spans[name], dtype, layout.shapes[name])
        return batch


@dataclass(frozen=True, eq=False, slots=True)
class _Rows:
    """For each sample: its (cut) length, the tokens [start, end) of this rank's slice, and the slice's width."""

    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    width: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], slices: SequenceParallel | None) -> _Rows:
        if slices is None:
            return cls(lengths, np.zeros_like(lengths), lengths, lengths)
        chunk = -(-lengths // slices.degree)
        starts = slices.rank * chunk
        width = chunk + slices.ttt_length
        return cls(lengths, starts, np.minimum(starts + width, lengths), width)


def _stored_dtype(field: Field, settings: BatchSettings) -> str:
    """SpecForge casts nothing: states keep their dtype; fp8 ones get the producer's, or bfloat16 where that is fp8."""
    if settings.hidden_states_dtype is not None:
        return settings.hidden_states_dtype
    if field.scale is None:
        return field.dtype
    recorded = field.source_dtype
    return recorded if recorded is not None and not recorded.startswith("float8") else "bfloat16"

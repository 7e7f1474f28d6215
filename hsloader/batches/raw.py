"""raw: a list of samples, each a dict of tensors named as the dataset's fields; for scripts with their own collate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout, Span, pieces_of
from hsloader.batches.states import State
from hsloader.batches.trainer import BatchSettings, Trainer
from hsloader.store.fields import Field

__all__ = ["RawTrainer"]


class RawTrainer(Trainer):
    """Samples as stored: a tensor ``[tokens, *shape]`` of each field, in its stored dtype, cut to ``max_length``.

    ``batch_size`` samples a batch (default 1), or as many as ``max_tokens`` tokens hold.  With
    ``hidden_states_dtype`` the state fields are given in that dtype, fp8 ones restored by their scales.
    """

    knows_empty_batches = True

    def __init__(self, fields: Mapping[str, Field], settings: BatchSettings) -> None:
        if settings.max_tokens is not None and settings.batch_size is not None:
            raise ValueError("trainer raw: give batch_size= or max_tokens=, not both")
        wanted = settings.hidden_states_dtype
        states = [
            State(name, name, wanted or field.dtype, field.scale if wanted else None)
            for name, field in fields.items()
            if field.type.is_float and not field.is_token_field
        ]
        super().__init__(
            "raw", None, settings, spans=[Span(name, field) for name, field in fields.items()], states=states
        )

    def contract(self, split: str) -> dict[str, str | int | float | bool | None]:
        settings = super().contract(split)
        if not self.packed:
            settings["batch_size"] = self.batch_size
        return settings

    def cut(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        short = super().cut(lengths)
        return short if self.settings.max_tokens is None else np.minimum(short, self.settings.max_tokens)

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.cut(lengths)

    def largest_rows(self, lengths: NDArray[np.int64]) -> dict[str, int]:
        used = self.cut(lengths)
        most = self.settings.max_tokens or int(np.sort(used)[::-1][: self.batch_size].sum())
        return {span.name: most for span in self.spans}

    def lay_out(self, samples: NDArray[np.int64], lengths: NDArray[np.int64], bad: Collection[int] = ()) -> BatchLayout:
        whole, used = np.asarray(samples, dtype=np.int64), self.cut(np.asarray(lengths, dtype=np.int64))
        lost = frozenset(bad) & frozenset(whole.tolist())
        good = np.array([sample not in lost for sample in whole.tolist()], dtype=bool)
        kept, used = whole[good], used[good]
        ends = np.concatenate([[0], np.cumsum(used)])
        return BatchLayout(
            samples=whole,
            bad=lost,
            rows={span.name: int(ends[-1]) for span in self.spans},
            shapes={span.name: (int(ends[-1]), *span.field.shape) for span in self.spans},
            tokens=int(ends[-1]),
            pieces=pieces_of(np.arange(len(self.spans))[:, None], kept, starts=0, counts=used, rows=ends[:-1]),
        )

    def finish(
        self,
        layout: BatchLayout,
        spans: Mapping[str, torch.Tensor],
        host: Mapping[str, torch.Tensor] | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        whole = {**spans, **{state.key: self._finished(state, layout, spans) for state in self.states}}
        runs = layout.filled(0)
        edges = [0, *np.cumsum(runs[:, 1]).tolist()]
        return [{span.name: whole[span.name][start:stop] for span in self.spans} for start, stop in pairwise(edges)]

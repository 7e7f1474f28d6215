"""speculators 0.3 to 0.9: packed batches of one row of ``max_tokens`` tokens.

Sources: ``speculators/train/data.py`` (collate and dataset), ``models/eagle3/data.py`` (shift), ``models/mtp/data.py``
of the releases 0.3.0 to 0.9.0, and ``scripts/train.py`` or ``train/cli.py`` for which variant shifts.

Samples follow one another, cut or zero-padded at T = ``max_tokens``.  eagle3 and peagle align token t + 1 with the
auxiliary state of token t, so a sample of S tokens becomes a document of S - 1; positions then begin at 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.layout import BatchLayout, Span
from hsloader.batches.packs import Packs
from hsloader.batches.states import State, batch_dtype, shaped, torch_dtype
from hsloader.batches.trainer import BatchSettings, NormState, Trainer, field_of, span_of_scale
from hsloader.store.fields import Field

__all__ = ["SPECULATORS", "SpeculatorsTrainer"]

_SHIFTED = frozenset({"eagle3", "peagle"})
_LAST_ONLY = frozenset({"mtp"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Release:
    """What differs between releases, as far as a batch shows it."""

    variants: tuple[str, ...]
    norm_state: NormState | None = "pre"
    dtype: str = "bfloat16"  # default of --hidden-states-dtype
    documents: bool = True  # document_ids per token, else one lengths entry per document
    error_records: bool = False
    recovery: bool = False
    noise_on_last: bool = False
    empty_batches: bool = True
    arrow: bool = True  # masks come from an arrow column: any integer type arrives as int64
    order: str = "multipack-0.4"


_V04 = _Release(
    variants=("eagle3",),
    dtype="float32",
    documents=False,
    noise_on_last=True,
    empty_batches=False,
    arrow=False,
)
_V07 = _Release(variants=("eagle3", "peagle", "dflash", "dspark", "mtp"), order="multipack-0.7")
_V08 = replace(_V07, variants=(*_V07.variants, "dflash2"), error_records=True, recovery=True)

SPECULATORS: dict[str, _Release] = {
    # 0.3's model took the last state as it came; from 0.4 on the model applies the verifier's final norm itself.
    "speculators-0.3": replace(_V04, norm_state=None),
    "speculators-0.4": _V04,
    "speculators-0.5": _Release(variants=("eagle3", "dflash"), documents=False),
    "speculators-0.6": _Release(variants=("eagle3", "peagle", "dflash", "mtp"), documents=False),
    "speculators-0.7": _V07,
    "speculators-0.8": _V08,
    "speculators-0.9": replace(_V08, variants=(*_V08.variants, "xpress"), order="multipack-0.9"),
}


class SpeculatorsTrainer(Trainer):
    """Batches of one speculators release and variant.

    eagle3 and the other variants but mtp: ``hidden_states`` [1, T, k*H], ``verifier_last_hidden_states`` [1, T, H] in
    ``hidden_states_dtype`` (default bfloat16, float32 up to 0.4), ``input_ids``, ``position_ids`` int64 [1, T],
    ``loss_mask`` [1, T] int64, or bool where the producer's column was; then ``lengths`` int64 [documents] up to 0.6
    or ``document_ids`` int64 [1, T] (-1 in the padding) from 0.7 on, and ``error_records`` (int) from 0.8 on.
    mtp: the last state alone, under the name ``hidden_states``.
    """

    default_variant = "eagle3"

    def __init__(self, name: str, variant: str, fields: Mapping[str, Field], settings: BatchSettings) -> None:
        release = SPECULATORS[name]
        title = f"{name} ({variant})"
        dtype = settings.hidden_states_dtype or release.dtype
        wanted = [("hidden_states", "last_hidden_state")] if variant in _LAST_ONLY else list(_STATES)
        spans = [Span(field, field_of(fields, field, title)) for field in ("input_ids", "loss_mask")]
        states: list[State] = []
        for key, field in wanted:
            span = Span(field, field_of(fields, field, title))
            scale = span_of_scale(fields, span.field, f"{field}_scale", title)
            spans += [span, *([scale] if scale else [])]
            states.append(State(key, field, dtype, scale.name if scale else None))
        super().__init__(name, variant, settings, spans=spans, states=states)
        if settings.max_tokens is None or settings.batch_size is not None:
            raise ValueError(f"trainer {name} packs by tokens: give max_tokens= (its --total-seq-len), no batch_size=")
        self._release = release
        self._length = settings.max_tokens
        self._shift = int(variant in _SHIFTED)
        self.token_dtypes = {
            "input_ids": torch_dtype(batch_dtype(spans[0].field, integers_as_int64=False)),
            "loss_mask": torch_dtype(batch_dtype(spans[1].field, integers_as_int64=release.arrow)),
        }
        self._rows = {span.name: self._length for span in spans}
        self._shapes = {span.name: (self._length, *span.field.shape) for span in spans}
        self._shapes |= dict.fromkeys(self.token_dtypes, (1, self._length))
        self._shapes |= {state.span: (1, self._length, math.prod(fields[state.span].shape)) for state in states}
        # First token of a sample that goes into each span.
        unshifted = ("hidden_states", "hidden_states_scale")
        self._starts = np.array([0 if span.name in unshifted else self._shift for span in spans], dtype=np.int64)
        self.norm_state = release.norm_state
        self.own_order = release.order
        self.own_split = "contiguous" if release.arrow else "shuffled-files"
        self.knows_empty_batches = release.empty_batches
        if variant not in _LAST_ONLY:  # mtp throws the auxiliary states away, noise and all
            last = ("verifier_last_hidden_states",) if release.noise_on_last else ()
            self.noise_keys = ("hidden_states", *last)

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(self.cut(lengths) - self._shift, 0)

    def largest_rows(self, lengths: NDArray[np.int64]) -> dict[str, int]:
        return self._rows

    def lay_out(self, samples: NDArray[np.int64], lengths: NDArray[np.int64], bad: Collection[int] = ()) -> BatchLayout:
        return self.lay_out_all(samples, lengths, [len(samples)], bad)[0]

    def lay_out_all(
        self, samples: NDArray[np.int64], lengths: NDArray[np.int64], sizes: Sequence[int], bad: Collection[int] = ()
    ) -> list[BatchLayout]:
        # All batches at once, since a training pays for each call of numpy in every step, however few its samples are.
        plan = Packs.of(samples, self.costs(np.asarray(lengths, dtype=np.int64)), sizes, bad, self._length)
        pieces = plan.pieces(self._starts)
        hosts = self._hosts(plan)
        return [
            BatchLayout(
                samples=whole,
                bad=lost,
                rows=self._rows,
                shapes=self._shapes,
                tokens=filled,
                pieces=some,
                host=host,
            )
            for whole, lost, filled, some, host in zip(
                plan.wholes, plan.lost, plan.filled.tolist(), pieces, hosts, strict=True
            )
        ]

    def _hosts(self, plan: Packs) -> list[dict[str, NDArray[np.generic]]]:
        """position_ids, and document_ids or lengths, of each batch."""
        positions, numbers = plan.positions_and_documents()
        if self._shift:
            positions += self._shift
        for at, filled in enumerate(plan.filled.tolist()):
            positions[at, filled:] = 0
        rows = [slice(at, at + 1) for at in range(len(positions))]
        if not self._release.documents:
            return [{"position_ids": positions[row].copy(), "lengths": plan.documents(row.start)} for row in rows]
        # Copies: whoever keeps one row shall not keep those of all batches.
        return [{"position_ids": positions[row].copy(), "document_ids": numbers[row].copy()} for row in rows]

    def finish(
        self,
        layout: BatchLayout,
        spans: Mapping[str, torch.Tensor],
        host: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        ids = spans["input_ids"]
        batch: dict[str, Any] = self._host_tensors(layout, ids.device, host)
        for state in self.states:
            batch[state.key] = self._finished(state, layout, spans)
        for name, dtype in self.token_dtypes.items():
            batch[name] = shaped(spans[name], dtype, layout.shapes[name])
        if self._release.error_records:
            batch["error_records"] = layout.dropped
        if self._release.recovery and layout.dropped == len(layout.samples):
            batch |= _recovery()
        return batch


_STATES = (("hidden_states", "hidden_states"), ("verifier_last_hidden_states", "last_hidden_state"))


def _recovery() -> dict[str, object]:
    """The note that 0.8's and 0.9's collator adds to an all-padding batch.

    Their Trainer takes it out of the batch, demands its own class and only logs it; any other consumer would pass it
    to the model.  So it is given exactly where that class is loaded, that is, where the Trainer is.
    """
    metadata = getattr(sys.modules.get("speculators.train.recovery"), "RecoveryMetadata", None)
    return {} if metadata is None else {"__recovery__": metadata(locally_empty=True)}

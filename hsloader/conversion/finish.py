"""The end of a run: numbers given back, quarantine list, packed table, report. And the start of a replan."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsloader.conversion.execute import Totals
from hsloader.conversion.fp8 import Loss, combined, is_encoded
from hsloader.conversion.journal import Journal, quarantine_lines
from hsloader.conversion.plan import Plan
from hsloader.conversion.planning import nothing_to_convert
from hsloader.conversion.removal import SourceRemover
from hsloader.conversion.report import ConversionReport, Deleted, PlanSummary, Quarantined
from hsloader.conversion.state import State
from hsloader.conversion.summary import counted
from hsloader.formats.discover import Skipped, natural_key
from hsloader.store.files import replace_file
from hsloader.store.packed import read_tables
from hsloader.store.publish import Root
from hsloader.store.samples import COLUMNS, FLAGS
from hsloader.store.stored_segment import Segment

__all__ = ["QUARANTINE_NAME", "clear_unlisted", "finish", "report_of"]

QUARANTINE_NAME = "quarantine.jsonl"


def clear_unlisted(root: Root, journal: Journal, state: State) -> None:
    """For ``replan``: write the plans that are left, and drop what is not listed."""
    old = journal.plans()
    kept, fresh = state.plans[: len(old)], state.plans[len(old) :]
    for number, (before, after) in enumerate(zip(old, kept, strict=True)):
        if before.segments:
            root.release_numbers(before.first, len(before.segments))
        for segment in before.segments:
            if segment.number not in state.listed:
                root.discard(segment.number)
        journal.replace_plan(number, after)
    for plan in fresh:
        journal.add_plan(plan)


def finish(root: Root, journal: Journal, state: State, worked: Sequence[Plan], new: bool) -> None:
    """End a run whose segments are all settled; ``new``: nothing was at the destination before it.

    Raises ``ConversionError`` with the reasons if not one sample of the dataset came out; nothing is left then.
    """
    nothing = state.manifest is None
    for plan in worked:
        root.release_numbers(plan.first, len(plan.segments), unused=nothing)
    quarantined = _in_order(state)
    if nothing:
        journal.discard()
        if new:  # the folder itself stays: it may have been there, and others may have put something into it
            for path in (root.private, root.path / "segments"):
                shutil.rmtree(path, ignore_errors=True)
        raise nothing_to_convert(worked[-1].source if worked else str(root.path), quarantined, [])
    state.manifest = root.pack()
    path = root.path / QUARANTINE_NAME
    if quarantined:
        lines = quarantine_lines(quarantined)
        if not path.exists() or path.read_bytes() != lines:
            replace_file(path, lines, scratch=root.scratch)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def report_of(
    root: Root,
    state: State,
    totals: Totals,
    summary: PlanSummary,
    *,
    source: str,
    present: int,
    skipped: Sequence[Skipped],
    removers: Sequence[SourceRemover],
    read_back: bool,
    seconds: float,
) -> ConversionReport:
    """The report of a run, or of a plan if nothing was run."""
    flags, loss = _columns(root.path, state)
    deleted = [remover.deleted for remover in removers]
    quarantined = _in_order(state)
    return ConversionReport(
        source=source,
        destination=str(root.path),
        samples_found=len(state.converted) + len(quarantined),
        converted=len(state.converted) - present,
        present=present,
        quarantined=tuple(quarantined),
        skipped=tuple(skipped),
        tokens=totals.tokens,
        segments=totals.segments,
        source_bytes=summary.source_bytes,
        raw_bytes=totals.raw_bytes,
        stored_bytes=totals.stored_bytes,
        seconds=seconds,
        read_back=read_back,
        zero_state_samples=int(np.count_nonzero(flags & FLAGS["all_zero_states"])),
        unsupervised_samples=int(np.count_nonzero(loss == 0)),
        trimmed_samples=int(np.count_nonzero(flags & FLAGS["trimmed"])),
        left_out=summary.left_out,
        notes=tuple(dict.fromkeys([*counted(state.plans), *summary.notes])),
        loss=_losses(root, state),
        deleted=Deleted(
            sum(d.files for d in deleted),
            sum(d.bytes for d in deleted),
            tuple(item for d in deleted for item in d.kept),
        ),
        fingerprint=state.manifest.fingerprint if state.manifest is not None else "",
        plan=summary,
    )


def _in_order(state: State) -> list[Quarantined]:
    return sorted(state.quarantined.values(), key=lambda item: natural_key(item.name))


def _losses(root: Root, state: State) -> dict[str, Loss]:
    """What the segments' metadata says of the fields that were made fp8."""
    if state.manifest is None or not any(is_encoded(field) for field in state.manifest.fields):
        return {}
    found = []
    for entry in state.listed.values():
        source = Segment(root.path, entry).meta.source or {}
        found.append((entry.tokens, {name: Loss(**loss) for name, loss in source.get("loss", {}).items()}))
    return combined(found)


def _columns(path: Path, state: State) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The flags and the supervised tokens of every sample of the dataset."""
    if state.manifest is None:
        empty = np.empty(0, np.int64)
        return empty, empty
    table = read_tables(path, state.manifest)
    return table[COLUMNS.index("flags")], table[COLUMNS.index("loss_tokens")]

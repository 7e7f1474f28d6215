"""speculators 0.5 to 0.9: an arrow dataset (ids and masks) beside ``hidden_states/hs_{row}.safetensors``.

A file has ``hidden_states`` ``[S, L, H]`` (the last of the L layers is the state before the final norm) and
``token_ids`` ``[S]``; files of the fp8 backend add ``hidden_states_scales`` ``[S, 1, 1]``.  The mask is a column of
the arrow dataset; its ids must be those of the file, as in ``ArrowDataset`` of speculators 0.9.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import SourceError
from hsloader.formats.arrow_rows import ArrowRow, read_row, rows_of
from hsloader.formats.blocks import Tensor
from hsloader.formats.container import Container
from hsloader.formats.discover import REMOVING, REMOVING_REASON, FoundFile, Skipped, natural_key
from hsloader.formats.held import demand_not_held
from hsloader.formats.layouts import record_of
from hsloader.formats.opening import open_container
from hsloader.formats.source import Hints, Identity, Record, SampleSource
from hsloader.formats.speculators import build_layers

__all__ = ["LAYOUT", "FolderSamples", "demand_same_ids", "describe_folder", "planned_record"]

LAYOUT = "speculators-arrow"
_STATES = "hidden_states"
_NAME = re.compile(r"hs_([0-9]{1,12})\.safetensors\Z")


@dataclass
class FolderSamples:
    """What an arrow dataset and its hidden states hold; ``arrows`` are the arrow files with rows, by name below SRC.

    ``unread``: those of ``bad`` that were not looked into, since the arrow dataset cannot be read.
    """

    samples: list[SampleSource] = field(default_factory=list)
    bad: list[Skipped] = field(default_factory=list)
    sidecars: list[Skipped] = field(default_factory=list)
    arrows: dict[str, Identity] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)


def describe_folder(folder: FoundFile) -> FolderSamples:
    """The samples of one arrow dataset; if it cannot be read, each of its files of hidden states is a bad one."""
    prefix = f"{folder.name}/" if folder.name else ""
    found = FolderSamples()
    try:
        files = _state_files(folder, prefix, found)
    except SourceError as error:
        return FolderSamples(bad=[Skipped(f"{prefix}{_STATES}", error.reason)])
    beside = list(found.sidecars)
    try:
        _describe_rows(found, folder, prefix, files)
    except SourceError as error:
        where = os.path.split(error.path)[1]
        reason = f"there is no mask for it, since {where} beside {_STATES}/ cannot be read: {error.reason}"
        names = [files[number].name for number in sorted(files)] or [f"{prefix}{_STATES}"]
        return FolderSamples(bad=[Skipped(name, reason) for name in names], sidecars=beside, unread=set(names))
    return found


def _describe_rows(found: FolderSamples, folder: FoundFile, prefix: str, files: dict[int, FoundFile]) -> None:
    """Sort every row and every file of hidden states in; ``SourceError`` if the arrow files cannot be read."""
    seen: set[int] = set()
    for row in rows_of(folder.path, prefix):
        found.arrows[row.file.name] = row.file.identity
        file = files.get(row.number)
        if file is None:
            name = f"{prefix}{_STATES}/hs_{row.number}.safetensors"
            reason = f"not found: row {row.number} of the arrow dataset ({row.length} tokens) has no hidden states"
            found.bad.append(Skipped(name, reason))
            continue
        seen.add(row.number)
        try:
            found.samples.append(_describe(file, folder.path, row))
        except SourceError as error:
            found.bad.append(Skipped(file.name, error.reason))
    for number in sorted(files.keys() - seen):
        found.bad.append(Skipped(files[number].name, f"the arrow dataset has no row {number}: there is no mask for it"))


def _state_files(folder: FoundFile, prefix: str, found: FolderSamples) -> dict[int, FoundFile]:
    """The files of hidden states by row; everything else beside them is set aside."""
    states = Path(folder.path, _STATES)
    files: dict[int, FoundFile] = {}
    try:
        with os.scandir(states) as entries:
            listing = sorted(entries, key=lambda e: natural_key(e.name))
    except FileNotFoundError:
        raise SourceError(
            folder.name or ".", f"an arrow dataset without a folder {_STATES}/ beside it: there are no hidden states"
        ) from None
    except OSError as error:
        raise SourceError(f"{prefix}{_STATES}", f"folder cannot be read: {error.strerror}") from error
    names = {entry.name for entry in listing}
    for entry in listing:
        match = _NAME.match(entry.name)
        name = f"{prefix}{_STATES}/{entry.name}"
        if match is None or str(int(match[1])) != match[1]:
            other = "not a file of hidden states (hs_{row}.safetensors)"
            found.sidecars.append(Skipped(name, REMOVING_REASON if entry.name.startswith(REMOVING) else other))
        else:
            files[int(match[1])] = FoundFile(name, entry.path, lock=f"{entry.name}.lock" in names)
    return files


def _describe(file: FoundFile, folder: str, row: ArrowRow) -> SampleSource:
    demand_not_held(file)
    with open_container(file.path, file.name) as (container, identity):
        record = _record(container, row, file.name)
    return SampleSource(
        name=file.name,
        path=file.path,
        row=row.number,
        length=record.length,
        specs=tuple(f.spec for f in record.fields),
        layout=LAYOUT,
        identity=identity,
        payload_bytes=sum(t.nbytes for f in record.fields for t in f.parts),
        extras=record.extras,
        notes=(*record.notes, container.note),
        left_out=record.left_out,
        folder=folder,
        place=row.place,
        arrow=row.file,
    )


def planned_record(sample: SampleSource, container: Container) -> tuple[Record, ArrowRow]:
    """The record of a planned sample, with its row of the arrow dataset."""
    assert sample.arrow is not None  # plans without one are refused
    assert sample.place is not None
    assert sample.row is not None
    row = read_row(sample.arrow, sample.row, sample.place)
    record = _record(container, row, sample.name)
    if record.length != sample.length or tuple(f.spec for f in record.fields) != sample.specs:
        raise SourceError(sample.name, "the file no longer holds what was planned: make the plan again")
    return record, row


def _record(container: Container, row: ArrowRow, name: str) -> Record:
    value = container.value
    if not isinstance(value, dict) or "token_ids" not in value or not isinstance(value.get(_STATES), Tensor):
        raise SourceError(name, "not a file of hidden states: expected the tensors hidden_states and token_ids")
    keys: dict[object, object] = {**value, "loss_mask": row.mask}
    record = record_of(LAYOUT, build_layers, keys, name, Hints())
    if record.length != row.length:
        raise SourceError(
            name, f"the file has {record.length} tokens, row {row.number} of the arrow dataset {row.length}"
        )
    return replace(record, notes=(*record.notes, *row.notes))


def demand_same_ids(file_ids: npt.NDArray[Any], arrow_ids: npt.NDArray[Any], name: str) -> None:
    """Demand that the file's ids are the arrow row's; ``SourceError`` names the first that differs."""
    if len(file_ids) != len(arrow_ids):
        raise SourceError(name, f"token_ids has {len(file_ids)} values, the arrow row's input_ids {len(arrow_ids)}")
    differ = np.flatnonzero(file_ids != arrow_ids)
    if differ.size:
        at = int(differ[0])
        raise SourceError(
            name,
            f"token_ids differ from the arrow row's input_ids in {differ.size} places, first at {at} "
            f"({file_ids[at]} and {arrow_ids[at]}): the states belong to another sample",
        )

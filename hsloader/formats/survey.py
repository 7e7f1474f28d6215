"""Survey a source: discover its files and describe each from its headers, in threads; no payload is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hsloader.errors import SourceError
from hsloader.formats.discover import Discovery, FoundFile, Skipped, discover, natural_key
from hsloader.formats.held import demand_not_held
from hsloader.formats.opening import describe_file
from hsloader.formats.producer_settings import SETTINGS_FILE, ProducerSettings, read_settings
from hsloader.formats.source import Described, Hints, Identity, SampleSource

__all__ = ["Survey", "survey"]

_SETTINGS_FILES = 64  # of these are read at most
_BATCH = 64  # files a thread takes at a time


@dataclass
class Survey:
    """What a source holds.

    ``samples`` in natural order; ``bad`` what looked like a sample and cannot be taken, with the reason; ``sidecars``
    what was set aside (every file below SRC is in one of these three); ``layouts`` how many samples each layout has;
    ``settings`` what producers' own settings files say; ``arrows`` the arrow files that have the masks of samples, by
    name; ``unread`` those of ``bad`` that nobody looked into, since their arrow dataset could not be read; ``notes``
    what is amiss beside the samples.
    """

    src: str
    samples: list[SampleSource] = field(default_factory=list)
    bad: list[Skipped] = field(default_factory=list)
    sidecars: list[Skipped] = field(default_factory=list)
    layouts: Counter[str] = field(default_factory=Counter)
    settings: list[ProducerSettings] = field(default_factory=list)
    arrows: dict[str, Identity] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def survey(
    src: str | os.PathLike[str],
    *,
    hints: Hints | None = None,
    threads: int = 8,
    progress: Callable[[int, int], None] | None = None,
    found: Discovery | None = None,
) -> Survey:
    """Discover and describe everything below ``src``. ``progress(files done, files)`` is called now and then.

    ``found`` is what an earlier ``discover(src)`` found, or the part of it that is to be described.
    """
    found = found or discover(src)
    result = Survey(found.src, bad=list(found.bad), sidecars=list(found.sidecars))
    hints = hints or Hints()
    batches = [found.files[i : i + _BATCH] for i in range(0, len(found.files), _BATCH)]
    done = 0
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="hsloader-survey") as pool:
        for batch, outcomes in zip(batches, pool.map(lambda b: _describe(b, hints), batches), strict=True):
            for file, outcome in zip(batch, outcomes, strict=True):
                _take(result, file, outcome)
            done += len(batch)
            if progress is not None:
                progress(done, len(found.files))
    result.settings, result.notes = _settings(found)
    for folder in found.folders:
        _take_folder(result, folder)
    if found.folders:
        result.samples.sort(key=lambda s: natural_key(s.name))
    return result


def _settings(found: Discovery) -> tuple[list[ProducerSettings], list[str]]:
    """What the settings files say, and a note for each that cannot be read."""
    settings, notes = [], []
    names = [s.name for s in found.sidecars if s.name.rsplit("/", 1)[-1] == SETTINGS_FILE]
    for name in names[:_SETTINGS_FILES]:
        try:
            settings.append(read_settings(os.path.join(found.src, name), name))
        except SourceError as error:
            notes.append(str(error))
    return settings, notes


def _take_folder(result: Survey, folder: FoundFile) -> None:
    from hsloader.formats.speculators_arrow import LAYOUT, describe_folder

    inside = describe_folder(folder)
    result.samples.extend(inside.samples)
    result.bad.extend(inside.bad)
    result.sidecars.extend(inside.sidecars)
    result.arrows.update(inside.arrows)
    result.unread.update(inside.unread)
    result.layouts[LAYOUT] += len(inside.samples)


def _describe(files: Iterable[FoundFile], hints: Hints) -> list[Described | SourceError]:
    outcomes: list[Described | SourceError] = []
    for file in files:
        try:
            demand_not_held(file)
            outcomes.append(describe_file(file.path, file.name, hints=hints))
        except SourceError as error:
            outcomes.append(error)
    return outcomes


def _take(result: Survey, file: FoundFile, outcome: Described | SourceError) -> None:
    if isinstance(outcome, SourceError):
        reason = outcome.reason
        if file.lock and ("truncated" in reason or "empty" in reason):
            reason += " (a lock file lies beside it: perhaps it is still being written)"
        result.bad.append(Skipped(file.name, reason))
    elif outcome.sidecar is not None:
        result.sidecars.append(Skipped(file.name, outcome.sidecar))
    else:
        result.samples.extend(outcome.samples)
        result.layouts[outcome.layout] += len(outcome.samples)

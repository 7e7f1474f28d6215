"""Where a destination stands: its plans, what of them is listed, and what became of every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hsloader.conversion.journal import Journal, Settled
from hsloader.conversion.plan import Plan, PlannedSegment, counts_of, file_of
from hsloader.conversion.provenance import provenance_of
from hsloader.conversion.report import Quarantined
from hsloader.conversion.settings import ConvertSettings
from hsloader.errors import SettingsChangedError
from hsloader.formats.source import Identity
from hsloader.store.manifest import Manifest, SegmentEntry
from hsloader.store.publish import Root
from hsloader.store.stored_segment import Segment

__all__ = ["State", "changed_settings", "quarantined_in", "unrecordable"]

_ONLY_WHILE_WAITING = ("segment_size", "typical_length")  # of no matter to segments that are made already
_REMEDY = (
    "Run with the values of the journal, convert to another destination, or say --replan (in Python replan=True): it "
    "keeps every segment that is listed and plans the rest anew"
)


@dataclass(slots=True)
class State:
    """A destination as a run finds it.

    ``listed``: the manifest's entries by segment number.  ``settled``: what the journal says is done.
    ``converted`` and ``quarantined``: what became of the samples of listed and empty segments.
    """

    plans: list[Plan] = field(default_factory=list)
    manifest: Manifest | None = None
    listed: dict[int, SegmentEntry] = field(default_factory=dict)
    settled: dict[int, Settled] = field(default_factory=dict)
    converted: set[str] = field(default_factory=set)
    quarantined: dict[str, Quarantined] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Root, journal: Journal) -> State:
        """The state of the dataset at ``root``; empty if nothing is there."""
        state = cls(plans=journal.plans(), settled=journal.settled())
        state.manifest = root.manifest() if root.path.is_dir() else None
        if state.manifest is not None:
            state.listed = {entry.number: entry for entry in state.manifest.segments}
        for plan in state.plans:
            for segment in plan.segments:
                if state.done(segment.number):
                    state.count(segment, state.reasons(root, segment.number))
            for item in plan.refused:
                state.quarantined[item.name] = item
        for name in state.converted & state.quarantined.keys():  # bad once, good since
            del state.quarantined[name]
        return state

    def done(self, number: int) -> bool:
        """Whether a planned segment needs no more work: it is listed, or none of its samples came out."""
        settled = self.settled.get(number)
        return number in self.listed or (settled is not None and settled.digest is None)

    def proved(self, number: int) -> bool:
        """Whether the listed segment was read back equal before it was listed."""
        entry, settled = self.listed.get(number), self.settled.get(number)
        return entry is not None and settled is not None and settled.read_back and settled.digest == entry.digest

    def pending(self) -> list[tuple[Plan, PlannedSegment]]:
        """The segments that are still to be made, in the order of the plans."""
        return [(plan, s) for plan in self.plans for s in plan.segments if not self.done(s.number)]

    def reasons(self, root: Root, number: int) -> list[Quarantined]:
        """What a done segment left out, from its metadata or, if it is empty, from the journal."""
        entry = self.listed.get(number)
        if entry is None:
            return list(self.settled[number].quarantined)
        return quarantined_in(Segment(root.path, entry))

    def count(self, segment: PlannedSegment, reasons: Iterable[Quarantined]) -> None:
        """Take in what became of a done segment's samples."""
        bad = {item.name: item for item in reasons}
        self.quarantined.update(bad)
        for sample in segment.samples:
            if sample.name not in bad:
                self.converted.add(sample.name)
                self.quarantined.pop(sample.name, None)

    def forget_quarantined(self, is_gone: Callable[[str], bool]) -> None:
        """What was quarantined, and was then taken out of the source, is nothing that a run leaves out any more."""
        for name in [name for name in self.quarantined if is_gone(name)]:
            del self.quarantined[name]

    def forget_pending(self) -> None:
        """For ``replan``: only what is listed stays planned, and what was quarantined is looked at again."""
        self.plans = [self._listed_part(plan) for plan in self.plans]
        self.quarantined = {}

    def accept(self, source: str, settings: ConvertSettings, changed: Mapping[str, Identity]) -> None:
        """For ``replan``: the plans of ``source`` get the settings of this run, and know which files ``changed``."""
        for i, plan in enumerate(self.plans):
            if plan.source == source:
                accepted = {name: now for name, now in changed.items() if name in plan.files}
                accepted = {**plan.accepted, **accepted}
                self.plans[i] = replace(plan, settings=settings.identity(), accepted=accepted)

    def _listed_part(self, plan: Plan) -> Plan:
        """What of a plan is in the dataset; the samples that its segments left out count as refused."""
        segments = []
        for segment in plan.segments:
            if segment.number not in self.listed:
                continue
            bad = [self.quarantined[s.name] for s in segment.samples if s.name not in self.converted]
            samples = tuple(s for s in segment.samples if s.name in self.converted)
            segments.append(replace(segment, samples=samples, refused=(*segment.refused, *bad)))
        kept_samples = [sample for segment in segments for sample in segment.samples]
        files = {file_of(sample) for sample in kept_samples}
        files |= {sample.arrow.name for sample in kept_samples if sample.arrow is not None}
        kept = {name: identity for name, identity in plan.files.items() if name in files}
        return replace(plan, segments=tuple(segments), files=kept, refused=(), **counts_of(kept_samples))


def quarantined_in(segment: Segment) -> list[Quarantined]:
    """What a segment's metadata says was left out."""
    return [Quarantined(str(q.get("name", "")), str(q.get("reason", ""))) for q in segment.meta.quarantine]


def changed_settings(state: State, source: str, settings: ConvertSettings) -> SettingsChangedError | None:
    """The refusal of a rerun whose settings or source are not those of the journal, or None.

    Each source has settings of its own; those of another one matter only while samples of it wait to be converted.
    A norm state that is not said again, or is the one that was recorded, changes nothing.
    """
    plans = state.plans
    wanted = settings.identity()
    defaults = ConvertSettings().identity()  # for what an older version's journal does not know yet
    waiting = {id(plan) for plan, _ in state.pending()}
    for plan in plans:
        if plan.source != source and id(plan) not in waiting:
            continue
        there = {**defaults, **plan.settings}
        differences = [
            f"  {name}: the journal has {_said(there[name])}, this run has {_said(wanted.get(name, 'no such setting'))}"
            for name in sorted(there)
            if there[name] != wanted.get(name)
            and (name not in _ONLY_WHILE_WAITING or id(plan) in waiting)
            and not (name == "norm_state" and settings.norm_state in (None, plan.provenance.norm_state))
        ]
        if differences:
            if plan.source != source:
                return SettingsChangedError(
                    f"the conversion of {plan.source} into this destination is not finished, and has other settings:\n"
                    + "\n".join(differences)
                    + "\nRun its own command first"
                )
            return SettingsChangedError(
                "this destination was begun with other settings:\n" + "\n".join(differences) + f"\n{_REMEDY}"
            )
    if plans and not settings.append and all(plan.source != source for plan in plans):
        return SettingsChangedError(
            f"this destination was converted from another source: the journal has {plans[-1].source}, this run has "
            f"{source}. Say --append (in Python append=True) to add a second source to the dataset, or convert to "
            "another destination"
        )
    return None


def unrecordable(state: State, source: str, settings: ConvertSettings) -> SettingsChangedError | None:
    """The refusal to say of samples that are in the dataset already what it does not record of them, or None."""
    for plan in state.plans:
        if plan.source != source or not any(segment.number in state.listed for segment in plan.segments):
            continue
        told = provenance_of(settings, plan.fields, list(plan.layouts))
        differences = [
            f"  {name}: the dataset has {_said(getattr(plan.provenance, name))}, this run has {_said(here)}"
            for name, said in (("norm_state", settings.norm_state), ("layer_ids", settings.layer_ids))
            if said is not None and (here := getattr(told, name)) != getattr(plan.provenance, name)
        ]
        if differences:
            return SettingsChangedError(
                "the samples in the dataset keep what was recorded when they were converted:\n"
                + "\n".join(differences)
                + "\nConvert them anew to another destination"
                + (
                    f", or leave this out and say hsloader.DataLoader(norm_state={settings.norm_state!r}) when training"
                    if "norm_state" in differences[0]
                    else ""
                )
            )
    return None


def _said(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return "none" if value is None else repr(value)

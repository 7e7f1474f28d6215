"""``hsloader.convert``: producers' files become a dataset; the same command again resumes, or adds what is new."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from hsloader.conversion.execute import Execution, Totals
from hsloader.conversion.finish import clear_unlisted, finish, report_of
from hsloader.conversion.journal import Journal
from hsloader.conversion.plan import Plan
from hsloader.conversion.planning import Made, hints_of, layout_of, make_plan
from hsloader.conversion.probe import Probe, measure
from hsloader.conversion.removal import SourceRemover, finish_interrupted
from hsloader.conversion.report import ConversionReport, PlanSummary, Progress, ProgressCallback
from hsloader.conversion.settings import ConvertSettings
from hsloader.conversion.sources import SourceComparison
from hsloader.conversion.space import demand_space, existing_parent, same_file_system
from hsloader.conversion.state import State, changed_settings, unrecordable
from hsloader.conversion.summary import summarize
from hsloader.errors import ConversionError, StoreBusyError
from hsloader.formats.discover import Discovery, discover
from hsloader.formats.source import Identity
from hsloader.store.compatible import check_compatible
from hsloader.store.publish import Root
from hsloader.store.stored_segment import Segment

__all__ = ["ConvertOptions", "convert"]


class ConvertOptions(TypedDict, total=False):
    """The keyword options of ``convert``; see there."""

    codec: str
    bf16_as: str
    segment_size: int | None
    typical_length: int | None
    trim_padding: bool
    producer: str | None
    model: str | None
    hidden_size: int | None
    num_layers: int | None
    layer_ids: Sequence[int] | None
    layer_convention: str | None
    norm_state: str | None
    vocab_size: int | None
    tokenizer: str | None
    notes: Sequence[str]
    workers: int | None
    threads: int | None
    read_back: bool
    delete_source: bool | Literal["lossy"]
    append: bool
    allow_unknown: bool
    replan: bool


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    on_plan: Callable[[PlanSummary], None] | None = None,
    **options: Unpack[ConvertOptions],
) -> ConversionReport:
    """Convert the samples below ``src`` (a folder or one file) into the dataset at ``dst``.

    Run again after an interruption it goes on where it stopped, and after that it adds files that are new.  Nothing
    below ``src`` is changed unless ``delete_source`` asks for it.  ``on_plan`` is given the plan before anything is
    written, ``progress`` is called several times a second; what either raises ends the run.  ``dry_run`` plans only.

    What decides the bytes (a rerun must agree): ``codec`` ``"lossless"``, ``"none"`` or ``"fp8"`` (lossy: states
    as float8_e4m3fn with a scale a token, see ``ConversionReport.loss``); ``bf16_as`` ``"bfloat16"`` or
    ``"uint16"`` (for zarr readers that know no bfloat16); ``segment_size`` raw bytes (default: a 16th of the total
    between 256 MiB and 8 GiB, or a 4096th of it); ``typical_length`` tokens (default: the median) chooses the chunks;
    ``trim_padding`` cuts the tail of ids 0 and mask 0 that some producers leave.

    What the files cannot tell: ``producer``, ``model``, ``hidden_size`` (needed where only ``[S, k*H]`` is stored),
    ``num_layers``, ``layer_ids`` of the auxiliary states in ``layer_convention`` ``"after"`` (0-based, default),
    ``"before"`` (vLLM) or ``"hf"``, ``norm_state`` of the last state (``"pre"``, ``"post"``), ``vocab_size`` (ids are
    checked against it), ``tokenizer``, ``notes``.

    How: ``workers`` processes with ``threads`` encoder threads each (default: the cores this process may use);
    ``read_back`` reads every segment back from the disk and compares; ``delete_source`` removes a source file once all
    of it is proved to be in the dataset (``"lossy"`` where something is left out on purpose); ``append`` adds a second
    source to a dataset, ``allow_unknown`` also where one side's norm state or layers are unknown; ``replan`` keeps what
    is listed and plans the rest anew.

    Raises ``ConversionError`` (refused, or stopped in a state that the same call resumes), ``SettingsChangedError``,
    ``StoreBusyError``, ``IncompatibleError``, ``FileNotFoundError``, ``ValueError`` and ``TypeError`` for arguments.
    """
    settings = ConvertSettings.of(**options)
    source, destination = _paths(src, dst)
    return _Conversion(source, destination, settings, progress or _silent, on_plan).run(dry_run)


def _silent(_: Progress) -> None:
    return


class _Conversion:
    def __init__(
        self,
        source: str,
        destination: Path,
        settings: ConvertSettings,
        progress: ProgressCallback,
        on_plan: Callable[[PlanSummary], None] | None,
    ) -> None:
        self._source = source
        self._settings = settings
        self._tell = progress
        self._on_plan = on_plan
        self._root = Root(destination)
        self._journal = Journal(destination)
        self._began = time.monotonic()
        self._obstacle = _obstacle(destination)
        self._notes = [f"the destination could not be written: {self._obstacle}"] if self._obstacle else []

    def run(self, dry_run: bool) -> ConversionReport:
        """Plan, and unless ``dry_run`` execute."""
        root, journal = self._root, self._journal
        if self._obstacle and not dry_run:
            raise ConversionError(f"{root.path}: {self._obstacle}; choose another destination, or make it writable")
        existed = root.path.exists()
        new = not (existed and any(root.path.iterdir()))
        if not new and not root.private.is_dir():
            try:
                Root.create(root.path)  # refuses a folder of something else
            except OSError:
                if not self._obstacle:
                    raise
        with contextlib.ExitStack() as stack:
            locked = journal.exists and not dry_run
            if locked:
                stack.enter_context(journal.lock())
            state = State.read(root, journal)
            found, comparison = self._look(state)
            made = self._plan(state, comparison.fresh_part(found), comparison)
            comparison.demand_unchanged()
            state.forget_quarantined(comparison.is_gone)
            self._notes.extend(made.notes if made is not None else ())
            self._notes.extend(comparison.note())
            fresh = made.plan if made is not None else None
            if fresh is not None:
                state.plans.append(fresh)
            summary = self._summary(state, found, made)
            if self._on_plan is not None:
                self._on_plan(summary)
            present = len(state.converted)
            if dry_run:
                return self._report(state, Totals(), summary, present=present)
            demand_space(summary.space_needed, root.path, self._may_delete())
            Root.create(root.path)
            if not locked:
                stack.enter_context(journal.lock())
                if journal.plans():
                    raise StoreBusyError(f"{root.path}: another conversion began here meanwhile; run the command again")
            self._write_plans(state, fresh, comparison.old)
            try:
                return self._execute(state, found, summary, present, new)
            finally:
                if not existed:
                    with contextlib.suppress(OSError):
                        root.path.rmdir()  # only if nothing came out, and so nothing was left in it

    def _look(self, state: State) -> tuple[Discovery, SourceComparison]:
        """All that is below the source, and how to tell what of it is new; refuses other settings."""
        settings = self._settings
        refusal = unrecordable(state, self._source, settings)
        if refusal is None and not settings.replan:
            refusal = changed_settings(state, self._source, settings)
        if refusal is not None:
            raise refusal
        if settings.replan:
            state.forget_pending()
        if state.manifest is not None and not state.plans and not settings.append:
            raise ConversionError(
                f"{self._root.path}: this dataset was not made by a conversion; pass append to add the samples to it, "
                "or choose another destination"
            )
        self._tell(Progress(stage="find"))
        found = discover(self._source)
        return found, SourceComparison(state, found.src, keep_changed=settings.replan)

    def _plan(self, state: State, part: Discovery, comparison: SourceComparison) -> Made | None:
        """A plan for what is new; None if nothing is."""
        if not part.folders:
            comparison.demand_unchanged()  # before anything is described
        if state.plans and not (part.files or part.bad or part.folders):
            return None
        numbers = [segment.number for plan in state.plans for segment in plan.segments]
        fields = state.manifest.fields if state.manifest is not None else None
        if fields is None and state.pending():
            fields = state.plans[0].fields
        changed = self._settings.replan  # then the settings may name another provenance
        began = time.monotonic()

        def told(done: int, total: int) -> None:
            self._tell(Progress(stage="describe", done=done, total=total, seconds=time.monotonic() - began))

        made = make_plan(
            part,
            self._settings,
            comparison=comparison,
            provenance=next((plan.provenance for plan in state.plans if plan.source == part.src and not changed), None),
            first=max([self._root.next_number(), *(n + 1 for n in numbers)]),
            present_fields=fields,
            present_names=self._names(state),
            scratch=self._scratch(),
            progress=told,
        )
        plan = made.plan
        if plan is not None:
            if state.manifest is not None and plan.segments:
                unknown = self._settings.allow_unknown
                check_compatible(self._root.path, state.manifest, plan.fields, plan.provenance, allow_unknown=unknown)
            state.quarantined.update({item.name: item for item in plan.refused})
        return made

    def _names(self, state: State) -> frozenset[str]:
        """The names that new samples may not have: those of the plans, and of segments that no plan made."""
        planned = {s.name for _, segment in state.pending() for s in segment.samples}
        ours = {segment.number for plan in state.plans for segment in plan.segments}
        foreign = [Segment(self._root.path, entry) for number, entry in state.listed.items() if number not in ours]
        written = {segment.name(i) for segment in foreign for i in range(segment.entry.samples)}
        return frozenset(state.converted | planned | written)

    def _summary(self, state: State, found: Discovery, made: Made | None) -> PlanSummary:
        pending = state.pending()
        probe = made.probe if made is not None else Probe()
        if pending and (made is None or made.plan is None or not made.plan.segments):
            self._tell(Progress(stage="measure"))
            plan, segment = pending[0]
            layout = layout_of(plan.fields, plan.typical_length)
            probe = measure(segment.samples, plan.fields, layout, hints_of(self._settings), self._scratch())
        refused = [q for _, segment in pending for q in segment.refused]
        return summarize(
            pending,
            self._settings,
            probe,
            source=self._source,
            destination=self._root.path,
            plans=state.plans,
            present=len(state.converted),
            recorded=state.manifest.provenance if state.manifest is not None else None,
            quarantined=[*state.quarantined.values(), *refused],
            sidecars=made.sidecars if made is not None else found.sidecars,
            notes=self._notes,
        )

    def _write_plans(self, state: State, fresh: Plan | None, changed: Mapping[str, Identity]) -> None:
        """Make the plans durable and their numbers ours, before the first segment is begun."""
        root, journal = self._root, self._journal
        root.clean()
        if self._settings.replan:
            state.accept(self._source, self._settings, changed)
            clear_unlisted(root, journal, state)
        elif fresh is not None:
            journal.add_plan(fresh)
        for plan in {id(plan): plan for plan, _ in state.pending()}.values():
            root.reserve(len(plan.segments), hold=True, first=plan.first)

    def _execute(
        self, state: State, found: Discovery, summary: PlanSummary, present: int, new: bool
    ) -> ConversionReport:
        root = self._root
        removers: dict[int, SourceRemover] = {}
        if self._settings.delete_source:
            for plan in state.plans:
                if plan.source == found.src:
                    removers[id(plan)] = remover = SourceRemover(plan)
                    for segment in plan.segments:
                        if state.done(segment.number):
                            bad = [q.name for q in state.reasons(root, segment.number)]
                            empty = segment.number not in state.listed
                            remover.listed(segment, bad, empty or state.proved(segment.number))
            finish_interrupted(list(removers.values()), (item.name for item in summary.skipped))
        run = Execution(root, self._journal, state, self._settings, progress=self._tell, removers=removers)
        pending = {id(plan): plan for plan, _ in state.pending()}
        totals = run.run()
        self._tell(Progress(stage="finish"))
        finish(root, self._journal, state, list(pending.values()), new)
        return self._report(state, totals, summary, present=present, removers=list(removers.values()))

    def _report(
        self,
        state: State,
        totals: Totals,
        summary: PlanSummary,
        *,
        present: int,
        removers: Sequence[SourceRemover] = (),
    ) -> ConversionReport:
        return report_of(
            self._root,
            state,
            totals,
            summary,
            source=self._source,
            present=present,
            skipped=summary.skipped,
            removers=removers,
            read_back=self._settings.read_back,
            seconds=time.monotonic() - self._began,
        )

    def _scratch(self) -> str | None:
        """Where the plan may inflate gzip files (into files without a name): beside the destination if that can be."""
        return None if self._obstacle else os.fspath(existing_parent(self._root.scratch))

    def _may_delete(self) -> bool:
        return not self._settings.delete_source and same_file_system(Path(self._source), self._root.path)


def _paths(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> tuple[str, Path]:
    """Source and destination, absolute; neither may lie inside the other."""
    source, destination = os.path.abspath(os.fspath(src)), Path(os.path.abspath(os.fspath(dst)))
    if not os.path.lexists(source):
        raise FileNotFoundError(f"{source}: there is no such source")
    if destination.exists() and not destination.is_dir():
        raise ConversionError(f"{destination}: expected a folder or nothing, found a file; choose another destination")
    real_source = Path(os.path.realpath(source))
    real_destination = Path(os.path.realpath(destination))
    if real_destination == real_source or real_source in real_destination.parents:
        raise ConversionError(
            f"{destination}: the destination lies inside the source {source}; the dataset would be looked at as a "
            "source, choose a folder beside it"
        )
    if real_destination in real_source.parents:
        raise ConversionError(
            f"{destination}: the source {source} lies inside the destination; choose another destination"
        )
    return source, destination


def _obstacle(destination: Path) -> str:
    """Why nothing can be written at the destination; empty if it can."""
    parent = existing_parent(destination)
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is not writable for this user"

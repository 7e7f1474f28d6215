"""hsloader doctor PID: what a training process is doing, and what holds it up; with or without hsloader in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Traceback, clear_errors
from hsloader.monitor.words import listed, rate_text, share_text, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hsloader.monitor.examine import Examination
    from hsloader.monitor.situation import HostReport
    from hsloader.monitor.summary import FileReading, ProcessReport

__all__ = ["doctor"]

_BAD = ("stopped", "dead-worker", "shm-full", "stuck-read", "deadlock", "lost-message")
_GOOD = ("trainer",)
_READERS = ("trainer", "worker", "feeder")
_SHOWN = 32  # processes in the table; --json has all


@clear_errors
def doctor(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The training process, its launcher, or a worker.")],
    *,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.2, max=600, help="How long to watch.")] = 2.0,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", min=1, help="Samples a batch, to say how long one takes to read."),
    ] = None,
    python: Annotated[bool, typer.Option(help="Ask py-spy, if installed, what busy threads execute.")] = True,
    as_json: Json = False,
    traceback: Traceback = False,
) -> int:
    """Say what holds up a training process.

    What it and its workers are doing right now, with or without hsloader in it, and what the limit is.
    """
    from hsloader.monitor.examine import examine

    found = examine(pid, seconds, batch_size=batch_size, python=python)
    if as_json:
        output.print_json(found.as_dict())
    else:
        _print(found)
    return 0


def _print(found: Examination) -> None:
    kind = str(found.verdict.kind)
    style = "bad" if kind in _BAD else "good" if kind in _GOOD else "warn"
    output.line(output.printable(found.verdict.sentence), style=style)
    if found.verdict.advice:
        output.line(f"what would help: {output.printable(found.verdict.advice)}")
    for warning in found.warnings:
        output.line(f"warning: {output.printable(warning)}", style="bad")
    output.heading(f"processes, over {time_text(found.seconds)}")
    output.columns([_HEAD, *(_row(p) for p in found.processes[:_SHOWN])], right=(1, 2, 3, 4))
    if len(found.processes) > _SHOWN:
        output.line(f"  ... and {output.count(len(found.processes) - _SHOWN)} more (all of them with --json)")
    _print_files(found.processes)
    _print_threads(found.processes)
    output.heading("machine")
    output.facts(_machine(found.host, found.processes))
    for note in found.notes:
        output.line(f"note: {output.printable(note)}", style="dim")


_HEAD = ("process", "pid", "cores", "read", "from disk", "state")


def _row(process: ProcessReport) -> Sequence[str]:
    label = process.label.partition(" (pid")[0]
    return (
        output.printable(label),
        str(process.pid),
        f"{process.cpu:.2f}",
        rate_text(process.rate) if process.rate >= 1 else "-",
        rate_text(process.disk_rate) if process.disk_rate >= 1 else "-",
        _state(process),
    )


def _state(process: ProcessReport) -> str:
    parts = [str(process.wait)]
    if process.still:
        parts.append(f"for {time_text(process.still)}")
    call = [process.call] if process.call else []
    channel = [process.channel] if process.channel else []
    if call or channel:
        parts.append(f"({', '.join([*call, *channel])})")
    if process.peers:
        parts.append(f"from {listed(process.peers)}")
    return " ".join(parts)


def _print_files(processes: Iterable[ProcessReport]) -> None:
    readers = [(p, p.file) for p in processes if p.file is not None and p.role in _READERS]
    if not readers:
        return
    output.heading("files")
    for process, file in readers[:_SHOWN]:
        label = process.label.partition(" (pid")[0]
        output.line(f"  {output.printable(label)}: {output.printable(file.path)}{_place(file)}")
        rest = [f"about {process.files_per_second:.1f} files a second"] if process.files_per_second else []
        if len(process.files) > 1:
            paths = dict.fromkeys(f.path for f in process.files if f.path != file.path)
            others = [output.printable("/".join(path.split("/")[-2:])) for path in paths]
            rest.append(f"also seen: {listed(others)}")
        if rest:
            output.line(f"    {'; '.join(rest)}", style="dim")


def _place(file: FileReading) -> str:
    parts = []
    if file.how == "mapped":
        within = f"{size_text(file.position)} in memory of " if file.position else ""
        parts.append(f"mapped, {within}{size_text(file.size or file.position)}")
    elif file.size:
        parts.append(f"at {size_text(file.position)} of {size_text(file.size)}")
    if file.kind == "fifo":
        parts.append("a named pipe")
    if file.file_system:
        parts.append(f"{file.file_system} on {file.server}" if file.server else file.file_system)
    return f" ({', '.join(parts)})" if parts else ""


def _print_threads(processes: Iterable[ProcessReport]) -> None:
    busy = [(p, t) for p in processes for t in p.busy_threads]
    if not busy:
        return
    output.heading("threads that burn CPU")
    for process, thread in busy[:_SHOWN]:
        where = f"  in {' < '.join(thread.frames)}" if thread.frames else ""
        name = f"{process.label.partition(' (pid')[0]}, thread {thread.tid} {thread.name}"
        output.line(f"  {output.printable(name)}: {thread.cpu:.2f} cores{output.printable(where)}")


def _machine(host: HostReport, processes: Iterable[ProcessReport]) -> Iterable[tuple[str, str]]:
    for name, (busy, rate) in sorted(host.disks.items()):
        yield f"disk {name}", f"{share_text(busy)} busy, reads {rate_text(rate)}"
    for gpu in host.gpus or ():
        used = f"{size_text(gpu.memory_used)} of {size_text(gpu.memory_total)}"
        yield f"GPU {gpu.index}", f"{share_text(gpu.busy)} busy, {used} used ({gpu.name})"
    memory = f"{size_text(host.memory_available)} of {size_text(host.memory_total)} available"
    if host.cgroup_memory:
        limit, used_bytes, _ = host.cgroup_memory
        memory += f"; cgroup: {size_text(used_bytes)} of {size_text(limit)} used"
    yield "memory", memory
    mine = sum(p.resident if p.proportional is None else p.proportional for p in processes)
    shared = "" if any(p.proportional is not None for p in processes) else ", what they share counted in each"
    score = max((p.oom_score or 0 for p in processes), default=0)
    yield "these processes", f"{size_text(mine)} resident{shared}; highest OOM score {score} of 1000"
    if host.shm_size:
        yield "/dev/shm", f"{size_text(host.shm_used)} of {size_text(host.shm_size)} used"
    if host.pressure:
        shares = [f"{kind} {share_text(share)}" for kind, share in sorted(host.pressure.items())]
        yield "tasks waited for", ", ".join(shares)

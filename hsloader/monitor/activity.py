"""Verdicts on what goes on: compiling, reading, computing, waiting.  Each looks at a situation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from hsloader.monitor.files import file_system_text, is_data_file
from hsloader.monitor.kernel import Wait
from hsloader.monitor.limit import Limit, limit_of
from hsloader.monitor.situation import READS, HostReport, Kind, Situation, Verdict, idle_worker
from hsloader.monitor.summary import STORAGE_WAITS, FileReading, ProcessReport
from hsloader.monitor.words import listed, plural, rate_text, share_text, size_text, time_text

__all__ = ["ACTIVITIES"]


def _compiling(s: Situation) -> Verdict | None:
    busy = [c for c in s.compilers if c.cpu >= 0.2 or "compile_worker" not in c.command]
    if not busy:
        return None
    names = sorted({c.label for c in busy})
    cores = sum(c.cpu for c in busy)
    return Verdict(
        Kind.COMPILING,
        f"torch.compile is running: {plural(len(busy), 'compiler process', 'compiler processes')} ({listed(names)}) "
        f"used {cores:.1f} of {s.host.cpus} cores; that takes minutes the first time, and the data wait for it",
        "",
    )


def _loader(s: Situation) -> Verdict | None:
    """What hsloader's own counters say, which is more than can be seen from outside."""
    if s.ring is None:
        return None
    found = limit_of(*s.ring)
    kinds = {Limit.TRAINER: Kind.TRAINER, Limit.DISK: Kind.DISK}
    dataset = s.ring[1].info.get("dataset", "its dataset")
    return Verdict(kinds.get(found.limit, Kind.LOADER), f"hsloader reads {dataset}; {found.sentence}", found.advice)


def _same_file(s: Situation) -> Verdict | None:
    caught: list[tuple[ProcessReport, FileReading, float]] = []
    for process in s.readers:
        # Of several files the looks would have caught others too; the same one in six looks is no accident.
        if len(process.files) != 1 or not (file := process.files[0]).size or file.kind != "file":
            continue
        if any(link != file.path and is_data_file(link) for link in process.links):
            continue
        times = process.read_rate * s.seconds / file.size
        if times >= 4 and file.read >= 2 and file.seen >= 6:
            caught.append((process, file, times))
    if not caught or len(caught) < len([p for p in s.readers if p.rate >= READS]):
        return None
    process, file, _ = caught[0]
    total = round(sum(times for _, f, times in caught if f.path == file.path))
    rate = sum(p.read_rate for p, _, _ in caught)
    paths = {f.path for _, f, _ in caught}
    if len(paths) > 1:
        return Verdict(
            Kind.SAME_FILE,
            f"each of {plural(len(caught), 'worker')} reads one file again and again, "
            f"{rate_text(rate)} together; first of them {file.path} ({size_text(file.size or 0)})",
            "keep it open or in memory: __getitem__ loads a whole file for every item",
        )
    who = process.label if len(caught) == 1 else f"{len(caught)} workers together"
    return Verdict(
        Kind.SAME_FILE,
        f"one file is read again and again: {file.path} ({size_text(file.size or 0)}), {total} times in "
        f"{time_text(s.seconds)} by {who}, {rate_text(rate)}",
        "keep it open or in memory: __getitem__ loads a whole file for every item",
    )


def _reading(s: Situation) -> Verdict | None:
    active = [p for p in s.readers if p.rate >= READS or p.disk_rate >= READS or _in_storage(p)]
    waits = s.data_wait
    if waits is not None and waits < 0.5:
        return None  # the workers read ahead; the trainer is the limit
    busy = [p for p in s.workers if p.cpu >= 0.7]
    if not active:
        return _worker_cpu(s, busy) if busy and waits is not None else None
    rate, from_disk = sum(p.rate for p in active), sum(p.disk_rate for p in active)
    sizes = [f.size for p in active for f in p.files if f.size]
    usual = statistics.median(sizes) if sizes else 0  # a look may meet a module's file or a library beside the data
    fast = max(rate, from_disk)
    mapped = [p for p in active if any(f.how == "mapped" for f in p.files)]
    if mapped and from_disk < READS:
        # Pages that are in memory are mapped without a trace that could be counted.
        fast = 0.0
        text = f"{_who(s, active)} {_what(active, usual)} through maps, from the page cache"
    else:
        fast = from_disk if mapped else fast
        text = f"{_who(s, active)} {_what(active, usual)} at {rate_text(fast)}"
        text += " together" if len(active) > 1 else ""
    disk, sentence = _disk_part(s, active, from_disk, rate)
    text += f"; {sentence}" if sentence and fast else ""
    if waits is not None:
        text += f"; the trainer waited for data {share_text(waits)} of the time"
    text += "; nothing is deadlocked"
    if usual and fast:
        text += f"; a batch of {s.batch_size} needs" if s.batch_size else "; one file needs"
        text += f" {time_text((s.batch_size or 1) * usual / fast)} at this rate"
    files = [p.file for p in active if p.file is not None]
    own = bool(files) and all(_SHARD.search(file.path) for file in files)
    # Busy workers whose bytes come from memory: the disk has nothing to do with it.
    if busy and len(busy) * 2 >= len(s.workers) and not disk and from_disk < 0.5 * rate:
        text += f"; {plural(len(busy), 'worker')} used {sum(p.cpu for p in busy):.1f} cores"
        return Verdict(Kind.WORKER_CPU, text, _OWN_CPU_ADVICE if own else _CPU_ADVICE)
    return Verdict(Kind.DISK if disk else Kind.READING, text, _OWN_READ_ADVICE if own else _READ_ADVICE)


_CPU_ADVICE = (
    "the workers' CPU is the limit (unpickling, copies, casts), not the disk: hsloader convert once, or more workers"
)
_OWN_CPU_ADVICE = (
    "the workers' CPU is the limit, not the disk: num_workers=0, so that hsloader reads ahead in processes of its own"
)
_OWN_READ_ADVICE = (
    "these files are a dataset of hsloader already: hsloader top shows its loaders, hsloader bench what the disk can do"
)
_SHARD = re.compile(r"/segments/[^/]+/[^/]+/c[./]\d")  # a file of a dataset: what is to be converted is no such thing
_READ_ADVICE = "hsloader convert makes the files smaller and hsloader.DataLoader reads only the rows a batch needs"


def _in_storage(process: ProcessReport) -> bool:
    return process.share(*STORAGE_WAITS) >= 0.3


def _who(s: Situation, active: Sequence[ProcessReport]) -> str:
    if not s.workers and s.trainer in active:
        return "the training process itself (no workers)"
    return active[0].label if len(active) == 1 else f"{len(active)} workers"


def _what(active: Sequence[ProcessReport], usual: float) -> str:
    verb = "reads" if len(active) == 1 else "read"
    current = {p.file.path: p.file for p in active if p.file is not None}
    if not current:
        return verb
    met = all(p.file is not None for p in active)
    if met and len(current) == 1:
        path, file = next(iter(current.items()))
        return f"{verb} {path}{f' ({size_text(file.size)})' if file.size else ''}"
    first = next(iter(current))
    number = f"{len(current)} " if met else ""  # some were met between two files only
    return f"{verb} {number}files{f' of {size_text(usual)}' if usual else ''} (one is {first})"


def _disk_part(s: Situation, active: Sequence[ProcessReport], from_disk: float, rate: float) -> tuple[bool, str]:
    """Whether a disk or server is the limit, and the words for it."""
    files = [p.file for p in active if p.file is not None]
    remote = [f for f in files if f.remote]
    waiting = sum(p.share(*STORAGE_WAITS) for p in active) / len(active)
    if remote:
        place = file_system_text(remote[0].file_system, remote[0].server)
        return waiting >= 0.5, f"{place} answers at {rate_text(from_disk or rate)}"
    disks = {name for f in files if (name := s.disk_of.get(f.device)) and name in s.host.disks}
    if not disks:
        return False, ""
    name = max(disks, key=lambda d: s.host.disks[d][0])
    busy, disk_rate = s.host.disks[name]
    if from_disk < 0.05 * rate and busy < 0.5:
        return False, f"nearly all of it comes from the page cache, not from disk {name}"
    text = f"disk {name} is {share_text(busy)} busy and delivers {rate_text(disk_rate)}"
    if waiting >= 0.7 and busy < 0.5 and from_disk >= 0.3 * rate:
        # Waiting for a disk that is not busy: something in front of it holds the reads back.
        limit = "though reads waited for it {} of the time: a bandwidth limit of the volume or the cgroup"
        return True, f"{text}, {limit.format(share_text(waiting))}"
    return busy >= 0.8 or (waiting >= 0.7 and from_disk >= 0.3 * rate), text


def _worker_cpu(s: Situation, busy: Sequence[ProcessReport]) -> Verdict:
    return Verdict(
        Kind.WORKER_CPU,
        f"{plural(len(busy), 'worker')} of {len(s.workers)} burn the CPU ({sum(p.cpu for p in busy):.1f} of "
        f"{s.host.cpus} cores) and read next to nothing; the trainer waited for data "
        f"{share_text(s.data_wait or 0)} of the time",
        f"see what they compute: py-spy dump --pid {busy[0].pid}",
    )


def _network(s: Situation) -> Verdict | None:
    waiting = [p for p in s.readers if p.share(Wait.SOCKET, Wait.POLL) >= 0.8 and p.peers]
    if not waiting or (s.data_wait is not None and s.data_wait < 0.5):
        return None
    peers = sorted({peer for p in waiting for peer in p.peers})
    return Verdict(
        Kind.NETWORK,
        f"{listed([p.label for p in waiting])} {'waits' if len(waiting) == 1 else 'wait'} for the network "
        f"({listed(peers)})",
        "if that is object storage, it is the limit; if it is another rank, examine that one",
    )


def _sleeping(s: Situation) -> Verdict | None:
    asleep = [w for w in s.workers if w.share(Wait.SLEEP) >= 0.8]
    if not asleep or (s.data_wait is not None and s.data_wait < 0.5):
        return None
    return Verdict(
        Kind.SLEEPING,
        f"{listed([w.label for w in asleep])} {'sleeps' if len(asleep) == 1 else 'sleep'}: the dataset calls "
        "time.sleep or waits for a signal, and the trainer waits for it",
        f"see where: py-spy dump --pid {asleep[0].pid}",
    )


def _trainer(s: Situation) -> Verdict | None:
    trainer = s.trainer
    if trainer is None:
        return None
    gpu = _gpu_part(s.host)
    waits = s.data_wait
    ready = [w for w in s.workers if idle_worker(s, w)]
    data = ""
    if s.workers and waits is not None:
        data = f"; it waited for data {share_text(waits)} of the time"
        if ready:
            verb = "waits" if len(ready) == 1 else "wait"
            data += f", and {len(ready)} of {plural(len(s.workers), 'worker')} {verb} for it to ask"
    if s.starved >= 0.5:
        kind, doing = Kind.TRAINER, f"wants to compute and gets {trainer.cpu:.1f} of {s.host.cpus} cores{gpu}"
    elif trainer.cpu >= 0.5 or trainer.share(Wait.RUNNING, Wait.DRIVER) >= 0.5:
        kind, doing = Kind.TRAINER, f"computes ({trainer.cpu:.1f} of {s.host.cpus} cores{gpu})"
    elif trainer.share(Wait.SLEEP) >= 0.8:
        kind, doing = Kind.SLEEPING, f"sleeps (time.sleep or a signal wait{gpu})"
    elif trainer.share(Wait.CHILD) >= 0.8:
        kind, doing = Kind.CHILD, f"waits for a child process{gpu}"
    else:
        return None
    tail = ": data are not the limit" if waits is not None and waits < 0.5 else ""
    return Verdict(kind, f"{trainer.label} {doing}{data}{tail}", _trainer_advice(s, kind))


def _gpu_part(host: HostReport) -> str:
    if not host.gpus:
        return ""
    return f", GPU {', '.join(share_text(g.busy) for g in host.gpus)} busy"


def _trainer_advice(s: Situation, kind: Kind) -> str:
    if kind is Kind.TRAINER and s.trainer is not None and s.host.gpus and max(g.busy for g in s.host.gpus) < 0.2:
        return f"the GPU waits for Python in the training process: py-spy dump --pid {s.trainer.pid}"
    return ""


def _idle(s: Situation) -> Verdict | None:
    main = s.trainer or (s.workers[0] if s.workers else None)
    if main is None:
        return None
    if s.trainer is None and all(idle_worker(s, w) for w in s.workers):
        return Verdict(Kind.IDLE, f"{main.label} waits for work: the trainer has not asked it for anything")
    still = f" and has not run for {time_text(main.still)}" if main.still else ""
    channel = f" (kernel wait {main.channel})" if main.channel else ""
    return Verdict(
        Kind.IDLE, f"{main.label} is {main.wait}{channel}{still}", f"see where: py-spy dump --pid {main.pid}"
    )


ACTIVITIES = (_compiling, _loader, _same_file, _reading, _network, _sleeping, _trainer, _idle)

"""The verdict on situations that a test machine cannot make: file servers, GPUs, memory, many disks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hsloader.monitor.diagnosis import judge
from hsloader.monitor.kernel import Wait, wait_of
from hsloader.monitor.procfs import Syscall
from hsloader.monitor.roles import Role, roles_of
from hsloader.monitor.samples import GpuSample, ProcessInfo
from hsloader.monitor.situation import HostReport, Kind, Situation
from hsloader.monitor.summary import FileReading, ProcessReport

_DISK = (254, 0)


def _process(number: int, wait: Wait, role: Role = Role.WORKER, **changes: Any) -> ProcessReport:
    pid = 100 + number
    label = f"worker {number} (pid {pid})" if role is Role.WORKER else f"the training process (pid {pid})"
    base = ProcessReport(
        pid=pid,
        parent=99,
        role=role,
        label=label,
        command="python train.py",
        state="S",
        wait=wait,
        call=None,
        channel="",
        still=0.0,
        waits={wait: 1.0},
    )
    return dataclasses.replace(base, **changes)


def _trainer(wait: Wait, **changes: Any) -> ProcessReport:
    return _process(-1, wait, Role.TRAINER, **changes)


def _file(number: int = 0, **changes: Any) -> FileReading:
    base = FileReading(
        path=f"/data/rows_8000-10000/data_{9142 + number}.pt",
        position=12_000_000,
        size=97_000_000,
        how="read",
        file_system="ext4",
        device=_DISK,
    )
    return dataclasses.replace(base, **changes)


def _situation(trainer: ProcessReport | None, *workers: ProcessReport, **changes: Any) -> Situation:
    base = Situation(seconds=2.0, host=HostReport(cpus=8), trainer=trainer, workers=workers, disk_of={_DISK: "vda"})
    return dataclasses.replace(base, **changes)


def _readers(count: int, rate: float, **changes: Any) -> list[ProcessReport]:
    files = [_file(i) for i in range(count)]
    return [
        _process(i, Wait.READ, file=f, files=(f,), read_rate=rate / count, disk_rate=rate / count, **changes)
        for i, f in enumerate(files)
    ]


def test_workers_at_the_limit_of_a_disk() -> None:
    host = HostReport(cpus=8, disks={"vda": (0.98, 310e6)})
    found = judge(_situation(_trainer(Wait.POLL), *_readers(4, 310e6), host=host, batch_size=8))
    assert found.kind is Kind.DISK
    assert "4 workers read 4 files of 97 MB" in found.sentence
    assert "at 310 MB/s together; disk vda is 98 % busy" in found.sentence
    assert "nothing is deadlocked; a batch of 8 needs 2.5 s at this rate" in found.sentence


def test_a_worker_met_between_two_files_is_not_said_to_read_another_ones() -> None:
    first, second = _readers(2, 310e6)
    found = judge(_situation(_trainer(Wait.POLL), first, dataclasses.replace(second, file=None, files=())))
    assert found.sentence.startswith("2 workers read files of 97 MB (one is /data/rows_8000-10000/data_9142.pt) at ")


def test_a_dataset_of_hsloader_is_not_to_be_converted() -> None:
    host = HostReport(cpus=8, disks={"vda": (0.98, 310e6)})
    readers = _readers(2, 310e6)
    assert "hsloader convert" in judge(_situation(_trainer(Wait.POLL), *readers, host=host)).advice
    shard = _file(path="/data/x.hs/segments/000003/hidden_states/c.0.0.0")
    readers = [dataclasses.replace(reader, file=shard, files=(shard,)) for reader in readers]
    found = judge(_situation(_trainer(Wait.POLL), *readers, host=host))
    assert found.kind is Kind.DISK
    assert found.advice == (
        "these files are a dataset of hsloader already: hsloader top shows its loaders, hsloader bench what the disk "
        "can do"
    )
    busy = [dataclasses.replace(p, disk_rate=0.0, cpu=0.98, wait=Wait.RUNNING) for p in readers]
    found = judge(_situation(_trainer(Wait.POLL), *busy))
    assert (found.kind, "num_workers=0" in found.advice) == (Kind.WORKER_CPU, True)
    assert "convert" not in found.advice


def test_one_worker_stuck_on_a_file_server() -> None:
    nfs = _file(file_system="nfs4", server="nas1", remote=True)
    stuck = _process(2, Wait.READ, still=95.0, file=nfs, files=(nfs,), channel="rpc_wait_bit_killable", call="read")
    found = judge(_situation(_trainer(Wait.POLL), *_readers(2, 50e6), stuck))
    assert found.kind is Kind.STUCK_READ
    assert "worker 2 (pid 102) has been in the same read of /data/rows_8000-10000/data_9142.pt" in found.sentence
    assert "(at 12 MB of 97 MB) on NFS server nas1 for 95 s" in found.sentence
    assert "the other 2 read at 50 MB/s" in found.sentence
    assert "nas1 does not answer" in found.advice


def test_locks_are_a_deadlock_only_while_nothing_else_can_end_them() -> None:
    locked = [_process(i, Wait.LOCK, still=40.0, asleep=True, locked_up=True) for i in range(3)]
    found = judge(_situation(_trainer(Wait.POLL), *locked))
    assert found.kind is Kind.DEADLOCK
    assert "all 3 workers wait for a lock and nothing in them has run for 40 s" in found.sentence
    # Another thread of each reads from a socket: a pool that fetches objects.
    fetching = [dataclasses.replace(p, locked_up=False) for p in locked]
    assert judge(_situation(_trainer(Wait.POLL), *fetching)).kind is not Kind.DEADLOCK
    # The trainer is busy and has not asked.
    assert judge(_situation(_trainer(Wait.RUNNING, cpu=1.0), *locked)).kind is Kind.TRAINER


def test_both_sides_wait_for_each_other() -> None:
    trainer = _trainer(Wait.POLL, main_links=("pipe:[7]",), links=frozenset({"pipe:[7]", "pipe:[8]"}))
    worker = _process(0, Wait.POLL, main_links=("pipe:[8]",), links=frozenset({"pipe:[7]", "pipe:[8]"}))
    assert judge(_situation(trainer, worker)).kind is Kind.LOST_MESSAGE


def test_killed_worker_and_full_shared_memory() -> None:
    dead = _process(1, Wait.ZOMBIE, state="Z", exit_code=9)
    host = HostReport(cgroup_memory=(10**9, 9 * 10**8, 2))
    found = judge(_situation(_trainer(Wait.POLL), dead, host=host))
    assert found.kind is Kind.DEAD_WORKER
    assert "killed by signal 9, as the kernel does when memory is short (it counts 2 such kills" in found.sentence
    full = HostReport(shm_size=64 << 20, shm_used=64 << 20)
    assert judge(_situation(_trainer(Wait.POLL), _process(0, Wait.POLL), host=full)).kind is Kind.SHM_FULL


def test_compiling_is_told_from_a_pool_that_idles() -> None:
    pool = _process(5, Wait.PIPE, Role.COMPILER, label="compile worker", command="python compile_worker/__main__.py")
    waiting = _situation(_trainer(Wait.RUNNING, cpu=1.0), _process(0, Wait.POLL))
    assert judge(dataclasses.replace(waiting, compilers=[pool])).kind is Kind.TRAINER
    busy = dataclasses.replace(pool, cpu=3.5)
    found = judge(dataclasses.replace(waiting, compilers=[busy]))
    assert found.kind is Kind.COMPILING
    assert "torch.compile is running" in found.sentence
    assert "3.5 of 8 cores" in found.sentence


def test_trainer_that_is_the_limit_itself() -> None:
    idle = [_process(i, Wait.POLL) for i in range(4)]
    busy = HostReport(cpus=8, gpus=(GpuSample(0, "H200", 0.93, 1, 2),))
    found = judge(_situation(_trainer(Wait.RUNNING, cpu=1.0), *idle, host=busy))
    assert found.kind is Kind.TRAINER
    assert "GPU 93 % busy" in found.sentence
    assert "4 of 4 workers wait for it to ask: data are not the limit" in found.sentence
    assert not found.advice
    starved = dataclasses.replace(busy, gpus=(GpuSample(0, "H200", 0.0, 1, 2),))
    found = judge(_situation(_trainer(Wait.RUNNING, cpu=1.0), *idle, host=starved))
    assert "the GPU waits for Python in the training process" in found.advice


def test_busy_workers_that_read_from_memory_are_limited_by_their_cpu() -> None:
    workers = [dataclasses.replace(p, disk_rate=0.0, cpu=0.98, wait=Wait.RUNNING) for p in _readers(4, 900e6)]
    found = judge(_situation(_trainer(Wait.POLL), *workers, host=HostReport(cpus=8, disks={"vda": (0.01, 0.0)})))
    assert found.kind is Kind.WORKER_CPU
    assert "from the page cache" in found.sentence
    assert "4 workers used 3.9 cores" in found.sentence


def test_one_file_is_said_to_be_read_again_only_if_no_look_saw_another() -> None:
    again = _file(read=7, seen=7, size=24_000_000)
    worker = _process(0, Wait.READ, file=again, files=(again,), read_rate=776e6, links=frozenset({again.path}))
    assert judge(_situation(_trainer(Wait.POLL), worker)).kind is Kind.SAME_FILE
    other = dataclasses.replace(worker, links=frozenset({again.path, "/data/data_1.pt", "/dev/null", "pipe:[7]"}))
    assert judge(_situation(_trainer(Wait.POLL), other)).kind is Kind.READING


def test_waiting_for_the_pinning_thread_is_waiting_for_data() -> None:
    # As torch does it with pin_memory=True: seen on an H200.
    trainer = _trainer(Wait.TIMED_LOCK, pin_wait=0.97)
    found = judge(_situation(trainer, *_readers(2, 900e6)))
    assert found.kind is Kind.READING
    assert "the trainer waited for data 97 % of the time" in found.sentence


def test_trainer_that_wants_a_core_does_not_compute() -> None:
    # As on a machine with twice as many busy threads as cores.
    trainer = _trainer(Wait.POLL, cpu=0.1, waits={Wait.RUNNING: 0.6, Wait.POLL: 0.4})
    assert judge(_situation(trainer, *_readers(2, 100e6))).kind is Kind.READING


def test_trainer_that_never_gets_a_core_is_not_said_to_need_no_data() -> None:
    starved = _trainer(Wait.POLL, cpu=0.03, waits={Wait.RUNNING: 1.0})
    assert judge(_situation(starved, *_readers(2, 100e6))).kind is Kind.READING
    found = judge(_situation(starved, _process(0, Wait.POLL)))
    assert found.sentence == "the training process (pid 99) wants to compute and gets 0.0 of 8 cores"


def test_taking_a_descriptor_from_a_worker_is_waiting_for_data() -> None:
    # As seen under load: torch's main process in recvmsg on a local socket.
    trainer = _trainer(Wait.POLL, cpu=0.1, waits={Wait.SOCKET: 0.7, Wait.POLL: 0.3})
    assert judge(_situation(trainer, *_readers(2, 100e6))).kind is Kind.READING


def test_readers_ahead_of_a_trainer_that_does_not_wait() -> None:
    trainer = _trainer(Wait.RUNNING, cpu=1.0, waits={Wait.RUNNING: 0.95, Wait.POLL: 0.05})
    assert judge(_situation(trainer, *_readers(2, 100e6))).kind is Kind.TRAINER


@pytest.mark.parametrize(
    ("state", "call", "channel", "links", "expected"),
    [
        ("R", Syscall(None), "0", (), Wait.RUNNING),
        ("D", Syscall(0, (3, 0, 9, 0, 0, 0)), "folio_wait_bit_common", ("/data/a.pt",), Wait.READ),
        ("S", Syscall(0, (3, 0, 9, 0, 0, 0)), "anon_pipe_read", ("pipe:[5]",), Wait.PIPE),
        ("S", Syscall(0, (3, 0, 9, 0, 0, 0)), "anon_pipe_read", ("/data/slow.fifo",), Wait.READ),
        ("D", Syscall(-1), "folio_wait_bit_common", (), Wait.FAULT),
        ("S", Syscall(202, (1, 0x189, 0, 0, 0, 0)), "futex_do_wait", (), Wait.LOCK),
        ("S", Syscall(202, (1, 0x189, 0, 77, 0, 0)), "futex_do_wait", (), Wait.TIMED_LOCK),
        ("S", Syscall(257, (0xFFFFFF9C, 9, 0, 0, 0, 0)), "wait_for_partner", (), Wait.OPEN),
        # As under Yama, where the system call is hidden.
        ("D", None, "rpc_wait_bit_killable", (), Wait.DISK),
        ("S", None, "futex_wait_queue", (), Wait.LOCK),
        ("S", None, "poll_schedule_timeout.constprop.0", (), Wait.POLL),
        ("S", None, "wait_for_partner", (), Wait.OPEN),
        ("T", None, "do_signal_stop", (), Wait.STOPPED),
        ("Z", None, "0", (), Wait.ZOMBIE),
    ],
)
def test_wait_of_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    *,
    state: str,
    call: Syscall | None,
    channel: str,
    links: tuple[str, ...],
    expected: Wait,
) -> None:
    from hsloader.monitor import kernel

    monkeypatch.setattr(kernel, "_TABLE", kernel._TABLES["x86_64"])
    assert wait_of(state, call, channel, links) is expected


def _info(pid: int, parent: int, command: str, name: str = "python") -> ProcessInfo:
    return ProcessInfo(pid, parent, 0, name, tuple(command.split()), started=pid, age=1000.0 - pid)


def test_roles_in_a_tree_of_ranks() -> None:
    spawned = "python -c from multiprocessing.spawn import spawn_main --multiprocessing-fork"
    tree = [
        _info(1, 0, "python /bin/torchrun train.py", "torchrun"),
        _info(2, 1, "python train.py"),
        _info(3, 1, "python train.py"),
        _info(4, 2, "python train.py", "pt_data_worker"),
        _info(5, 3, spawned, "pt_data_worker"),
        _info(6, 3, "python -c from multiprocessing.resource_tracker import main"),
        _info(7, 2, "python /site/torch/_inductor/compile_worker/__main__.py"),
        _info(8, 7, "python /site/torch/_inductor/compile_worker/__main__.py"),
        _info(9, 8, "/bin/sh -c g++ x.cpp", "sh"),
        _info(10, 9, "/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus x.cpp", "cc1plus"),
        _info(11, 2, "python /site/wandb/service.py"),
    ]
    roles = roles_of(tree)
    expected = {1: Role.LAUNCHER, 2: Role.TRAINER, 3: Role.TRAINER, 4: Role.WORKER, 5: Role.WORKER, 6: Role.HELPER}
    expected |= dict.fromkeys((7, 8, 9, 10), Role.COMPILER) | {11: Role.HELPER}
    assert roles == expected
    # Forks of an older torch, which does not name its workers; and a worker given as the root.
    assert roles_of([_info(2, 1, "python a.py"), _info(3, 2, "python a.py")])[3] is Role.WORKER
    assert roles_of([_info(3, 2, "python a.py")], outside={2: _info(2, 1, "python a.py")})[3] is Role.WORKER
    # A script that starts the training script and waits for it.
    two = [_info(1, 0, "python sweep.py"), _info(2, 1, "python train.py")]
    assert roles_of(two, launching=frozenset({1})) == {1: Role.LAUNCHER, 2: Role.TRAINER}

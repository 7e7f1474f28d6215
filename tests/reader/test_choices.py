"""How many threads, how much memory, which read mode: decided by what the machine says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hsloader.reader import choices, limits, modes
from hsloader.reader.engine import EngineSettings
from hsloader.reader.modes import choose_mode
from hsloader.reader.options import ReadOptions


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lay out a cgroup tree of version 1 or 2 with this process in ``/job/task``."""

    def make(controller: str, files: dict[str, str]) -> None:
        root = tmp_path / controller if controller else tmp_path
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if not controller:
            (tmp_path / "cgroup.controllers").touch()
        monkeypatch.setattr(limits, "_CGROUP", tmp_path)
        monkeypatch.setattr(limits, "_own_groups", lambda: [(controller, "/job/task")])
        monkeypatch.setattr(limits, "_meminfo", lambda: {"MemTotal": 64 << 30, "MemAvailable": 50 << 30})
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    return make


def test_memory_of_cgroup_2(cgroup: Callable[..., None]) -> None:
    stat = "anon 5\nfile 900\ninactive_file 300\nactive_file 100\n"
    cgroup(
        "",
        {
            "job/memory.max": str(8 << 30),
            "job/memory.current": str((2 << 30) + 400),
            "job/memory.stat": stat,
            "job/task/memory.max": "max\n",
            "job/task/memory.current": "5",
        },
    )
    assert limits.memory_total() == 8 << 30
    assert limits.memory_available() == 6 << 30
    assert limits.default_budget(1 << 20, 1, 4) == 4 << 20
    assert limits.default_budget(1 << 30, 1, 4) == 3 << 30  # a quarter would be less than three batches
    assert limits.default_budget(400 << 20, 1, 4) == 6 << 28
    assert limits.default_budget(400 << 20, 2, 4) == 1200 << 20


def test_memory_of_cgroup_1(cgroup: Callable[..., None]) -> None:
    stat = "cache 900\ninactive_file 3\ntotal_cache 900\ntotal_inactive_file 300\ntotal_active_file 100\n"
    cgroup(
        "memory",
        {
            "job/task/memory.limit_in_bytes": str(4 << 30),
            "job/task/memory.usage_in_bytes": str((1 << 30) + 400),
            "job/task/memory.stat": stat,
            "memory.limit_in_bytes": "9223372036854771712",
            "memory.usage_in_bytes": "77",
        },
    )
    assert limits.memory_total() == 4 << 30
    assert limits.memory_available() == 3 << 30


def test_cores_of_a_quota(cgroup: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup("", {"job/cpu.max": "600000 100000", "job/task/cpu.max": "max 100000"})
    assert limits.cpu_share(1) == 6
    assert limits.cpu_share(4) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert limits.ranks_on_node() == 2
    assert limits.cpu_share() == 3


def test_cores_of_a_mask(cgroup: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup("", {})
    assert limits.cpu_share(1) == 16
    assert limits.cpu_share(4) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert limits.cpu_share(4) == 4  # the launcher bound each rank to its own four
    assert limits.cpu_share(8) == 1  # eight ranks share these


def test_cores_of_a_container(cgroup: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup("", {"job/cpuset.cpus.effective": "0-2,8\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 8}, raising=False)
    assert limits.cpu_share(4) == 1  # the mask is the container's, not each rank's


@pytest.mark.parametrize(("text", "ranks"), [("8(x2)", 8), ("4", 4), ("", 1), ("many", 1), ("0", 1)])
def test_ranks_of_slurm(monkeypatch: pytest.MonkeyPatch, text: str, ranks: int) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", text)
    assert limits.ranks_on_node() == ranks


GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend a file system, and rates of the two ways through it."""

    def make(name: str, local: bool, *, direct: bool = True, rates: tuple[float, float] = (1.0, 1.0)) -> None:
        monkeypatch.setattr(modes, "memory_total", lambda: 10 * GIB)
        monkeypatch.setattr(modes, "file_system", lambda path: (name, local))
        monkeypatch.setattr(modes, "supports_direct", lambda path: direct)
        monkeypatch.setattr(modes, "_probe", lambda path, direct: rates[direct] * 1e9)

    return make


@pytest.mark.parametrize(
    "case",
    [
        ("ext4", True, 5, (1, 1), "mmap", False, "read by O_DIRECT while decoding is what limits"),
        ("ext4", True, 9, (1, 1), "mmap", False, "read by O_DIRECT since it does not fit the memory"),
        ("xfs", True, 50, (1, 2), "direct", False, "measured: O_DIRECT 2.00 GB/s"),
        ("xfs", True, 50, (2, 2), "mmap", False, "measured"),
        ("tmpfs", True, 50, (1, 2), "mmap", True, "a local file system"),
        ("nfs", False, 5, (1, 2), "pread", False, "not a local file system"),
        ("nfs", False, 50, (1, 2), "pread", True, "not a local file system"),
    ],
)
def test_auto(machine: Callable[..., None], case: tuple[str, bool, int, tuple[float, float], str, bool, str]) -> None:
    name, local, size, rates, mode, drop, words = case
    machine(name, local, rates=rates)
    chosen = choose_mode(ReadOptions(), Path("/data"), size * GIB, lambda: Path("/data/shard"))
    assert (chosen.mode, chosen.drop_pages, chosen.local) == (mode, drop, local)
    assert words in chosen.reason
    assert name in chosen.reason
    assert len(chosen.reason.partition("; ")[0]) < 70  # what the opening line of a loader says of it


def test_what_was_asked_for_is_done_or_refused(machine: Callable[..., None]) -> None:
    machine("tmpfs", True, direct=False)
    root, shard = Path("/data"), Path("/data/shard")
    assert choose_mode(ReadOptions(mode="pread"), root, GIB, lambda: shard).mode == "pread"
    assert choose_mode(ReadOptions(drop_pages=True), root, GIB, lambda: shard).drop_pages
    assert not choose_mode(ReadOptions(drop_pages=False), root, 50 * GIB, lambda: shard).drop_pages
    with pytest.raises(ValueError, match="tmpfs refuses O_DIRECT for /data/shard"):
        choose_mode(ReadOptions(mode="direct"), root, GIB, lambda: shard)
    inside = choose_mode(ReadOptions(in_process=True), root, GIB, lambda: shard)
    assert inside.mode == "pread"
    assert "truncated" in inside.reason


def test_the_file_system_here(tmp_path: Path) -> None:
    name, local = modes.file_system(tmp_path)
    assert name
    assert isinstance(local, bool)
    assert modes.file_system("/no/such/path") == ("an unknown file system", False)
    assert modes.file_system("/proc")[1] is False
    file = tmp_path / "file"
    file.write_bytes(bytes(8 << 20))
    if modes.supports_direct(file):
        assert modes._probe(file, direct=True) > 0
    assert modes._probe(file, direct=False) > 0
    assert not modes.supports_direct(tmp_path / "missing")


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
@pytest.mark.parametrize("decoders", [4, 5, 7, 15, 16, 127])
def test_each_process_gets_as_many_batches_as_it_has_threads(engines: int, decoders: int) -> None:
    settings = EngineSettings(
        path="", segments=1, fingerprint="", fields=(), row_bytes=(), mode="mmap", drop_pages=False, bypass="never",
        readers=8, decoders=decoders, engines=engines,
    )  # fmt: skip
    taken = Counter(settings.part_of(serial) for serial in range(1, 10 * decoders + 1))
    assert taken == {part: 10 * settings.threads_of(part)[1] for part in range(engines)}
    # In turn, so that also of a few batches under way each has its own.
    assert len({settings.part_of(serial) for serial in range(3 * decoders, 3 * decoders + engines)}) == engines


@pytest.mark.parametrize(
    ("cores", "threads", "slot", "expected"),
    [
        (2, None, 1 << 20, 4),
        (4, None, 1 << 20, 4),
        (8, None, 1 << 20, 6),
        (16, None, 1 << 20, 8),
        (16, None, 128 << 20, 8),
        (16, None, 200 << 20, 5),
        (16, None, 1 << 30, 4),  # large batches keep their processes busy one at a time
        (128, None, 1 << 20, 8),
        (16, 2, 1 << 20, 4),
    ],
)
def test_a_ring_has_two_small_batches_for_each_process(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int | None, slot: int, expected: int
) -> None:
    monkeypatch.setattr(choices, "cpu_share", lambda: cores)
    assert choices.usual_slots(ReadOptions(threads=threads), slot) == expected

"""The text of /proc with what makes it hard to parse."""

from __future__ import annotations

import os
import time

import pytest

from hsloader.monitor.access import Patience, ProcAccess
from hsloader.monitor.files import mount_of
from hsloader.monitor.procfs import (
    Mapping,
    parse_cgroup,
    parse_maps,
    parse_mountinfo,
    parse_sockets,
    parse_stat,
    parse_switches,
)


def test_stat_of_a_process_with_a_hostile_name() -> None:
    line = "42 (a) R 7 (b) S 1 42 42 0 -1 4194304 500 0 3 0 11 22 0 0 20 0 9 0 5555 1 2 " + "0 " * 27 + "139\n"
    found = parse_stat(line)
    assert (found.pid, found.name, found.state, found.parent) == (42, "a) R 7 (b", "S", 1)
    assert (found.minor_faults, found.major_faults, found.cpu_ticks, found.threads) == (500, 3, 33, 9)
    assert (found.started, found.exit_code, found.kernel) == (5555, 139, False)
    thread = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 " + "0 " * 27 + "0\n"
    assert parse_stat(thread).kernel


def test_mounts_with_servers_and_blanks() -> None:
    mounts = parse_mountinfo(
        "22 1 0:50 / /mnt/a\\040b rw shared:1 master:2 - nfs4 nas1:/export/x rw,vers=4.2\n"
        "23 1 0:51 / /s rw - cifs //filer/share rw\n"
        "24 1 0:52 / /l rw - lustre 10.0.0.1@tcp:10.0.0.2@tcp:/fs rw\n"
        "25 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "not a mount\n"
    )
    assert mounts[22].point == "/mnt/a b"
    assert [mounts[i].server for i in (22, 23, 25)] == ["nas1", "filer", None]
    assert mounts[24].server == "10.0.0.1@tcp:10.0.0.2@tcp"
    assert mounts[25].device == (254, 0)


def test_a_mount_over_another_is_the_one_that_counts() -> None:
    mounts = parse_mountinfo(
        "25 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 25 0:40 / /data rw - autofs /etc/auto.direct rw\n"
        "31 30 0:41 / /data rw - nfs4 nas1:/export rw\n"
    ).values()
    found = mount_of("/data/x.hs", mounts)
    assert found is not None
    assert (found.kind, found.server) == ("nfs4", "nas1")
    below = mount_of("/database", mounts)
    assert below is not None
    assert below.kind == "ext4"


def test_what_takes_long_is_given_up_and_told_from_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    access = ProcAccess()
    monkeypatch.setattr(access, "text", lambda pid, name: time.sleep(0.3))
    assert access.memory_text(1, "smaps", patience=0.02) is None
    assert access.locked == set()
    assert access.memory_text(1, "cmdline", patience=0.02) is None
    assert access.locked == {1}
    access.close()


def test_an_address_that_cannot_be_read_is_no_trouble() -> None:
    access = ProcAccess()
    assert access.memory(os.getpid(), (1 << 64) - 4096, 8) == b""
    assert access.patience.ask(5.0, lambda: "and the thread goes on", "") == "and the thread goes on"
    access.close()
    assert isinstance(access.patience, Patience)


def test_maps_of_one_file_in_parts() -> None:
    found = parse_maps(
        "7f00-7f10 r--p 00000000 fe:00 9 /d/my data.pt\n"
        "7f10-7f30 r-xp 00000100 fe:00 8 /l/x.so\n"
        "7f40-7f60 r--p 00000200 fe:00 9 /d/my data.pt\n"
        "7f70-7f80 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert found == {
        "/d/my data.pt": Mapping("/d/my data.pt", 0x220, False),
        "/l/x.so": Mapping("/l/x.so", 0x120, True),
    }


def test_small_parsers() -> None:
    assert parse_cgroup("9:memory,cpu:/a/b\n0::/u\n") == ("/u", "/a/b")
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:1F90 0100A8C0:01BB 01 00000000:00000000 00:00000000 00000000  0 0 4711 1\n"
    assert parse_sockets(header + row) == {4711: "192.168.0.1:443"}
    assert parse_switches("Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n") == 11
    assert parse_switches("Name:\tx\n") is None

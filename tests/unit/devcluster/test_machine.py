# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is read from the machine: checks, mounts, cgroups, packet rules, processes."""

import os
import time
from pathlib import Path

import pytest

from devcluster import cgroups, checks, mounts, network
from devcluster.errors import ClusterError
from devcluster.process import Identity, Processes, Spec, identity, marked, parse_stat

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DEBIAN, id="Debian"),
        pytest.param("ID=ubuntu\nID_LIKE=debian\n", id="Ubuntu"),
        pytest.param('ID=mint\nID_LIKE="ubuntu debian"\n', id="made from Ubuntu"),
    ],
)
def test_distribution_is_accepted(text: str) -> None:
    checks.distribution(text)  # and raises nothing


def test_another_distribution_is_refused_by_its_name() -> None:
    with pytest.raises(ClusterError, match="Fedora Linux 42"):
        checks.distribution('ID=fedora\nPRETTY_NAME="Fedora Linux 42"\n')


def test_os_release_loses_its_quotes() -> None:
    assert checks.os_release(DEBIAN)["PRETTY_NAME"] == "Debian GNU/Linux 12 (bookworm)"


@pytest.mark.parametrize(
    ("route", "refused"),
    [
        pytest.param("10.98.7.0/24 dev eth1 scope link", True, id="inside the pods' network"),
        pytest.param("10.0.0.0/8 via 192.0.2.1 dev eth0", True, id="around it"),
        pytest.param("10.98.0.0/24 dev gpumonpods0 proto kernel", False, id="our own bridge"),
        pytest.param("192.0.2.0/24 dev eth0 proto kernel", False, id="elsewhere"),
        pytest.param("default via 10.97.0.1 dev eth0", False, id="the default route"),
    ],
)
def test_overlapping_routes(route: str, refused: bool) -> None:
    if refused:
        with pytest.raises(ClusterError, match="overlaps"):
            checks.networks(f"default via 192.0.2.1 dev eth0\n{route}\n")
    else:
        checks.networks(f"{route}\n")


@pytest.mark.parametrize(
    ("effective", "held"),
    [
        pytest.param("000001ffffffffff", True, id="all capabilities"),
        pytest.param("000001fffeffffff", False, id="all but CAP_SYS_RESOURCE"),
    ],
)
def test_capability(effective: str, held: bool) -> None:
    assert checks.has_capability(f"Name:\tx\nCapEff:\t{effective}\n", checks.CAP_SYS_RESOURCE_BIT) is held


MOUNTINFO = """22 27 0:21 / /proc rw - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu rw shared:3 - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
50 27 0:50 / /var/lib/x rw - tmpfs tmpfs rw
51 50 0:51 / /var/lib/x/a\\040b rw - tmpfs tmpfs rw
52 27 0:52 / /var/lib/xy rw - tmpfs tmpfs rw
"""


def test_mounts_below_come_innermost_first_and_without_neighbours() -> None:
    assert mounts.below(Path("/var/lib/x"), MOUNTINFO) == ["/var/lib/x/a b", "/var/lib/x"]


def test_cgroup_hierarchies_of_both_versions() -> None:
    assert cgroups.hierarchies(MOUNTINFO) == [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified")]


def test_remove_tree_removes_read_only_folders(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "inner").mkdir(parents=True)
    (top / "inner" / "file").touch()
    (top / "inner").chmod(0o500)
    mounts.remove_tree(top)
    assert not top.exists()


RULES = """*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-aaaa - [0:0]
:CNI-bbbb - [0:0]
:KUBE-SERVICES - [0:0]
:DOCKER - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j DOCKER
-A POSTROUTING -s 10.98.0.2/32 -m comment --comment "name: \\"gpumonitor-devcluster\\" id: \\"x\\"" -j CNI-aaaa
-A POSTROUTING -s 10.1.0.2/32 -m comment --comment "name: \\"other\\" id: \\"y\\"" -j CNI-bbbb
-A CNI-aaaa ! -d 224.0.0.0/4 -j MASQUERADE
-A CNI-bbbb ! -d 224.0.0.0/4 -j MASQUERADE
-A KUBE-SERVICES -d 10.97.0.1/32 -j KUBE-SVC-X
COMMIT
"""


def test_packet_rules_of_the_cluster_go_and_others_stay() -> None:
    assert network.without_cluster_rules(RULES).splitlines() == [
        "*nat",
        ":PREROUTING ACCEPT [0:0]",
        ":POSTROUTING ACCEPT [0:0]",
        ":CNI-bbbb - [0:0]",
        ":DOCKER - [0:0]",
        "-A PREROUTING -j DOCKER",
        '-A POSTROUTING -s 10.1.0.2/32 -m comment --comment "name: \\"other\\" id: \\"y\\"" -j CNI-bbbb',
        "-A CNI-bbbb ! -d 224.0.0.0/4 -j MASQUERADE",
        "COMMIT",
    ]


def test_packet_rules_without_ours_are_left_as_they_are() -> None:
    foreign = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n"
    assert network.without_cluster_rules(foreign) == foreign
    assert network.without_cluster_rules("") == ""


def test_stat_of_a_process_whose_name_has_brackets() -> None:
    fields = " ".join(["S", *map(str, range(4, 22)), "4711", "0"])
    assert parse_stat(f"42 (a) b (c) {fields}") == ("S", 4711)


def test_identity_of_ourselves_and_of_nobody() -> None:
    assert identity(os.getpid()) is not None
    assert identity(2**22 + 1) is None


SLEEPER = Spec(name="sleeper-of-a-test", argv=("/bin/sleep", "60"), stop_seconds=5)


def await_mark(pid: int) -> None:
    """Linux closes the pipe by which the start is told a moment before the new environment can be read."""
    end = time.monotonic() + 5
    while pid not in marked() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_process_is_started_once_found_and_stopped(tmp_path: Path) -> None:
    processes = Processes(run=tmp_path / "run", logs=tmp_path / "logs")
    try:
        assert processes.start(SLEEPER)
        who = processes.running(SLEEPER.name)
        assert who is not None
        await_mark(who.pid)
        assert marked()[who.pid] == SLEEPER.name
        assert not processes.start(SLEEPER), "a running one is left alone"
    finally:
        assert processes.stop(SLEEPER)
    assert processes.running(SLEEPER.name) is None
    assert identity(who.pid) is None


def test_a_stray_without_pid_file_is_replaced(tmp_path: Path) -> None:
    processes = Processes(run=tmp_path / "run", logs=tmp_path / "logs")
    processes.start(SLEEPER)
    stray = processes.running(SLEEPER.name)
    assert stray is not None
    await_mark(stray.pid)
    (tmp_path / "run" / f"{SLEEPER.name}.pid").unlink()
    try:
        assert processes.running(SLEEPER.name) is None
        assert processes.start(SLEEPER)
        assert identity(stray.pid) != stray
    finally:
        processes.stop(SLEEPER)


def test_a_process_is_started_anew_when_what_it_reads_has_changed(tmp_path: Path) -> None:
    processes = Processes(run=tmp_path / "run", logs=tmp_path / "logs")
    configuration = tmp_path / "configuration"
    configuration.write_text("one")
    spec = Spec(name=SLEEPER.name, argv=SLEEPER.argv, files=(configuration,))
    try:
        assert processes.start(spec)
        before = processes.running(spec.name)
        assert not processes.start(spec)
        configuration.write_text("two")
        assert processes.start(spec)
        assert processes.running(spec.name) != before
    finally:
        processes.stop(spec)


def test_a_pid_that_someone_else_has_now_is_not_ours(tmp_path: Path) -> None:
    processes = Processes(run=tmp_path, logs=tmp_path)
    ourselves = identity(os.getpid())
    assert ourselves is not None
    other = Identity(pid=ourselves.pid, start_ticks=ourselves.start_ticks + 1)
    (tmp_path / "kubelet.pid").write_text(f'{{"pid": {other.pid}, "start_ticks": {other.start_ticks}}}')
    assert processes.running("kubelet") is None

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What must be so on the machine before anything is done to it, each with the way out."""

import os
import shutil
import socket
import sys
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from devcluster.command import output
from devcluster.errors import ClusterError
from devcluster.layout import CLUSTER_CIDR, NODE_BRIDGE, NODE_IP, POD_BRIDGE, SERVICE_CIDR, Layout
from devcluster.process import marked

DISK_BYTES_NEEDED = 15 * 10**9
"""Of the first `up`: Go's caches take 6 GB, images and their parts 5 GB, the cluster 3 GB."""
DISK_BYTES_NEEDED_AGAIN = 4 * 10**9
SUPPORTED = {"debian", "ubuntu"}
CAP_SYS_RESOURCE_BIT = 24


def root() -> None:
    """Raise unless we are root."""
    if os.geteuid() != 0:
        raise ClusterError(
            "The local cluster runs containers, and for that it needs root.",
            f"Run: sudo {sys.executable} -m devcluster …",
        )


def machine(layout: Layout) -> None:
    """Raise if the first `up` cannot work on this machine."""
    root()
    distribution(Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else "")
    if os.uname().machine != "x86_64":
        raise ClusterError(f"This machine is {os.uname().machine}; the local cluster is made for x86_64.")
    disk(layout)
    if shutil.which("ip"):  # a machine without it gets it with the packages, and has no unusual routes
        networks(output(["ip", "-4", "route", "show", "table", "main"]))
    other_kubelet(layout)


def os_release(text: str) -> dict[str, str]:
    """Return the entries of /etc/os-release, without quotes."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip("\"'") for key, value in pairs}


def distribution(text: str) -> None:
    """Raise unless /etc/os-release says Debian or Ubuntu, or something made from them."""
    release = os_release(text)
    if not SUPPORTED & {release.get("ID", ""), *release.get("ID_LIKE", "").split()}:
        raise ClusterError(
            f"The local cluster is made for Debian and Ubuntu; this is {release.get('PRETTY_NAME', 'something else')}.",
            "Use a Debian 12 machine, or an existing cluster: make demo CLUSTER=existing IMAGE=…",
        )


def disk(layout: Layout) -> None:
    """Raise if cache or state lie on a file system with too little room."""
    built_before = layout.bin.is_dir() and any(layout.bin.iterdir())
    needed = DISK_BYTES_NEEDED_AGAIN if built_before else DISK_BYTES_NEEDED
    for folder in (layout.cache, layout.state):
        free = shutil.disk_usage(_existing(folder)).free
        if free < needed:
            raise ClusterError(
                f"{folder} has {free / 1e9:.1f} GB free; {needed / 1e9:.0f} GB are needed.",
                "Free some, or put the cache elsewhere: GPUMON_DEVCLUSTER_CACHE=/other/folder",
            )


def networks(routes: str) -> None:
    """Raise if the machine has a route into one of the cluster's networks. `routes`: as `ip -4 route` prints."""
    ours = [ip_network(CLUSTER_CIDR), ip_network(SERVICE_CIDR), ip_network(f"{NODE_IP}/32")]
    for line in routes.splitlines():
        words = line.split()
        if not words or words[0] in {"default", "unreachable", "blackhole"} or {NODE_BRIDGE, POD_BRIDGE} & set(words):
            continue
        try:
            route = IPv4Network(words[0], strict=False)
        except ValueError:
            continue
        if route.prefixlen > 0 and any(route.overlaps(network) for network in ours):
            raise ClusterError(
                f"This machine's route «{line.strip()}» overlaps the cluster's networks.",
                "Use a machine without it, or change the addresses in devcluster/layout.py.",
            )


def other_kubelet(layout: Layout) -> None:
    """Raise if a kubelet that is not ours runs here: two of them would delete each other's pods."""
    if (layout.run / "kubelet.pid").exists():
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", 10248)) == 0 and not _ours("kubelet"):
            raise ClusterError(
                "A kubelet already runs on this machine; a second one would fight with it.",
                "Use a machine that is not a Kubernetes node.",
            )


def has_capability(status: str, bit: int) -> bool:
    """Tell from /proc/self/status whether an effective capability is held."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def may_lower_oom_score() -> bool:
    """Tell whether we may lower oom_score_adj (CAP_SYS_RESOURCE). Where not, runc dies when it is asked to."""
    return has_capability(Path("/proc/self/status").read_text(), CAP_SYS_RESOURCE_BIT)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _ours(component: str) -> bool:
    return component in marked().values()

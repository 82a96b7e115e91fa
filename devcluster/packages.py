# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Debian packages: only those whose programs are missing, never at the price of removing others."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from devcluster.command import run
from devcluster.errors import ClusterError
from devcluster.layout import Layout

PROGRAMS = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "containerd": "containerd",
    "ctr": "containerd",
    "debootstrap": "debootstrap",
    "gcc": "gcc",
    "ip": "iproute2",
    "iptables": "iptables",
    "make": "make",
    "mount": "mount",
    "openssl": "openssl",
    "runc": "runc",
    "socat": "socat",
}
"""Program to package. The kubelet calls iptables, conntrack, socat and mount; kube-proxy iptables and conntrack."""
FILES = {
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/include/stdio.h": "libc6-dev",
    "/etc/ssl/certs/ca-certificates.crt": "ca-certificates",
}
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\n# gpumonitor-devcluster: packages start no services while it installs\nexit 101\n"


def missing() -> list[str]:
    """Return the packages to install, sorted."""
    wanted = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    wanted |= {package for path, package in FILES.items() if not Path(path).exists()}
    return sorted(wanted)


def install(layout: Layout, packages: list[str]) -> None:
    """Install packages without their recommendations and without starting their services."""
    log = layout.build_logs / "packages.log"
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    if shutil.which("apt-get") is None:
        raise ClusterError("There is no apt-get.", f"Install by hand: {' '.join(packages)}")
    offline = "Is there a network, and does `apt-get update` work?"
    with _services_held_back():
        run(["apt-get", "update", "-q"], log=log, env=env, advice=offline)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "--no-remove", *packages]
        run(command, log=log, env=env, advice=offline)


@contextlib.contextmanager
def _services_held_back() -> Iterator[None]:
    """Keep package scripts from starting services: the cluster runs its own containerd, under its own paths."""
    ours = not _POLICY.exists() or _POLICY.read_text() == _POLICY_TEXT
    if ours:
        _POLICY.write_text(_POLICY_TEXT)
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            with contextlib.suppress(FileNotFoundError):
                _POLICY.unlink()

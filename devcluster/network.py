# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The node's address, what the kernel must forward, the pods' network, and taking all of it away again."""

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from devcluster.command import output, succeeds, write_aside
from devcluster.layout import CNI_NETWORK, NODE_BRIDGE, NODE_IP, POD_BRIDGE, POD_CIDR, Layout

WANTED_SYSCTLS = {"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1"}
SAVED_SYSCTLS = (
    *WANTED_SYSCTLS,
    "net.ipv4.conf.all.route_localnet",  # kube-proxy
    "vm.overcommit_memory",  # the kubelet, as the ones below
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)
"""What we or the components change; the values before are put back by `down`."""
_IPTABLES = (("iptables-save", "iptables-restore"), ("ip6tables-save", "ip6tables-restore"))


def up(layout: Layout) -> None:
    """Make bridge, address and settings, from whatever state."""
    if not Path("/proc/sys/net/bridge").exists():
        succeeds(["modprobe", "br_netfilter"])
    _save_sysctls(layout)
    for name, value in WANTED_SYSCTLS.items():
        _sysctl(name).write_text(value)
    if not Path(f"/sys/class/net/{NODE_BRIDGE}").exists():
        output(["ip", "link", "add", NODE_BRIDGE, "type", "bridge"])
    output(["ip", "addr", "replace", f"{NODE_IP}/32", "dev", NODE_BRIDGE])
    output(["ip", "link", "set", NODE_BRIDGE, "up"])
    write_aside(layout.state / "cni" / "conf" / "10-devcluster.conflist", cni_configuration(layout))


def cni_configuration(layout: Layout) -> str:
    """Return the CNI chain: one bridge, addresses out of POD_CIDR, host ports."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_CIDR}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(layout.run / "cni"),  # in `run`: after a reboot no address is taken any more
    }
    bridge = {
        "type": "bridge",
        "bridge": POD_BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": addresses,
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": CNI_NETWORK, "plugins": [bridge, portmap]}, indent=2) + "\n"


def down(layout: Layout) -> None:
    """Remove bridges, packet rules and CNI's leftovers, and put the kernel's settings back."""
    for bridge in (POD_BRIDGE, NODE_BRIDGE):
        _remove_bridge(bridge)
    for save, restore in _IPTABLES:
        _clean_rules(save, restore)
    _remove_cni_cache()
    _restore_sysctls(layout)


def without_cluster_rules(saved: str) -> str:
    """Return `iptables-save` output without what kubelet, kube-proxy and our CNI network added.

    Chains of the components all begin with KUBE-; CNI's names are hashes, so ours are told from another network's by
    the network's name in the comment of a rule that leads to them.
    """
    lines = saved.splitlines()
    ours = {name for line in lines if (name := _chain_defined(line)) is not None and name.startswith("KUBE-")}
    ours |= {_target(line) for line in lines if f'"{CNI_NETWORK}\\"' in line or f'"{CNI_NETWORK}"' in line}
    ours |= {name for name in map(_chain_defined, lines) if name is not None and name.startswith("CNI-HOSTPORT-")}
    ours = {name for name in ours if name.startswith(("KUBE-", "CNI-"))}
    kept = [line for line in lines if not _concerns(line, ours)]
    return "\n".join(kept) + "\n" if kept else ""


def _chain_defined(line: str) -> str | None:
    return line[1:].split()[0] if line.startswith(":") else None


def _target(line: str) -> str:
    match = re.search(r" -[jg] (\S+)", line)
    return match[1] if match else ""


def _concerns(line: str, chains: Iterable[str]) -> bool:
    if line.startswith(":"):
        return line[1:].split()[0] in chains
    if line.startswith("-A "):
        return line.split()[1] in chains or _target(line) in chains
    return False


def _clean_rules(save: str, restore: str) -> None:
    if not succeeds([save, "--version"]):
        return
    saved = output([save])
    cleaned = without_cluster_rules(saved)
    if cleaned != saved:
        output([restore], text=cleaned)


def _remove_bridge(bridge: str) -> None:
    for port in sorted(Path(f"/sys/class/net/{bridge}/brif").glob("*")):
        succeeds(["ip", "link", "delete", port.name])
    if Path(f"/sys/class/net/{bridge}").exists():
        output(["ip", "link", "delete", bridge])


def _remove_cni_cache() -> None:
    """Remove what libcni remembers of our network; the folder is shared with other users of CNI."""
    top = Path("/var/lib/cni")
    for result in top.glob(f"*/{CNI_NETWORK}-*"):
        container = result.name.removeprefix(f"{CNI_NETWORK}-").partition("-")[0]
        (result.parent / f"cni-loopback-{container}-lo").unlink(missing_ok=True)
        result.unlink(missing_ok=True)
    for folder in (top / "results", top / "cache", top):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def _save_sysctls(layout: Layout) -> None:
    saved = layout.state / "saved-sysctls.json"
    if not saved.exists():
        values = {name: _sysctl(name).read_text().strip() for name in SAVED_SYSCTLS if _sysctl(name).exists()}
        write_aside(saved, json.dumps(values, indent=2) + "\n")


def _restore_sysctls(layout: Layout) -> None:
    saved = layout.state / "saved-sysctls.json"
    if not saved.exists():
        return
    for name, value in json.loads(saved.read_text()).items():
        with contextlib.suppress(OSError):
            _sysctl(name).write_text(value)

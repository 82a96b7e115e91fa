# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Taking everything away, from whatever state a run was left in. Needs no component to be alive."""

import contextlib
import shutil
from pathlib import Path

from devcluster import cgroups, components, containerd, images, mounts, network
from devcluster.layout import KUBELET_FIXED, Layout
from devcluster.process import Processes, kill_all, marked

_UNFINISHED = "going-down"
"""File in `state`: a `down` that was killed is finished by the next command."""


def unfinished(layout: Layout) -> bool:
    """Tell whether a `down` was begun and not ended."""
    return (layout.state / _UNFINISHED).exists()


def remove_everything(layout: Layout) -> None:
    """Stop and remove the cluster; the cache stays."""
    if layout.state.exists():
        (layout.state / _UNFINISHED).touch()
    stop_processes(layout)
    _remove_shim_sockets(layout)
    for folder in (layout.run, layout.state):
        mounts.unmount_below(folder)
    images.tidy_up_killed_builds(layout)
    network.down(layout)
    _remove_fixed_paths(layout)
    mounts.remove_tree(layout.run)
    mounts.remove_tree(layout.state)


def stop_processes(layout: Layout) -> None:
    """Stop all components, kill all pods, then whatever else carries our mark (shims, strays)."""
    processes = Processes(run=layout.run, logs=layout.logs)
    for component in reversed(components.all_components(layout)):
        if component.spec.name != "containerd":
            processes.stop(component.spec)
    cgroups.remove_pods()
    tidy = containerd.forget_all_but(layout, images.own_references(layout))
    processes.stop(components.named(layout, "containerd").spec)
    kill_all(marked())
    cgroups.remove_pods()
    if not tidy:
        mounts.remove_tree(layout.containerd_root)


def forget_containers_of_last_boot(layout: Layout) -> None:
    """Remove what only makes sense while containers run, if none can be running: pod addresses, runtime state.

    On machines whose /run survives a reboot, or after everything was killed, pod addresses would otherwise stay taken
    until there are none left.
    """
    if marked():
        return
    cgroups.remove_pods()
    _remove_shim_sockets(layout)
    mounts.unmount_below(layout.run)
    mounts.unmount_below(layout.state)
    for name in ("cni", "containerd", "runc"):
        mounts.remove_tree(layout.run / name)


def _remove_shim_sockets(layout: Layout) -> None:
    """Shims make their sockets in a folder shared with other containerds; each container's bundle names its own."""
    for address in (layout.containerd_socket.parent / "io.containerd.runtime.v2.task").glob("*/*/address"):
        with contextlib.suppress(OSError):
            socket = Path(address.read_text().strip().removeprefix("unix://"))
            if socket.parent == Path("/run/containerd/s"):
                socket.unlink(missing_ok=True)
    _remove_if_empty(Path("/run/containerd/s"), Path("/run/containerd"))


def _remove_fixed_paths(layout: Layout) -> None:
    """Remove what the kubelet puts at places that cannot be configured."""
    shutil.rmtree(KUBELET_FIXED / "device-plugins", ignore_errors=True)
    _remove_if_empty(KUBELET_FIXED)
    logs = Path("/var/log/containers")
    for link in logs.glob("*.log"):
        if link.is_symlink() and str(link.readlink()).startswith(str(layout.state)):
            link.unlink(missing_ok=True)
    _remove_if_empty(logs)


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()

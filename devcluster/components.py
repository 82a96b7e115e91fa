# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""All components in the order in which they start."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from devcluster import containerd, controlplane, gpus, node
from devcluster.errors import ClusterError
from devcluster.layout import Layout
from devcluster.process import Processes, Spec


@dataclass(frozen=True, kw_only=True)
class Component:
    """One process of the cluster: how it starts, whether it works, and how long it may take until then."""

    spec: Spec
    ready: Callable[[], bool]
    ready_seconds: float = 60.0


def all_components(layout: Layout) -> list[Component]:
    """Return every component, each after those that it needs."""
    return [
        Component(spec=containerd.spec(layout), ready=lambda: containerd.ready(layout)),
        Component(spec=controlplane.etcd(layout), ready=controlplane.etcd_ready),
        Component(
            spec=controlplane.api_server(layout),
            ready=lambda: controlplane.api_server_ready(layout),
            ready_seconds=120.0,
        ),
        Component(spec=controlplane.controller_manager(layout), ready=controlplane.controller_manager_ready),
        Component(spec=controlplane.scheduler(layout), ready=controlplane.scheduler_ready),
        Component(spec=node.kubelet(layout), ready=node.kubelet_ready),
        Component(spec=node.kube_proxy(layout), ready=node.kube_proxy_ready),
        Component(spec=gpus.device_plugin(layout), ready=gpus.device_plugin_ready),
    ]


def named(layout: Layout, name: str) -> Component:
    """Return one component. Raises ClusterError that lists the names."""
    everything = all_components(layout)
    for component in everything:
        if component.spec.name == name:
            return component
    names = ", ".join(component.spec.name for component in everything)
    raise ClusterError(f"There is no component «{name}».", f"The components: {names}")


def start(processes: Processes, component: Component) -> bool:
    """Start a component unless it runs, and wait until it works; return whether it was started."""
    started = processes.start(component.spec)
    wait_ready(processes, component)
    return started


def wait_ready(processes: Processes, component: Component) -> None:
    """Wait until a running component works. Raises ClusterError if it dies or takes too long, with its log's end."""
    name = component.spec.name
    deadline = time.monotonic() + component.ready_seconds
    while not component.ready():
        if processes.running(name) is None:
            raise ClusterError(f"{name} ended:\n{_log_end(processes, name)}", f"Its log: {processes.log(name)}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{name} is not ready after {component.ready_seconds:.0f} s:\n{_log_end(processes, name)}",
                f"Its log: {processes.log(name)}",
            )
        time.sleep(0.2)


def _log_end(processes: Processes, name: str) -> str:
    try:
        lines = processes.log(name).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join("    " + line[:300] for line in lines[-8:])

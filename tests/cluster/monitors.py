# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests look at: GPUMonitors, sidecars and their metrics, Events, the controller's own metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from devcluster import product
from tests.cluster.kubectl import Kubectl, KubectlError, condition, eventually
from verl_gpumonitor.model import wiring

Object = dict[str, Any]
TIMERS = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
"""verl's timers of a step that are stages of GPUs in the stand-in."""
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def monitor(kubectl: Kubectl, name: str, namespace: str) -> Object:
    """A job's GPUMonitor as it is now; empty status while there is none."""
    return kubectl.get("gpumonitor", name, namespace) or {"status": {}}


def status(kubectl: Kubectl, name: str, namespace: str) -> Object:
    """Status of a job's GPUMonitor, empty while there is none."""
    found: Object = monitor(kubectl, name, namespace).get("status", {})
    return found


def await_phase(kubectl: Kubectl, name: str, namespace: str, phase: str, within: float = 120) -> Object:
    """Wait for the phase of a job's GPUMonitor; returns its status."""

    def look() -> Object | None:
        now = status(kubectl, name, namespace)
        return now if now.get("phase") == phase else None

    return eventually(look, within=within, what=f"GPUMonitor {name} {phase}")


def await_steps(kubectl: Kubectl, name: str, namespace: str, steps: int, within: float = 120) -> Object:
    """Wait until the STEP column shows a number; returns the status."""

    def look() -> Object | None:
        now = status(kubectl, name, namespace)
        return now if now.get("step") == steps else None

    def seen() -> str:
        return str({key: value for key, value in status(kubectl, name, namespace).items() if key in ("step", "stage")})

    try:
        return eventually(look, within=within, what=f"STEP {steps} of {name}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it shows {seen()}") from None


def stage_table(now: Object) -> dict[str, Object]:
    """Rows of a status's stage table by stage."""
    return {row["stage"]: row for row in now.get("stages", [])}


def assert_seconds(now: Object, truth: Mapping[str, float], within: float) -> None:
    """Compare a status's seconds a step with the job's own clock."""
    table = stage_table(now)
    seen = {stage: table.get(stage, {}).get("secondsPerStep") for stage in TIMERS}
    wrong = {
        stage: (seen[stage], truth[stage]) for stage in TIMERS if abs((seen[stage] or 0.0) - truth[stage]) > within
    }
    assert not wrong, f"(seen, true) seconds a step: {wrong}; table: {table}"


def await_gpus(kubectl: Kubectl, name: str, namespace: str, text: str, within: float = 90) -> Object:
    """Wait until a job's GPUS column shows `text`; returns its status."""

    def look() -> Object | None:
        now = status(kubectl, name, namespace)
        return now if now.get("gpus", {}).get("text") == text else None

    return eventually(look, within=within, what=f"GPUMonitor {name} with GPUS {text}")


def await_condition(
    kubectl: Kubectl, name: str, namespace: str, kind: str, *, value: str, reason: str = "", within: float = 90
) -> Object:
    """Wait for a condition of a job's GPUMonitor; returns it."""

    def look() -> Object | None:
        found = condition(monitor(kubectl, name, namespace), kind)
        return found if found.get("status") == value and (not reason or found.get("reason") == reason) else None

    return eventually(look, within=within, what=f"{name}: {kind}={value} {reason}")


def parse(text: str) -> Series:
    """Prometheus text as (name, labels) -> value. Raises ValueError where it is not valid."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            if key in series:
                raise ValueError(f"series twice: {key}")
            series[key] = sample.value
    return series


def sidecar_metrics(kubectl: Kubectl, pod: str, namespace: str) -> Series:
    """Scrape a pod's sidecar through the API server, as it is now."""
    return parse(kubectl.raw(f"/api/v1/namespaces/{namespace}/pods/{pod}:{wiring.METRICS_PORT}/proxy/metrics"))


def uuids(series: Series, name: str = "gpumonitor_gpu_up") -> set[str]:
    """UUIDs that a metric names."""
    return {dict(labels)["uuid"] for metric, labels in series if metric == name}


def value(series: Series, name: str, **labels: str) -> float | None:
    """The one series with these labels among others; None where there is none."""
    wanted = set(labels.items())
    found = [number for (metric, have), number in series.items() if metric == name and wanted <= have]
    if len(found) > 1:
        raise AssertionError(f"{len(found)} series {name} {labels}")
    return found[0] if found else None


def sidecar(pod: Object) -> Object | None:
    """Our container of a pod as the API server stored it; None where there is none."""
    found = pod["spec"].get("initContainers", [])
    return next((one for one in found if one["name"] == wiring.CONTAINER_NAME), None)


def sidecar_pid(kubectl: Kubectl, pod: str, namespace: str) -> int:
    """Pid on this host of a pod's sidecar: the process whose environment names the pod."""
    found: Any = kubectl.get("pod", pod, namespace)
    mark = f"GPUMON_POD_UID={found['metadata']['uid']}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if (process / "comm").read_text().strip() != "gpumon-sidecar":
                continue
            if mark in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except OSError:
            continue
    raise KubectlError(f"no sidecar of pod {pod} runs")


def await_running(kubectl: Kubectl, name: str, namespace: str) -> Object:
    """Wait until a pod runs; returns it."""

    def look() -> Object | None:
        pod = kubectl.get("pod", name, namespace)
        return pod if pod and pod["status"].get("phase") == "Running" else None

    return eventually(look, within=60, what=f"pod {name} running")


def controller_pod(kubectl: Kubectl) -> Object | None:
    """The controller's pod, when it is there and ready."""
    for pod in kubectl.list("pod", product.NAMESPACE, selector="app.kubernetes.io/component=controller"):
        ready = {one["type"]: one["status"] for one in pod["status"].get("conditions", [])}.get("Ready")
        if ready == "True" and "deletionTimestamp" not in pod["metadata"]:
            return pod
    return None


def controller_metrics(kubectl: Kubectl) -> Series:
    """The controller's own metrics."""
    pod = controller_pod(kubectl)
    if pod is None:
        raise KubectlError("no controller is ready")
    return parse(
        kubectl.raw(f"/api/v1/namespaces/{product.NAMESPACE}/pods/{pod['metadata']['name']}:8081/proxy/metrics")
    )


def events(kubectl: Kubectl, namespace: str, uid: str) -> list[Object]:
    """Events about one object, as `kubectl describe` finds them: by uid."""
    every = kubectl.list("events.events.k8s.io", namespace)
    return [one for one in every if one.get("regarding", {}).get("uid") == uid]


def owned(kubectl: Kubectl, pod: str, namespace: str, count: int, within: float = 60) -> set[str]:
    """Wait until a pod's sidecar reports so many GPUs; returns their UUIDs."""

    def look() -> set[str] | None:
        found = uuids(sidecar_metrics(kubectl, pod, namespace))
        return found if len(found) == count else None

    return eventually(look, within=within, what=f"{count} GPUs in the metrics of {pod}", every=1)

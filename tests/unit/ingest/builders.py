# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Pods, tokens, reports and stand-ins for the controller's other parts, as the tests of the ingest need them."""

import asyncio
import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from prometheus_client import CollectorRegistry

from verl_gpumonitor.model.report import REPORT_FORMAT, GpuReport, PodRef, PodStages, Report
from verl_gpumonitor.model.vocabulary import Severity, Source
from verl_gpumonitor_operator.controller.ports import (
    AcceptResult,
    ContainerPhase,
    ContainerState,
    Owner,
    PodIdentity,
    PodRecord,
)
from verl_gpumonitor_operator.kube.errors import KubeError
from verl_gpumonitor_operator.settings import Images

NOW: Final = 1_800_000_000.0
AUDIENCE: Final = "gpumonitor.dev"
IMAGES: Final = Images(sidecar="reg.example/sidecar@sha256:aa", operator="reg.example/operator@sha256:bb")
MAIN_IMAGE: Final = "reg.example/train:1"


def pod_record(**changes: Any) -> PodRecord:
    """An injected worker pod of a RayCluster, whose sidecar runs."""
    pod = PodRecord(
        namespace="train",
        name="job-worker-0",
        uid="uid-0",
        labels={"ray.io/cluster": "job", "ray.io/node-type": "worker"},
        owner=Owner(api_version="ray.io/v1", kind="RayCluster", name="job", uid="cluster-uid"),
        phase="Running",
        node_name="node-1",
        created_at=NOW - 60,
        gpus_requested=4,
        injected="0.1.0",
        images=(MAIN_IMAGE, "reg.example/other:1"),
        sidecar_image=IMAGES.sidecar,
        sidecar=ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW - 50),
    )
    return replace(pod, **changes)


def waiting_pod(reason: str | None, *, message: str | None = None, **changes: Any) -> PodRecord:
    """The same pod, held by its sidecar, which waits with `reason`."""
    state = ContainerState(phase=ContainerPhase.WAITING, reason=reason, message=message)
    return pod_record(**({"phase": "Pending", "sidecar": state} | changes))


def claims(pod: PodRecord, *, expires_at: float = NOW + 3600, audience: object = (AUDIENCE,)) -> dict[str, object]:
    """Payload of the token that the kubelet gives this pod."""
    return {
        "aud": list(audience) if isinstance(audience, tuple) else audience,
        "exp": int(expires_at),
        "iss": "https://kubernetes.default.svc",
        "kubernetes.io": {
            "namespace": pod.namespace,
            "node": {"name": pod.node_name, "uid": "node-uid"},
            "pod": {"name": pod.name, "uid": pod.uid},
            "serviceaccount": {"name": "default", "uid": "sa-uid"},
        },
        "sub": f"system:serviceaccount:{pod.namespace}:default",
    }


def jwt(payload: object, *, signature: str = "c2ln") -> str:
    """A token of that payload. The signature is whatever the fake API server is told to accept."""
    parts = (json.dumps({"alg": "RS256", "kid": "k"}), json.dumps(payload))
    head, body = (base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)
    return f"{head}.{body}.{signature}"


def accepted_status(pod: PodRecord, **changes: object) -> dict[str, object]:
    """`status` of the TokenReview of a good token of this pod, as Kubernetes 1.36 answers."""
    return {
        "authenticated": True,
        "audiences": [AUDIENCE],
        "user": {
            "username": f"system:serviceaccount:{pod.namespace}:default",
            "uid": "sa-uid",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{pod.namespace}", "system:authenticated"],
            "extra": {
                "authentication.kubernetes.io/credential-id": ["JTI=1"],
                "authentication.kubernetes.io/node-name": [pod.node_name],
                "authentication.kubernetes.io/pod-name": [pod.name],
                "authentication.kubernetes.io/pod-uid": [pod.uid],
            },
        },
    } | changes


REFUSED_STATUS: Final[Mapping[str, object]] = {"user": {}, "error": "[invalid bearer token]"}


@dataclass
class FakeReviewer:
    """An API server that knows the tokens it is told of."""

    good: dict[str, Mapping[str, object]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    failure: KubeError | None = None
    delay_seconds: float = 0.0

    def issue(self, pod: PodRecord, **options: Any) -> str:
        """Make a good token for this pod."""
        token = jwt(claims(pod, **options), signature=f"good{len(self.good)}")
        self.good[token] = accepted_status(pod)
        return token

    async def review_token(self, token: str, audience: str) -> Mapping[str, object]:
        assert audience == AUDIENCE
        self.asked.append(token)
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.failure is not None:
            raise self.failure
        return self.good.get(token, REFUSED_STATUS)


@dataclass
class Pods:
    """A directory of pods."""

    by_uid: dict[str, PodRecord] = field(default_factory=dict)
    synced: bool = True

    @classmethod
    def of(cls, *pods: PodRecord) -> "Pods":
        return cls(by_uid={pod.uid: pod for pod in pods})

    def put(self, pod: PodRecord) -> None:
        self.by_uid[pod.uid] = pod

    def find(self, namespace: str, name: str, uid: str) -> PodRecord | None:
        pod = self.by_uid.get(uid)
        return pod if pod is not None and (pod.namespace, pod.name) == (namespace, name) else None

    def records(self) -> Iterable[PodRecord]:
        return self.by_uid.values()


@dataclass
class Sink:
    """Counts reports as the controller does: a sequence that does not rise is a replay."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)
    taken: list[tuple[PodIdentity, Report]] = field(default_factory=list)
    keep: bool = True
    stages: PodStages | None = None

    def accept(self, identity: PodIdentity, report: Report, received_at: float) -> AcceptResult:  # noqa: ARG002
        key = (identity.uid, report.start_id)
        before = self.last.get(key, 0)
        if report.sequence <= before:
            return AcceptResult(accepted=before, replay=True)
        self.last[key] = report.sequence
        if self.keep:
            self.taken.append((identity, report))
        return AcceptResult(accepted=report.sequence, stages=self.stages)


@dataclass
class Switch:
    """Whether reports can be taken."""

    ready: bool = True


@dataclass
class Bundle:
    """The CA certificates."""

    pem: str | None = "PEM-1"


@dataclass
class Told:
    """What the owners of jobs were told."""

    events: list[tuple[str, str, Severity, str]] = field(default_factory=list)

    def report(self, pod: PodRecord, *, reason: str, message: str, severity: Severity) -> None:
        self.events.append((pod.name, reason, severity, message))


@dataclass
class Clock:
    """Time that goes when it is told to."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def report(
    sender: PodRecord, *, sequence: int = 1, start_id: str = "start-0001", gpus: int = 8, **changes: Any
) -> Report:
    """A usual report of this pod."""
    values: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "pod": PodRef(namespace=sender.namespace, name=sender.name, uid=sender.uid),
        "start_id": start_id,
        "sequence": sequence,
        "sent_at": NOW,
        "started_at": NOW - 50,
        "version": "0.1.0",
        "source": Source.NVML,
        "gpus_requested": gpus,
        "gpus_visible": gpus,
        "gpus": [gpu_report(index) for index in range(gpus)],
    }
    return Report(**(values | changes))


def gpu_report(index: int) -> GpuReport:
    """One GPU with every usual value."""
    gib = 2**30
    return GpuReport(
        uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
        index=index,
        model="NVIDIA H100 80GB HBM3",
        utilization=0.625,
        memory_used_bytes=62 * gib,
        memory_reserved_bytes=gib // 2,
        memory_total_bytes=80 * gib,
        memory_peak_bytes=71 * gib,
        memory_recent_peak_bytes=70 * gib,
        power_watts=512.4,
        power_limit_watts=700.0,
        temperature_celsius=61.0,
        observed_seconds=3600.0,
        busy_seconds=2250.5,
        energy_joules=1_844_640.0,
    )


def value_of(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Value of one series; None where there is no such series."""
    return registry.get_sample_value(name, labels)

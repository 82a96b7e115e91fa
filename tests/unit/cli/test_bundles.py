# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Records of several pods as one trace: how clocks are compared, and what slow answers do to that."""

import io
import json

import pytest

from verl_gpumonitor.cli.bundles.answers import PodRecord
from verl_gpumonitor.cli.bundles.kubectl import Answer
from verl_gpumonitor.cli.bundles.merge import Bundle
from verl_gpumonitor.cli.bundles.pods import JobPod, NoPods, list_path
from verl_gpumonitor.cli.monitors import GPUMonitor, Spec, Status, WorkloadRef, WorkloadSeen
from verl_gpumonitor.model.kubernetes import unix_seconds
from verl_gpumonitor.model.trace import NotATrace

UNIX = 1e9


def record(pod: str, *, ahead: float, asked: float, sent: float, first: float, lines: int = 3) -> PodRecord:
    """A record of the last ten seconds; times of the exchange by the clock of the desk."""
    header = {
        "type": "header",
        "format": "gpumonitor-trace/1",
        "pods": [{"name": pod}],
        "began_unix": UNIX + sent + ahead - 10.0,
        "sent_unix": UNIX + sent + ahead,
    }
    known = [{"type": "gpu", "t": float(number), "pod": pod, "uuid": "GPU"} for number in range(lines)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [header, *known, {"type": "end"}])
    return PodRecord(pod, io.BytesIO(text.encode()), Answer(UNIX + asked, UNIX + first))


def bundle(*records: PodRecord) -> Bundle:
    pods = [
        JobPod(name=one.pod, phase="Running", node=None, node_role=None, group=None, gpus_requested=1, port=1)
        for one in records
    ]
    return Bundle(monitor=GPUMonitor(), pods=pods, records={one.pod: one for one in records})


@pytest.mark.parametrize(
    ("ahead", "exchanges", "moved"),
    [
        pytest.param([0.0, 0.5, -0.5], [(0, 0.1, 0.2)] * 3, {}, id="clocks as NTP keeps them"),
        pytest.param([0.0, 30.0, 0.0], [(0, 0.1, 0.2)] * 3, {"w-1": 30.0}, id="one clock is far ahead"),
        pytest.param(
            [0.0, 0.0, 0.0], [(0, 0.1, 0.2), (0, 0.1, 8.0), (0, 7.9, 8.0)], {}, id="slow answers prove nothing"
        ),
        pytest.param([0.0], [(0, 9.0, 10.0)], {}, id="one pod has nobody to differ from"),
        pytest.param([-3600.0] * 3, [(0, 0.1, 0.2)] * 3, {}, id="the desk's own clock is wrong"),
    ],
)
def test_a_clock_is_put_right_only_where_it_is_sure(
    ahead: list[float], exchanges: list[tuple[float, float, float]], moved: dict[str, float]
) -> None:
    records = [
        record(f"w-{number}", ahead=seconds, asked=asked, sent=sent, first=first)
        for number, (seconds, (asked, sent, first)) in enumerate(zip(ahead, exchanges, strict=True))
    ]
    found = bundle(*records)
    assert found.corrections == pytest.approx(moved, abs=0.2)
    times = [line.t for line in found.lines()]
    assert times == sorted(times)
    assert times[-1] < 20.0


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"<html>", id="a page"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"type":"header","format":"gpumonitor-trace/1"}', id="a trace without times"),
        pytest.param(
            b'{"type":"header","format":"gpumonitor-trace/1","began_unix":1e999,"sent_unix":0}', id="a time without end"
        ),
        pytest.param(
            b'{"type":"header","format":"gpumonitor-trace/9","began_unix":1,"sent_unix":2}', id="another format"
        ),
    ],
)
def test_what_is_no_record_is_refused(first: bytes) -> None:
    with pytest.raises(NotATrace):
        PodRecord("w-0", io.BytesIO(first + b"\n"), Answer(0.0, 0.0))


def of(kind: str, **workload: str) -> GPUMonitor:
    ref = WorkloadRef(kind=kind, name="job")
    return GPUMonitor(spec=Spec(workload_ref=ref), status=Status(workload=WorkloadSeen(**workload)))


@pytest.mark.parametrize(
    ("monitor", "selector"),
    [
        pytest.param(of("PyTorchJob"), "training.kubeflow.org%2Fjob-name%3Djob", id="a PyTorchJob"),
        pytest.param(of("RayCluster"), "ray.io%2Fcluster%3Djob%2C", id="a RayCluster"),
        pytest.param(of("RayJob", ray_cluster="job-x"), "ray.io%2Fcluster%3Djob-x%2C", id="a RayJob"),
    ],
)
def test_pods_are_found_by_the_labels_of_their_kind(monitor: GPUMonitor, selector: str) -> None:
    assert list_path("team", monitor).startswith(f"/api/v1/namespaces/team/pods?labelSelector={selector}")


@pytest.mark.parametrize("monitor", [of("RayJob"), of("TrainJob")])
def test_where_no_pods_can_be_named_that_is_said(monitor: GPUMonitor) -> None:
    with pytest.raises(NoPods):
        list_path("team", monitor)


def test_times_of_kubernetes() -> None:
    assert unix_seconds("2001-09-09T01:46:40Z") == UNIX
    assert unix_seconds("yesterday") is None
    assert unix_seconds(None) is None

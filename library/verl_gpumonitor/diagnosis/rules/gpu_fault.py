# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUFault: hardware. An Xid of the GPU's own kind, an error of NVML that means hardware, a GPU that is lost.

Xids that an application causes by its own fault (31 is a bad pointer) are not hardware and have their own reason; taken
for hardware they cost a healthy node. A record that a row *was* remapped (63) is no failure, one that it could not be
(64) is. A GPU whose lines merely stop is not lost: that is missing telemetry, until NVML says so.

A lost GPU stays lost until it answers again; an Xid that does not come again is forgotten after half an hour, as a
gauge that shows the last Xid for ever is of no use (NVIDIA/dcgm-exporter#500). Sources: NVIDIA's Xid catalogue;
NVIDIA/k8s-device-plugin#2038; NVIDIA/dcgm-exporter#348.
"""

from verl_gpumonitor.diagnosis.history import GpuHistory, History
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, gpu_name, subject
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.diagnosis.xids import HARDWARE, LOST
from verl_gpumonitor.model.findings import Finding
from verl_gpumonitor.model.trace import XidLine

REASON = "GPUFault"


def gpu_fault(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report each GPU with a hardware fault."""
    return [*_by_xid(history, thresholds), *_by_nvml(history, thresholds)]


def _by_xid(history: History, thresholds: Thresholds) -> list[Case]:
    limits = thresholds.faults
    cases = []
    for where, xids in _problems(history, limits.aftermath_seconds).items():
        if history.t - max(xid.t for xid in xids) <= limits.hardware_seconds:
            cases.append(_case(history, where, xids))
    return cases


def _problems(history: History, seconds: float) -> dict[str, list[XidLine]]:
    """Return the Xids by problem, each under the GPU that had it first.

    A GPU has one problem, whatever codes tell of it. Two GPUs of a pod with the same code at the same time have one as
    well: both ends of a link tell that it is broken, and a switch or a power supply has several behind it.
    """
    first: dict[str, str] = {}
    problems: dict[str, list[XidLine]] = {}
    for xid in history.xids:
        if xid.code not in HARDWARE:
            continue
        own = xid.uuid or xid.pod or ""
        if own not in first:
            shared = (
                where
                for where, xids in problems.items()
                if any(x.code == xid.code and x.pod == xid.pod and xid.t - x.t <= seconds for x in xids)
            )
            first[own] = next(shared, own)
        problems.setdefault(first[own], []).append(xid)
    return problems


def _case(history: History, where: str, xids: list[XidLine]) -> Case:
    uuids = dict.fromkeys(xid.uuid or "" for xid in xids)
    xid = next(x for x in reversed(xids) if (x.uuid or "") == next(iter(uuids)))
    gpus = [history.gpus[uuid] for uuid in uuids if uuid in history.gpus]
    codes = sorted({x.code for x in xids})
    name, verb = (subject(gpus), "report" if len(gpus) > 1 else "reports") if gpus else (_some_gpu(xid), "reports")
    have = "have the GPUs" if len(gpus) > 1 else "have the GPU"
    message = (
        f"{name} {verb} Xid {xid.code}: {HARDWARE[xid.code]}. This is hardware; drain the node and {have}"
        f" checked, and restart the job from its last checkpoint on others"
    )
    return Case(
        key=where,
        finding=finding(
            REASON,
            message,
            gpus=gpus,
            pods=() if xid.pod is None else (xid.pod,),
            stage=gpus[0].stage if gpus else None,
            role=gpus[0].role if gpus else None,
            evidence={"xid": xid.code, "xids": [float(code) for code in codes], "count": len(xids)},
        ),
    )


def _some_gpu(xid: XidLine) -> str:
    return f"a GPU of pod {xid.pod}"


def _by_nvml(history: History, thresholds: Thresholds) -> list[Case]:
    newest = {x.uuid: x.t for x in history.xids if x.code in HARDWARE}
    seconds = thresholds.faults.hardware_seconds
    return [
        Case(key=gpu.uuid, finding=_lost(gpu))
        for gpu in history.gpus.values()
        if gpu.error in LOST and history.t - newest.get(gpu.uuid, float("-inf")) > seconds
    ]


def _lost(gpu: GpuHistory) -> Finding:
    message = (
        f"{gpu_name(gpu)} no longer answers: NVML says {gpu.error}. It is lost to the job, which will fail or hang in"
        f" its next collective; restart it on other hardware and have this GPU checked"
    )
    return finding(
        REASON, message, gpus=(gpu,), stage=gpu.stage, role=gpu.role, evidence={"nvml_error": gpu.error or ""}
    )


RULE = Rule(reason=REASON, judge=gpu_fault, after_end=True)

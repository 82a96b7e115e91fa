# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ApplicationFault: an Xid that the program itself caused.

Xid 13, 31, 43, 45, 68 and 109 come from a kernel that reads where it may not, or from a program that was killed. The
GPU is well, and whoever drains the node for it loses a node and keeps the fault. 45 and 43 also follow another fault,
hardware's or the program's, as the driver cleans up: soon after one, on the same GPU, they are its consequence and no
news. 45 comes on all GPUs of a program that is killed: soon after a fault on any GPU of the job, and after its end,
it tells nothing but that.
Sources: NVIDIA's Xid catalogue; NVIDIA/k8s-device-plugin#2038 (application Xids mark GPUs unhealthy).
"""

from verl_gpumonitor.diagnosis.history import History
from verl_gpumonitor.diagnosis.rule import Case, Open, Rule, Verdict, finding, gpu_name
from verl_gpumonitor.diagnosis.thresholds import Faults, Thresholds
from verl_gpumonitor.diagnosis.xids import AFTERMATH, APPLICATION, HARDWARE, TEARDOWN
from verl_gpumonitor.model.trace import XidLine

REASON = "ApplicationFault"


def application_fault(history: History, thresholds: Thresholds, _: Open) -> Verdict:
    """Report the program's own Xids: one finding for one code, with all the GPUs that had it."""
    limits = thresholds.faults
    by_code: dict[int, list[XidLine]] = {}
    for xid in history.xids:
        if xid.code not in APPLICATION or history.t - xid.t > limits.application_seconds:
            continue
        if not _cleans_up(history, xid, limits):
            by_code.setdefault(xid.code, []).append(xid)
    return [_case(history, code, xids) for code, xids in by_code.items()]


def _cleans_up(history: History, xid: XidLine, limits: Faults) -> bool:
    """Say whether an Xid only tells that the driver cleans up after something else."""
    if xid.code == TEARDOWN and history.over and xid.t > history.phase_t:
        return True
    follows = AFTERMATH.get(xid.code, frozenset())
    for cause in history.xids:
        near = cause.uuid == xid.uuid or xid.code == TEARDOWN
        hardware = cause.code in HARDWARE
        if near and (hardware or cause.code in follows) and -2.0 <= xid.t - cause.t <= limits.aftermath_seconds:
            return True
    return False


def _case(history: History, code: int, xids: list[XidLine]) -> Case:
    gpus = [history.gpus[x.uuid] for x in xids if x.uuid in history.gpus]
    gpus = list(dict.fromkeys(gpus))
    where = gpu_name(gpus[0]) if gpus else f"a GPU of pod {xids[0].pod}"
    more = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    message = (
        f"Xid {code} on {where}{more}: {APPLICATION[code]}. The program did this and the GPU is well: look at its"
        f" log for the failing kernel (CUDA_LAUNCH_BLOCKING=1 names it) and at recent changes of libraries"
    )
    first = gpus[0] if gpus else None
    return Case(
        key=str(code),
        finding=finding(
            REASON,
            message,
            gpus=gpus,
            pods=[x.pod for x in xids if x.pod is not None],
            stage=None if first is None else first.stage,
            role=None if first is None else first.role,
            evidence={"xid": code, "count": len(xids)},
        ),
    )


RULE = Rule(reason=REASON, judge=application_fault, after_end=True)

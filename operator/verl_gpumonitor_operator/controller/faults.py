# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs that are broken, and programs that break: from Xids and NVML's errors in the reports to findings. Pure.

Xid counters run since the start of a sidecar, so that a rise is the news: a hardware fault that does not come again is
shown for half an hour, one of the program for ten minutes. A GPU that is lost is one for as long as it is. Some Xids of
a program follow a hardware fault, as the driver cleans up, and are then no news.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from verl_gpumonitor.diagnosis.hysteresis import Alert, AlertPhase, Holds, advance
from verl_gpumonitor.diagnosis.xids import APPLICATION, HARDWARE
from verl_gpumonitor.model.vocabulary import GpuState

from .status import GpuView
from .telemetry import is_hardware
from .xids import XidSeen

GPU_FAULT: Final = "GPUFault"
APPLICATION_FAULT: Final = "ApplicationFault"
HARDWARE_SECONDS: Final = 1800.0
APPLICATION_SECONDS: Final = 600.0
AFTERMATH_SECONDS: Final = 120.0
AT_ONCE: Final = Holds(raise_seconds=0.0, clear_seconds=60.0)
HANGS: Final = Holds(raise_seconds=60.0, clear_seconds=60.0)
"""A call into NVML that hangs may come back."""
NAMED: Final = 4
"""GPUs that one message names."""


class Key(NamedTuple):
    """One problem of one GPU."""

    reason: str
    uuid: str


class Fault(NamedTuple):
    """What is wrong with one GPU now."""

    key: Key
    pod: str
    text: str
    """Half a sentence, after the GPU's name."""
    hold: Holds = AT_ONCE


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultState:
    """What must be remembered from one look to the next."""

    alerts: Mapping[Key, Alert] = field(default_factory=dict)
    faults: Mapping[Key, Fault] = field(default_factory=dict)
    """The newest of each."""

    @property
    def open(self) -> list[Fault]:
        """Faults that are shown, by GPU."""
        return [self.faults[key] for key, alert in sorted(self.alerts.items()) if alert.open]


class Faults(NamedTuple):
    """What one look brought."""

    state: FaultState
    raised: Sequence[Fault]
    resolved: Sequence[str]
    """Reasons of which no GPU has a fault any more."""


def look(before: FaultState, gpus: Iterable[GpuView], *, now: float) -> Faults:
    """Take one look at the GPUs of a workload. `now`: Unix seconds, those of the Xids' times."""
    seen: set[str] = set()
    found: dict[Key, Fault] = {}
    for gpu in gpus:
        seen.add(gpu.report.uuid)
        found |= {fault.key: fault for fault in _of_gpu(gpu, now)}
    alerts: dict[Key, Alert] = {}
    for key in [*before.alerts, *(key for key in found if key not in before.alerts)]:
        fault = found.get(key) or before.faults.get(key)
        # Of a GPU that is not there now nothing can be said.
        holds = True if key in found else False if key.uuid in seen else None
        old = before.alerts.get(key, Alert(since=now, seen=now))
        new = advance(old, t=now, holds=holds, hold=fault.hold if fault is not None else AT_ONCE)
        if new.phase is not AlertPhase.CLEAR:
            alerts[key] = new
    state = FaultState(alerts=alerts, faults={key: found.get(key) or before.faults[key] for key in alerts})
    were = {fault.key for fault in before.open}
    raised = [fault for fault in state.open if fault.key not in were]
    gone = {key.reason for key in were} - {fault.key.reason for fault in state.open}
    return Faults(state, raised, sorted(gone))


def _of_gpu(gpu: GpuView, now: float) -> Iterable[Fault]:
    report = gpu.report
    hardware = {code: seen for code, seen in gpu.xids.items() if code in HARDWARE}
    recent = [code for code, seen in hardware.items() if now - seen.at <= HARDWARE_SECONDS]
    if recent:
        newest = max(recent, key=lambda code: hardware[code].at)
        yield Fault(Key(GPU_FAULT, report.uuid), gpu.pod, f"reports Xid {newest}: {HARDWARE[newest]}")
    elif is_hardware(report):
        hangs = report.state is GpuState.NOT_RESPONDING
        what = (
            "no longer answers: a call about it hangs" if hangs else f"is lost: NVML says {report.error or 'no more'}"
        )
        yield Fault(Key(GPU_FAULT, report.uuid), gpu.pod, what, HANGS if hangs else AT_ONCE)
    own = [
        code
        for code, seen in gpu.xids.items()
        if code in APPLICATION and now - seen.at <= APPLICATION_SECONDS and not _follows(seen, hardware.values())
    ]
    if own:
        newest = max(own, key=lambda code: gpu.xids[code].at)
        yield Fault(Key(APPLICATION_FAULT, report.uuid), gpu.pod, f"reports Xid {newest}: {APPLICATION[newest]}")


def _follows(xid: XidSeen, hardware: Iterable[XidSeen]) -> bool:
    return any(-AFTERMATH_SECONDS <= other.at - xid.at <= 0 for other in hardware)


ADVICE: Final[Mapping[str, str]] = {
    GPU_FAULT: (
        "This is hardware: drain the node, have it checked, and restart the job from its last checkpoint elsewhere."
    ),
    APPLICATION_FAULT: (
        "The program did this and the GPU is well: look at its log for the failing kernel (CUDA_LAUNCH_BLOCKING=1 "
        "names it) and at recent changes of libraries."
    ),
}


def message(reason: str, faults: Sequence[Fault]) -> str:
    """Say what is wrong, with the first few GPUs by name, and what to do."""
    own = [fault for fault in faults if fault.key.reason == reason]
    named = "; ".join(f"GPU {fault.key.uuid} of pod {fault.pod} {fault.text}" for fault in own[:NAMED])
    more = f"; and {len(own) - NAMED} more GPUs" if len(own) > NAMED else ""
    return f"{named}{more}. {ADVICE[reason]}"

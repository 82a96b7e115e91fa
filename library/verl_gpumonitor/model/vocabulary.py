# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The words that all parts share: where telemetry came from, whose a GPU is, and what became of it.

Stages and roles are plain strings, because a later verl may bring new ones; the sets here are those we know.
"""

from collections.abc import Iterable
from typing import Final

from .enums import StrEnum

TRACE_FORMAT = "gpumonitor-trace/1"
"""First line of a trace; `model.trace` reads it, and it is here for the sidecar, which only writes some lines."""

STAGES = (
    "init",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "testing",
    "other",
    "unknown",
)
"""Stage names as verl's own timers print them, and our two: `other` (seen, not classified) and `unknown`."""

ROLES = ("actor", "critic", "ref", "rollout", "reward", "teacher", "trainer", "driver", "unknown")
"""Roles of a GPU. It follows the stage: a colocated GPU is actor, rollout, ref and critic in turn."""

UNKNOWN = "unknown"
"""The legal stage and role of a moment that nobody can name."""

HEAT_AND_BRAKES: Final = frozenset(
    ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
)
"""Reasons that hold clocks down by heat or a power brake. A power cap under full load is normal; an idle GPU and
settings are no throttling."""


class Source(StrEnum):
    """Who read the GPU values of a report."""

    NVML = "nvml"
    """The sidecar itself, by NVML: 1 Hz, memory peaks, all signals."""
    RAY_AGENT = "ray-agent"
    """Ray's metrics agent in the same pod: load, memory, power, temperature, each 5 s."""
    NONE = "none"
    """Nobody: `UnavailableReason` says why."""


class UnavailableReason(StrEnum):
    """Why GPU values cannot be read, or cannot be given to the job. Used as condition reasons."""

    NO_LIBRARY = "NoLibrary"
    """No libnvidia-ml.so.1 in the sidecar's container: it did not get the driver's files."""
    NO_DEVICE_ACCESS = "NoDeviceAccess"
    """The library is there and answers, but shows no GPU (or refuses for lack of permission)."""
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    """The library is there; the kernel driver is not loaded, or does not fit the library."""
    NOT_INJECTED = "NotInjected"
    """The pod runs without our sidecar."""
    NOT_REPORTING = "NotReporting"
    """The pod has our sidecar, and no report of it arrives."""
    OWNERSHIP_UNKNOWN = "OwnershipUnknown"
    """GPUs are visible, but which of them are the pod's cannot be said."""
    NVML_ERROR = "NvmlError"
    """NVML answers with an error that is none of the above; the message carries its name."""
    NOT_RESPONDING = "NotResponding"
    """A call into NVML hangs, so that nothing can be read."""


class Ownership(StrEnum):
    """How it is known which of the visible GPUs are the pod's own, in the order they are tried."""

    NONE_REQUESTED = "none-requested"
    """The pod asks for no GPU, so it owns none, whatever it sees."""
    RAY_AGENT = "ray-agent"
    """Ray's agent in this pod names them by UUID."""
    RAY_HEAD = "ray-head"
    """The head's node detail names them by UUID; relayed by the controller."""
    WHOLE_NODE = "whole-node"
    """As many are visible as were requested."""
    MARKS = "marks"
    """The library inside the training process names them."""
    PROCESSES = "processes"
    """Processes of this pod run on them (shared process namespace)."""
    UNKNOWN = "unknown"
    """None of these; no GPU is then reported as the job's."""


class GpuState(StrEnum):
    """What a GPU answers at the moment."""

    OK = "ok"
    LOST = "lost"
    """It fell off the bus, or vanished after having been the pod's."""
    NOT_RESPONDING = "not-responding"
    """A call about it hangs; it is left out until that call returns."""
    ERROR = "error"
    """Every call about it fails with another error."""


class Severity(StrEnum):
    """How urgent a finding is. `info` makes a Normal Event, the others Warning."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Phase(StrEnum):
    """`GPUMonitor.status.phase`."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    UNKNOWN = "Unknown"


def held_down(reasons: Iterable[str]) -> bool:
    """Say whether heat or a power brake is among the reasons why clocks are as they are."""
    return not HEAT_AND_BRAKES.isdisjoint(reasons)

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Advice about what no setting of verl mends: hangs, faults of hardware and program, heat, missing telemetry. Pure."""

from verl_gpumonitor.model.findings import Advice

from . import levers
from .case import Case, Found, say
from .config import R

_RESET = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120, 140})
"""Xids after which a GPU is not used again before it was reset, or its node looked at (NVIDIA's Xid catalogue)."""


def hang(case: Case) -> Found:
    """Yield how the rank that all others wait for is found, and how a hang ends sooner."""
    if case.stage in ("gen", "testing", "reward"):
        yield say(
            "See what the rollout waits for: py-spy dump of the agent loop workers and of the engine's server."
            " Usual causes: a tool or a reward call without a time limit, an engine whose scheduler died, a request"
            " that never ends",
            reason=f"no progress in {case.stage}",
        )
        if case.config.flag(f"{R}.multi_turn.enable"):
            yield _bounded_turns(case)
    elif not case.figure("spinning_gpus") and case.figure("still_gpus"):
        yield say(
            "See what the driver waits for: py-spy dump --pid of its process (TaskRunner, on the head or on a worker),"
            " then of the workers. No GPU computes, so that no collective is what they wait in: usual causes are a"
            " reward or a data loader that does not return, storage, a worker that died unseen (ray list actors)",
            reason=f"no progress in {case.stage or 'the job'}, and all GPUs stand still",
        )
    else:
        yield say(
            "Look at the ranks that the finding names first: py-spy dump --pid of their worker processes shows"
            " where each stands. Ranks at 100% of load and low power wait in a collective; the idle one is what"
            " they wait for",
            reason=f"no progress in {case.stage or 'the job'}",
            confidence="high",
        )
    yield _sooner(case)
    yield say(
        "If it comes back after a restart, keep the evidence: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and"
        " TORCH_NCCL_DUMP_ON_TIMEOUT=1 make PyTorch write which collective each rank was in",
        reason="a hang of its kind leaves nothing in the log",
        confidence="low",
    )


def _bounded_turns(case: Case) -> Advice | None:
    key = f"{R}.multi_turn.max_assistant_turns"
    if case.config.text(key) is not None:
        return None
    text = f"Bound the turns of one answer with {key}, which is without a bound now, and the time of each tool call"
    return case.condition(
        key, text=text, reason="multi_turn.enable is on", price="long answers are cut: learning changes"
    )


def _sooner(case: Case) -> Advice | None:
    """Let a collective that hangs fail, so that the job ends and can start again."""
    key = "actor_rollout_ref.nccl_timeout"
    current = case.config.integer(key)
    if current is None or current <= 600:
        return None
    text = f"Lower {key} from {current} to 600: a collective that hangs then ends the job after ten minutes"
    price = "a stage in which one rank waits longer than that for the others fails too"
    return case.change(key, "600", text=text, reason=f"it waits for {current} s now", price=price)


def gpu_fault(case: Case) -> Found:
    """Yield what to do with the GPU and its node."""
    code = case.figure("xid", "code")
    known = f"Xid {code:.0f}" if code is not None else "a lost GPU or an error of its memory"
    reset = code is None or int(code) in _RESET
    yield say(
        "Cordon the node, so that the job's next start does not land on it, and restart the job from its last"
        " checkpoint",
        reason=known,
        price="the steps since that checkpoint",
        confidence="high",
    )
    yield say(
        "Have the GPU reset or the node rebooted, and run its diagnosis (dcgmi diag -r 3) before it takes work again"
        if reset
        else "Look up the Xid in NVIDIA's catalogue, and the node's kernel log, before the GPU takes work again",
        reason=known,
    )


def application_fault(case: Case) -> Found:
    """Yield how a program's own fault is found."""
    code = case.figure("xid", "code")
    known = (
        f"Xid {code:.0f} is raised by the program, not by the hardware" if code is not None else "the program's own Xid"
    )
    if case.stage in ("gen", "testing"):
        yield levers.eager(case)
    yield say(
        "Find the kernel: CUDA_LAUNCH_BLOCKING=1 makes the Python stack name the call that failed,"
        " compute-sanitizer the access. Usual causes: an index out of range (token ids beyond the vocabulary), a"
        " custom or a mismatched kernel (flash-attn, engine and torch of different builds)",
        reason=known,
        price="much slower while it is on",
    )
    yield say(
        "If the same program fails on one GPU only, have that GPU looked at all the same",
        reason=known,
        confidence="low",
    )


def throttled(case: Case) -> Found:
    """Yield how a hot or limited GPU is told apart."""
    reason = str(case.finding.evidence.get("throttle_reasons") or "")
    braked = "power_brake" in reason
    cooling = say(
        "Have the node's cooling looked at (fans, air flow, inlet temperature, the neighbour's load): the GPU"
        " lowers its clocks, and all ranks of the job wait for it. Until then keep the job off the node (cordon)",
        reason=reason or "clocks are held down",
        price="one node less",
        confidence="high" if "thermal" in reason else "medium",
    )
    if "thermal" in reason or not braked:
        yield cooling
    if braked or "thermal" not in reason:
        yield say(
            "Have the node's power supplies and the rack's power cap looked at, and compare the power limit with that"
            " of its peers (nvidia-smi -q -d POWER): hw_power_brake_slowdown comes from outside of the GPU",
            reason=reason or "clocks are held down",
            confidence="high" if braked else "medium",
        )


def telemetry_unavailable(case: Case) -> Found:
    """Yield what gives the sidecar eyes."""
    cause = str(case.finding.evidence.get("nvml_error") or case.finding.message[:200])
    yield say(
        "See the condition TelemetryAvailable of the GPUMonitor for the cause. Without access to the driver the"
        " chart's value visibility.strategy chooses another way; errors of NVML that go away by themselves need"
        " nothing, and a driver that was updated under running pods needs the pod started anew",
        reason=cause,
    )


def telemetry_partial(case: Case) -> Found:
    """Yield what is missing and whether anything can be done."""
    yield say(
        "Nothing has to be done for the job itself; what cannot be read is left out of every judgement. MIG slices"
        " offer no utilisation; pods without a sidecar were started while injection was off, or opted out",
        reason=case.finding.message[:200],
        confidence="low",
    )

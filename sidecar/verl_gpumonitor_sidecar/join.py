# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Joins what NVML, Ray's agent and the controller say into one picture of the pod. Pure.

Ladder of sources: NVML while it answers; else Ray's agent in the same pod; else nobody, with the reason. It may be
climbed and descended at any time. Whose a GPU is, is decided once and then kept: a GPU that disappears later is a lost
GPU of this pod, not a GPU less.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from verl_gpumonitor.model.report import RayNode
from verl_gpumonitor.model.samples import GpuCounters, GpuSample, HostSample, NodeSample, RayAgentSample
from verl_gpumonitor.model.vocabulary import GpuState, Ownership, Source, UnavailableReason
from verl_gpumonitor.reading.ownership import Evidence, Owned, own_gpus
from verl_gpumonitor.reading.ray_agent import named_gpus
from verl_gpumonitor.timeline.accumulate import GpuAccumulator, add_sample

from .state import FRESH_INTERVALS, OwnGpu, PodState

RAY_INTERVAL_SECONDS: Final = 5.0
"""Ray's agent renews its values so often."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the sources say at this moment."""

    node: NodeSample = NodeSample()
    agent: RayAgentSample | None = None
    """None while Ray's agent was never heard, or not for some time."""
    relayed_uuids: tuple[str, ...] | None = None
    """The pod's GPUs as its Ray head names them, heard from the controller; None while nobody does."""
    marked_uuids: tuple[str, ...] | None = None
    """Those that marking processes name; None where no marks are received."""
    host: HostSample | None = None
    ray_nodes: tuple[RayNode, ...] = ()
    processes_on: tuple[str, ...] | None = None
    """UUIDs of the GPUs on which processes of the pod run; None unless it shares its process namespace."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the sidecar lives."""

    gpus_requested: int
    sample_interval_seconds: float = 1.0
    gpus_shared: bool = False
    """What is requested are parts of GPUs: that as many are seen as are requested then proves nothing."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from one moment to the next."""

    owned: Owned = Owned()
    """Whose the GPUs are; kept once it is settled."""
    samples: dict[str, GpuSample] = {}
    """Newest sample of each own GPU, from whatever source."""
    ray: dict[str, GpuAccumulator] = {}
    """What added up while Ray's agent was the source."""
    nvml: dict[str, GpuCounters] = {}
    """What NVML's reader had added up when it was last heard."""
    xid_unix: dict[tuple[str, int], tuple[float, float]] = {}
    """(UUID, code) -> (monotonic, Unix) time of the last event."""
    last_success_at: float | None = None
    last_success_unix: float | None = None


def join(before: Memory, inputs: Inputs, *, terms: Terms, now: float, now_unix: float) -> tuple[Memory, PodState]:
    """Return the picture of this moment, and what the next one needs. `now` is monotonic."""
    agent_gpus = _named(inputs.agent, inputs.relayed_uuids)
    source = _source(inputs.node, agent_gpus, inputs.agent, terms, now)
    after = _decide_ownership(before, inputs, terms)
    after = _add_up(after, inputs.node, agent_gpus, source=source, now=now, now_unix=now_unix)
    after, success = _note_success(after, inputs.node, source, terms=terms, now=now, now_unix=now_unix)
    unavailable, message = _unavailable(after, inputs.node, source, terms)
    seen = frozenset(gpu.uuid for gpu in inputs.node.gpus)
    state = PodState(
        gpus_requested=terms.gpus_requested,
        source=source,
        ownership=after.owned.by,
        unavailable=unavailable,
        message=message,
        gpus=tuple(_own(after, uuid, inputs.node, source=source, seen=seen) for uuid in after.owned.uuids),
        gpus_visible=inputs.node.visible,
        driver_version=inputs.node.driver_version,
        interval_seconds=_interval(source, terms),
        host=inputs.host,
        health=inputs.node.health,
        last_success_unix=after.last_success_unix,
        success=success,
        ray_nodes=inputs.ray_nodes,
    )
    return after, state


def _named(agent: RayAgentSample | None, relayed_uuids: tuple[str, ...] | None) -> dict[str, GpuSample]:
    """Return the agent's GPUs by UUID; those of an older Ray are named by what the head says of this pod."""
    if agent is None:
        return {}
    return {gpu.uuid: gpu for gpu in named_gpus(agent, relayed_uuids or ())}


def _source(
    node: NodeSample, agent_gpus: dict[str, GpuSample], agent: RayAgentSample | None, terms: Terms, now: float
) -> Source:
    if terms.gpus_requested == 0:
        return Source.NONE
    if node.source is Source.NVML:
        return Source.NVML
    unnamed = agent.unnamed_gpus.values() if agent else ()
    heard = (gpu.taken_at for gpu in (*agent_gpus.values(), *unnamed))
    fresh = any(at is not None and now - at <= FRESH_INTERVALS * RAY_INTERVAL_SECONDS for at in heard)
    return Source.RAY_AGENT if fresh else Source.NONE


def _interval(source: Source, terms: Terms) -> float:
    return RAY_INTERVAL_SECONDS if source is Source.RAY_AGENT else terms.sample_interval_seconds


def _decide_ownership(before: Memory, inputs: Inputs, terms: Terms) -> Memory:
    """Decide with what all sources say, whichever of them is read: Ray may name what NVML measures."""
    node, agent = inputs.node, inputs.agent
    evidence = Evidence(
        requested=terms.gpus_requested,
        visible=None if terms.gpus_shared else _visible(node),
        ray_agent=[gpu.uuid for gpu in agent.gpus] if agent else None,
        ray_head=inputs.relayed_uuids,
        marks=inputs.marked_uuids,
        processes=inputs.processes_on,
    )
    return msgspec.structs.replace(before, owned=own_gpus(evidence, before.owned))


def _visible(node: NodeSample) -> list[str] | None:
    """Return what NVML shows now; None while it shows nothing, or while it counts what it cannot name yet."""
    if node.source is not Source.NVML or node.visible != len(node.gpus):
        return None
    return [gpu.uuid for gpu in node.gpus]


def _add_up(
    memory: Memory,
    node: NodeSample,
    agent_gpus: dict[str, GpuSample],
    *,
    source: Source,
    now: float,
    now_unix: float,
) -> Memory:
    """Take in the newest samples and counters of the own GPUs."""
    own = memory.owned.uuids
    heard = agent_gpus if source is Source.RAY_AGENT else {gpu.uuid: gpu for gpu in node.gpus}
    samples = {uuid: heard[uuid] for uuid in own if uuid in heard}
    return msgspec.structs.replace(
        memory,
        samples={**memory.samples, **samples},
        ray=_add_ray(memory.ray, samples if source is Source.RAY_AGENT else {}),
        nvml={**memory.nvml, **{uuid: node.counters[uuid] for uuid in own if uuid in node.counters}},
        xid_unix=_xid_times(memory.xid_unix, node, own, now=now, now_unix=now_unix),
    )


def _add_ray(before: dict[str, GpuAccumulator], heard: dict[str, GpuSample]) -> dict[str, GpuAccumulator]:
    """Add Ray's samples. While it is not the source nothing is added, and the time until it is again is a gap."""
    after = {uuid: _paused(accumulator) for uuid, accumulator in before.items() if uuid not in heard}
    for uuid, sample in heard.items():
        accumulator = before.get(uuid, GpuAccumulator())
        after[uuid] = add_sample(accumulator, sample, interval_seconds=RAY_INTERVAL_SECONDS)
    return after


def _paused(accumulator: GpuAccumulator) -> GpuAccumulator:
    if accumulator.taken_at is None:
        return accumulator
    return msgspec.structs.replace(accumulator, taken_at=None, energy_read_at=None, energy_reading_joules=None)


def _xid_times(
    before: dict[tuple[str, int], tuple[float, float]],
    node: NodeSample,
    own: Iterable[str],
    *,
    now: float,
    now_unix: float,
) -> dict[tuple[str, int], tuple[float, float]]:
    """Tell each Xid's time in Unix seconds once, so that a clock that is set later does not move it."""
    times = dict(before)
    for uuid in own:
        counters = node.counters.get(uuid)
        for code, at in counters.xid_last_at.items() if counters else ():
            if times.get((uuid, code), (None, 0.0))[0] != at:
                times[uuid, code] = (at, now_unix - (now - at))
    return times


def _note_success(
    memory: Memory, node: NodeSample, source: Source, *, terms: Terms, now: float, now_unix: float
) -> tuple[Memory, bool | None]:
    """Return whether GPU values are being read, and remember when they last were."""
    if source is Source.NONE:
        tried = terms.gpus_requested > 0 and (node.health.failures > 0 or node.unavailable is not None)
        return memory, False if tried else None
    at = _heard_at(memory, node, source)
    if at is not None and at != memory.last_success_at:
        memory = msgspec.structs.replace(memory, last_success_at=at, last_success_unix=now_unix - (now - at))
    fresh = at is not None and now - at <= FRESH_INTERVALS * _interval(source, terms)
    return memory, fresh


def _heard_at(memory: Memory, node: NodeSample, source: Source) -> float | None:
    """Return when the source last gave values; None if it never did."""
    if source is Source.NVML:
        return node.health.last_success_at
    return max((gpu.taken_at for gpu in memory.samples.values() if gpu.taken_at is not None), default=None)


def _unavailable(
    memory: Memory, node: NodeSample, source: Source, terms: Terms
) -> tuple[UnavailableReason | None, str | None]:
    if terms.gpus_requested == 0:
        return None, None
    if source is Source.NONE:
        return node.unavailable, node.message
    if memory.owned.by is Ownership.UNKNOWN:
        return UnavailableReason.OWNERSHIP_UNKNOWN, _NOBODY_SAYS.format(terms.gpus_requested)
    return None, None


_NOBODY_SAYS: Final = (
    "GPUs can be read, but nothing says which of them are this pod's {}: no Ray agent names them, the pod does not have"
    " the whole node, and it does not share its process namespace (spec.shareProcessNamespace: true would show it)"
)


def _own(memory: Memory, uuid: str, node: NodeSample, *, source: Source, seen: frozenset[str]) -> OwnGpu:
    """Return one own GPU as it stands: an own GPU that NVML does not have among those `seen` is a lost one."""
    sample = memory.samples.get(uuid, GpuSample(uuid=uuid, state=GpuState.LOST))
    if source is Source.NONE and sample.state is GpuState.OK:
        sample = _unread(sample, GpuState.ERROR, node.error or node.unavailable)
    elif source is Source.NVML and uuid not in seen:
        sample = _unread(sample, GpuState.LOST, None)
    return OwnGpu(
        sample=sample,
        counters=add_counters(memory.nvml.get(uuid), memory.ray.get(uuid), source=source),
        xid_last_unix=_xid_last_unix(memory, uuid) if memory.xid_unix else {},
    )


def _xid_last_unix(memory: Memory, uuid: str) -> dict[int, float]:
    return {code: unix for (owner, code), (_, unix) in memory.xid_unix.items() if owner == uuid}


def _unread(sample: GpuSample, state: GpuState, error: str | None) -> GpuSample:
    return GpuSample(
        uuid=sample.uuid, state=state, error=error, index=sample.index, model=sample.model, taken_at=sample.taken_at
    )


def add_counters(nvml: GpuCounters | None, ray: GpuAccumulator | None, *, source: Source) -> GpuCounters:
    """Return what both sources added up, each in the time when it was the source.

    The recent peak and readings are those of the present source: of the other they would be old ones.
    """
    if nvml is not None and ray is None and source is Source.NVML:
        return nvml
    first, second = nvml or GpuCounters(), ray.counters if ray else GpuCounters()
    present = {Source.NVML: first, Source.RAY_AGENT: second}.get(source, GpuCounters())
    return msgspec.structs.replace(
        first,
        observed_seconds=first.observed_seconds + second.observed_seconds,
        busy_seconds=first.busy_seconds + second.busy_seconds,
        energy_joules=_sum(first.energy_joules, second.energy_joules),
        throttled_seconds=_sum(first.throttled_seconds, second.throttled_seconds),
        memory_peak_bytes=_highest(first.memory_peak_bytes, second.memory_peak_bytes),
        memory_recent_peak_bytes=present.memory_recent_peak_bytes,
        memory_readings=present.memory_readings,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else (one or 0.0) + other


def _highest(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)

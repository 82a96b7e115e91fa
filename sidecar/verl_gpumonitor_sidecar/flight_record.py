# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the recorder keeps as a trace, piece by piece: `GET /trace`. Pure but for what the recorder holds.

The lines are those of `verl_gpumonitor.model.trace`, which a test holds them to. Its types are not imported: their
decoders take 0.7 MiB. Beyond that format the header says at what Unix time the trace begins and was sent, by this
node's clock, and a last line of type `end` tells a whole answer from one that broke off.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from verl_gpumonitor.model.vocabulary import TRACE_FORMAT, UNKNOWN
from verl_gpumonitor.timeline.words import OTHER

from .recorder import Failure, HostKept, Recorder, Snapshot, Stay, Xid
from .ring import GpuRing, Kept

PIECE_LINES: Final = 128
"""Lines that are put together in one go: about a millisecond's work."""
CONTENT_TYPE: Final = "application/x-ndjson"
AGREES_SECONDS: Final = 2.0
"""What runs now is told where nothing was decided yet for so long."""

Line = dict[str, Any]
_Timed = tuple[float, int, Line]
"""Monotonic time, place among what is of the same moment, line."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Whose record it is."""

    pod: str
    node: str = ""
    ray_node_type: str = ""


class FlightRecord:
    """Answers for `/trace`."""

    def __init__(
        self, recorder: Recorder, place: Place, *, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> None:
        """`clock`: that of the samples, monotonic."""
        self._recorder = recorder
        self._place = place
        self._clock = clock
        self._unix_clock = unix_clock
        self._encode = msgspec.json.Encoder().encode

    def pieces(self) -> Iterator[bytes]:
        """Yield the trace. Between two pieces any time may pass; what is overwritten meanwhile is left out."""
        kept, rings, now = self._recorder.snapshot(), self._recorder.rings(), self._clock()
        begin = _begin(kept, rings, now)
        cut = any(ring.first > 0 for ring in rings.values())
        behind = self._unix_clock() - now
        found = _few(kept, begin=begin, now=now, behind=behind, cut=cut, pod=self._place.pod)
        few = sorted((timed for timed in found if timed[0] >= begin), key=lambda timed: timed[:2])
        samples = (self._samples(uuid, ring) for uuid, ring in rings.items())
        waiting = [self._encode(self._header(kept, begin=behind + begin, sent=behind + now))]
        last, count = 0.0, 0
        for at, _, line in heapq.merge(few, *samples, key=lambda timed: timed[:2]):
            last = max(last, round(at - begin, 3))
            line["t"] = last
            waiting.append(self._encode(line))
            count += 1
            if len(waiting) >= PIECE_LINES:
                yield b"\n".join(waiting) + b"\n"
                waiting = []
        waiting.append(self._encode({"type": "end", "t": last, "lines": count}))
        yield b"\n".join(waiting) + b"\n"

    def _header(self, kept: Snapshot, *, begin: float, sent: float) -> Line:
        state, place = kept.state, self._place
        pod = {
            "name": place.pod,
            "node": place.node or None,
            "node_role": place.ray_node_type or None,
            "gpus_requested": state.gpus_requested,
            "memory_limit_bytes": state.host.memory_limit_bytes if state.host else None,
            "gpus": [
                {
                    "uuid": gpu.sample.uuid,
                    "index": gpu.sample.index,
                    "model": gpu.sample.model,
                    "memory_total_bytes": gpu.sample.memory_total_bytes,
                    "power_limit_watts": gpu.sample.power_limit_watts,
                }
                for gpu in state.gpus
            ],
        }
        return {
            "type": "header",
            "format": TRACE_FORMAT,
            "pods": [pod],
            "began_unix": round(begin, 3),
            "sent_unix": round(sent, 3),
        }

    def _samples(self, uuid: str, ring: GpuRing) -> Iterator[_Timed]:
        for kept in ring.samples():
            yield kept.at, 3, self._gpu(uuid, kept)

    def _gpu(self, uuid: str, kept: Kept) -> Line:
        reasons = None if kept.throttled is None else self._recorder.reasons(kept.throttled)
        return {
            "type": "gpu",
            "t": 0.0,
            "pod": self._place.pod,
            "uuid": uuid,
            "utilization": kept.utilization,
            "memory_used_bytes": kept.memory_used_bytes,
            "memory_peak_bytes": kept.memory_peak_bytes,
            "power_watts": kept.power_watts,
            "temperature_celsius": kept.temperature_celsius,
            "throttled": reasons,
        }


def _begin(kept: Snapshot, rings: dict[str, GpuRing], now: float) -> float:
    """Return when the trace begins: with the first sample of a GPU, or whatever else there is of a pod without."""
    samples = [at for ring in rings.values() if (at := ring.oldest_at()) is not None]
    other = [*(host.at for host in kept.host[:1]), *(event.at for event in kept.events[:1])]
    return min([now, *(samples or other)])


def _few(kept: Snapshot, *, begin: float, now: float, behind: float, cut: bool, pod: str) -> Iterator[_Timed]:
    """Yield all that is no sample of a GPU, from the begin of the trace on."""
    for at, step in kept.steps:
        yield at, 0, {"type": "step", "t": 0.0, "step": step}
    stays = [stay for stay in (*kept.stays, *_present(kept, now, behind)) if stay.end > begin]
    for at, line in marks(stays, cut=cut):
        yield max(at, begin), 1, {"type": "mark", "t": 0.0, "pod": pod, **line}
    for event in kept.events:
        yield event.at, 2, {"t": 0.0, "pod": pod, "uuid": event.uuid, **_event(event)}
    for host in kept.host:
        yield host.at, 2, {"type": "host", "t": 0.0, "pod": pod, **_host(host)}


def marks(stays: Iterable[Stay], *, cut: bool) -> Iterator[tuple[float, Line]]:
    """Yield begins and ends of stages; nothing at all where nobody ever told one.

    `cut`: what was before is not kept any more. Then there is a mark of whatever the record begins with, `other` too:
    without it, memory that the job holds would look like memory from before the job.
    """
    known = list(stays)
    if not any(stay.stage not in (OTHER, UNKNOWN) for stay in known):
        return
    told = False
    for number, stay in enumerate(known):
        if stay.stage not in (OTHER, UNKNOWN) or (told and stay.stage == UNKNOWN) or (cut and number == 0):
            told = True
            line = {"stage": stay.stage, "role": stay.role, "step": stay.step}
            yield stay.begin, {"state": "begin", **line}
            if number + 1 < len(known):
                yield stay.end, {"state": "end", **line}


def _present(kept: Snapshot, now: float, behind: float) -> Iterator[Stay]:
    """Yield what the time is in that is not decided yet, which is up to a minute: what runs now, since it began."""
    if not kept.stays:
        return
    last, found = kept.stays[-1], kept.state.stages.now
    if now - last.end <= AGREES_SECONDS:
        return
    if found is None:
        yield Stay(last.end, now, UNKNOWN, UNKNOWN, None)
        return
    since = last.end if found.since is None else max(last.end, found.since - behind)
    if since > last.end and (found.stage, found.role) != (last.stage, last.role):
        yield Stay(last.end, since, UNKNOWN, UNKNOWN, None)
    if (found.stage, found.role) != (last.stage, last.role):
        yield Stay(since, now, found.stage, found.role, found.step)


def _event(event: Xid | Failure) -> Line:
    if isinstance(event, Xid):
        return {"type": "xid", "code": event.code}
    return {"type": "nvml", "error": event.error}


def _host(host: HostKept) -> Line:
    return {
        "memory_used_bytes": host.memory_used_bytes,
        "memory_limit_bytes": host.memory_limit_bytes,
        "shm_used_bytes": host.shm_used_bytes,
        "shm_size_bytes": host.shm_size_bytes,
    }

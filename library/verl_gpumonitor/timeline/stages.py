# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Samples joined with stages: what each GPU of a pod spent in which stage. Pure: times come in.

What a GPU's counters rise by between two looks is a piece of time with load and energy in it. A piece waits until its
whole time is decided (`words`), is then split over the stages in it by their length, and counted. So each second is
counted once, whatever the sources say late, twice or never: the stages' sum is what the GPU's own counters rose by,
less what still waits. What was counted is never changed.

A reading of memory is of one moment, and of the stage of that moment. Of a peak whose reading was missed only the time
is known in which it was: it belongs to the stage that lasted for all of that, else to `unknown`.

Example: a second at load 0.5, of which 0.4 s were `gen` and 0.6 s `old_log_prob`, gives 0.2 and 0.3 busy seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.model.report import MAX_GPUS, MAX_STAGES, StageCount
from verl_gpumonitor.model.samples import GpuCounters

from .lines import Line, apart, line_of, lines_of
from .pieces import GpuPieces, Piece, Track
from .totals import OVERFLOW, Key, Share, Totals
from .words import POD, WATERMARK_SECONDS, Own, Part, Span, Voice, decided, jobs_in, narrowed

MAX_LANES: Final = 8
"""Ray jobs in one pod at a time that are told apart; more, and their work is taken as one's."""
_SAME_SECONDS: Final = 0.001


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What one Ray job did in the pod, of what was counted in one go."""

    pod: tuple[Part, ...]
    """What the pod as a whole was in for it, in order; `other` where it did nothing."""
    shares: tuple[Share, ...]


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in one go: for whoever makes steps of it."""

    until: float
    """All time before is decided and counted."""
    pod: tuple[Part, ...] = ()
    """What the pod as a whole was in, in order."""
    shares: tuple[Share, ...] = ()
    jobs: tuple[str, ...] = ()
    """Ray jobs that worked in this time; empty: work that no job is named for."""
    lanes: Mapping[str, Lane] = {}
    """By job, where there were several at a time."""


class StageTimeline:
    """The counters by stage of one pod's GPUs, and of the pod's own time. One thread uses it."""

    def __init__(self) -> None:
        self._gpus: dict[str, GpuPieces] = {}
        self._pod = Track()
        self._pod_totals: dict[Key, Totals] = {}

    def elapse(self, now: float, seconds: float) -> None:
        """Let so much of the pod's own time go by, up to this moment (Unix seconds)."""
        if seconds > 0.0:
            self._pod.append(Piece(now - seconds, now, observed=seconds))

    def observe(
        self,
        uuid: str,
        counters: GpuCounters,
        *,
        at: float,
        memory: Sequence[tuple[float, int]] = (),
        engine_bytes: int | None = None,
        own: Own = POD,
    ) -> None:
        """Take in what a GPU's counters have come to by `at`, the time of its newest sample.

        `memory`: the readings (time, bytes) since the last call, oldest first; those behind `at` may wait for the next
        one. More GPUs than a report can carry are not followed. `engine_bytes`: what a list of processes that was read
        at `at` says of a rollout engine's; None: none was read, or none of them is there.
        """
        gpu = self._gpus.get(uuid)
        if gpu is None:
            if len(self._gpus) >= MAX_GPUS:
                return
            gpu = self._gpus[uuid] = GpuPieces()
        gpu.own = own
        gpu.take_in(counters, at, memory, engine_bytes)

    def settle(self, voices: Sequence[Voice], *, now: float, patient: bool = True) -> Settled:
        """Count what is decided; `voices` best first. See `words.decided`."""
        too_many = max(track.surplus_until() for track in self._tracks())
        return self._settle(voices, now=now, patient=patient, old=max(now - WATERMARK_SECONDS, too_many))

    def finish(self, voices: Sequence[Voice], *, now: float) -> Settled:
        """Count all that waits, with what is known at this last moment."""
        ends = (piece.end for track in self._tracks() for piece in track.pending)
        # A moment later, for what has no length lies in no time that ends with it.
        return self._settle(voices, now=now, patient=False, old=max([now, *ends]) + _SAME_SECONDS)

    def gpu_counts(self, uuid: str) -> tuple[StageCount, ...]:
        """Return a GPU's counters by stage, in the order in which the stages were first seen."""
        gpu = self._gpus.get(uuid)
        return tuple(_count(key, totals) for key, totals in gpu.totals.items()) if gpu else ()

    def pod_seconds(self) -> dict[Key, float]:
        """Return the wall time of the pod by (job, stage, role), as far as it is counted."""
        return {key: totals.observed_seconds for key, totals in self._pod_totals.items()}

    def waiting(self, uuid: str) -> tuple[float, float, float]:
        """Return observed and busy seconds, and joules, of a GPU that wait for their stage."""
        pending = self._gpus[uuid].track.pending if uuid in self._gpus else ()
        return (
            sum(piece.observed for piece in pending),
            sum(piece.busy for piece in pending),
            sum(piece.energy or 0.0 for piece in pending),
        )

    def waiting_seconds(self) -> float:
        """Return the pod's own time that waits."""
        return sum(piece.observed for piece in self._pod.pending)

    def _tracks(self) -> list["Track"]:
        return [self._pod, *(gpu.track for gpu in self._gpus.values())]

    def _settle(self, voices: Sequence[Voice], *, now: float, patient: bool, old: float) -> Settled:
        begins = [track.begin for track in self._tracks() if track.pending]
        if not begins:
            return Settled(until=now)
        spans = decided(voices, min(begins), now=now, patient=patient, old=old)
        if not spans:
            return Settled(until=min(begins))
        until = spans[-1].end
        if not any(track.is_ready(until) for track in self._tracks()):
            return Settled(until=until)  # The last piece before it reaches beyond it, as mostly.
        spans = [narrowed(span) for span in spans]
        jobs = jobs_in(spans)
        if 1 < len(jobs) <= MAX_LANES:
            return self._settle_apart(spans, jobs, until)
        by_own: dict[Own, Line] = {}
        pod = self._settle_pod(line_of(by_own, spans, POD), until)
        shares: list[Share] = []
        for uuid, gpu in self._gpus.items():
            line = line_of(by_own, spans, gpu.own)
            for piece in gpu.track.ready(until):
                for share in line.split(piece, uuid):
                    _credit(gpu.totals, share)
                    shares.append(share)
        return Settled(until=until, pod=pod, shares=tuple(shares), jobs=jobs if len(jobs) <= 1 else ("",))

    def _settle_pod(self, line: "Line", until: float) -> tuple[Part, ...]:
        seen: list[Part] = []
        for piece in self._pod.ready(until):
            for share in line.split(piece, ""):
                _credit(self._pod_totals, share)
                seen.append(share.part)
        return tuple(seen)

    def _settle_apart(self, spans: list[Span], jobs: tuple[str, ...], until: float) -> Settled:
        """Count the time of a pod in which several Ray jobs work: each GPU's is shared out evenly among those that do.

        Which GPUs are whose is mostly not known, and with equal shares no second is counted twice.
        """
        by_own: dict[Own, Line] = {}
        pod: dict[str, list[Part]] = {job: [] for job in jobs}
        shares: dict[str, list[Share]] = {job: [] for job in jobs}
        lines = lines_of(by_own, spans, POD, jobs)
        for piece in self._pod.ready(until):
            for found in apart(lines, piece, "").values():
                for share in found:
                    _credit(self._pod_totals, share)
            for job, line in lines.items():
                pod[job].extend(share.part for share in line.split(piece, ""))
        for uuid, gpu in self._gpus.items():
            lines = lines_of(by_own, spans, gpu.own, jobs)
            for piece in gpu.track.ready(until):
                for job, found in apart(lines, piece, uuid).items():
                    for share in found:
                        _credit(gpu.totals, share)
                    shares[job].extend(found)
        return Settled(
            until=until,
            pod=tuple(pod[jobs[0]]),
            shares=tuple(share for found in shares.values() for share in found),
            jobs=jobs,
            lanes={job: Lane(pod=tuple(pod[job]), shares=tuple(shares[job])) for job in jobs},
        )


def _credit(totals: dict[Key, Totals], share: Share) -> None:
    """Count a share. The first stages have counters of their own, all others one together."""
    key = (share.part.job, share.part.stage, share.part.role)
    if key not in totals and len(totals) >= MAX_STAGES - 1:
        key = OVERFLOW
    found = totals.get(key)
    if found is None:
        found = totals[key] = Totals()
    found.take(share)


def _count(key: Key, totals: Totals) -> StageCount:
    job, stage, role = key
    return StageCount(
        stage,
        role,
        totals.observed_seconds,
        totals.busy_seconds,
        totals.energy_joules,
        totals.memory_peak_bytes,
        totals.memory_floor_bytes,
        job,
    )

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Samples of one GPU, added up: busy and observed seconds, energy, memory peaks, Xids. State and sample in, state out.

A sample is told apart by its times, so that the same one counts once however often it is handed in, and the two rates
(memory at 2 Hz, the rest at 1 Hz) can share one function. NVML's utilisation describes the period before the reading,
therefore a sample covers the time since the one before it. Example: utilisation 0.5 at t=0, 0.8 at t=1 and 0.2 at t=2
are 2 observed seconds and 1.0 busy ones.
"""

from typing import Final

import msgspec

from verl_gpumonitor.model.samples import GpuCounters, GpuSample
from verl_gpumonitor.model.vocabulary import held_down

RECENT_SECONDS: Final = 60.0
_BUCKET_SECONDS: Final = 5.0
"""The recent peak is kept by buckets of so many seconds: it reaches back 60 to 65 s, in at most 14 numbers."""
MEMORY_READINGS: Final = 8
"""Readings of memory that are kept: of 4 s, so that a look that comes late misses none."""
_MAX_GAP_INTERVALS: Final = 3.0
_MAX_WATTS: Final = 5000.0
"""An energy counter that rises faster than this jumped, and is taken as a new beginning."""


class GpuAccumulator(msgspec.Struct, frozen=True, kw_only=True):
    """What has added up so far, and what is needed to add the next sample."""

    counters: GpuCounters = GpuCounters()
    taken_at: float | None = None
    """Time of the newest sample that was added."""
    memory_taken_at: float | None = None
    energy_reading_joules: float | None = None
    """The GPU's own counter when it was last known; once seen, power is no longer integrated."""
    energy_read_at: float | None = None
    peaks: tuple[tuple[int, int], ...] = ()
    """(bucket number, highest memory in it), oldest first."""


def add_sample(before: GpuAccumulator, sample: GpuSample, *, interval_seconds: float) -> GpuAccumulator:
    """Add what is new in `sample`. One that is not newer than the last, or of a GPU that does not answer, adds nothing.

    `interval_seconds`: the usual time between two samples. A longer break than three of them is a gap, of which the
    sample covers one interval.
    """
    new = sample.taken_at is not None and (before.taken_at is None or sample.taken_at > before.taken_at)
    if not new:
        return _add_memory(before, sample)
    covered = _covered_seconds(before.taken_at, sample.taken_at or 0.0, interval_seconds)
    return _add_memory(_add_all(before, sample, covered), sample)


def add_xid(before: GpuAccumulator, code: int, *, at: float) -> GpuAccumulator:
    """Count one Xid event. The same code twice counts two."""
    counters = before.counters
    errors = {**counters.xid_errors, code: counters.xid_errors.get(code, 0) + 1}
    last = {**counters.xid_last_at, code: at}
    return msgspec.structs.replace(
        before, counters=msgspec.structs.replace(counters, xid_errors=errors, xid_last_at=last)
    )


def _covered_seconds(before: float | None, now: float, interval: float) -> float:
    """Return the time that a sample stands for. The first one stands for none: nobody knows what was before."""
    if before is None:
        return 0.0
    elapsed = now - before
    return elapsed if elapsed <= _MAX_GAP_INTERVALS * interval else interval


def _add_all(state: GpuAccumulator, sample: GpuSample, covered: float) -> GpuAccumulator:
    """Add load and energy. One new value each, not one a field: this runs for each GPU at each sample."""
    counters, utilization = state.counters, sample.utilization
    loaded = utilization is not None and covered > 0.0
    reading_known = sample.energy_joules is not None
    return GpuAccumulator(
        counters=GpuCounters(
            observed_seconds=counters.observed_seconds + (covered if loaded else 0.0),
            busy_seconds=counters.busy_seconds + (covered * (utilization or 0.0) if loaded else 0.0),
            throttled_seconds=_throttled(counters.throttled_seconds, sample, covered if loaded else 0.0),
            energy_joules=_energy(state, sample, covered),
            memory_peak_bytes=counters.memory_peak_bytes,
            memory_recent_peak_bytes=counters.memory_recent_peak_bytes,
            memory_readings=counters.memory_readings,
            xid_errors=counters.xid_errors,
            xid_last_at=counters.xid_last_at,
        ),
        taken_at=sample.taken_at,
        memory_taken_at=state.memory_taken_at,
        energy_reading_joules=sample.energy_joules if reading_known else state.energy_reading_joules,
        energy_read_at=sample.taken_at if reading_known else state.energy_read_at,
        peaks=state.peaks,
    )


def _throttled(total: float | None, sample: GpuSample, observed: float) -> float | None:
    """Add the time that a sample stands for, if the clocks are held down in it."""
    if sample.throttled is None:
        return total
    return (total or 0.0) + (observed if held_down(sample.throttled) else 0.0)


def _energy(state: GpuAccumulator, sample: GpuSample, covered: float) -> float | None:
    """Add the rise of the GPU's own counter, gaps included, since it ran on; else power times the covered time."""
    total = state.counters.energy_joules
    if sample.energy_joules is not None:
        return (total or 0.0) + _energy_rise(state, sample.energy_joules, sample.taken_at)
    if state.energy_reading_joules is None and sample.power_watts is not None:
        return (total or 0.0) + sample.power_watts * covered
    return total


def _energy_rise(state: GpuAccumulator, reading: float, at: float | None) -> float:
    """Return joules since the last reading; none when the counter fell (a reset) or jumped."""
    if state.energy_reading_joules is None or state.energy_read_at is None or at is None:
        return 0.0
    rise = reading - state.energy_reading_joules
    possible = _MAX_WATTS * (at - state.energy_read_at)
    return rise if 0.0 <= rise <= possible else 0.0


def _add_memory(state: GpuAccumulator, sample: GpuSample) -> GpuAccumulator:
    at, used = sample.memory_taken_at, sample.memory_used_bytes
    if at is None or used is None or (state.memory_taken_at is not None and at <= state.memory_taken_at):
        return state
    counters, peaks = state.counters, state.peaks
    bucket = int(at // _BUCKET_SECONDS)
    highest, recent = counters.memory_peak_bytes, counters.memory_recent_peak_bytes
    if not (peaks and peaks[-1][0] == bucket and used <= peaks[-1][1]):  # Else no new peak: the usual case.
        peaks = _add_peak(peaks, bucket, used)
        highest, recent = max(used, highest or 0), max(peak for _, peak in peaks)
    counters = msgspec.structs.replace(
        counters,
        memory_peak_bytes=highest,
        memory_recent_peak_bytes=recent,
        memory_readings=(*counters.memory_readings[1 - MEMORY_READINGS :], (at, used)),
    )
    return msgspec.structs.replace(state, counters=counters, memory_taken_at=at, peaks=peaks)


def _add_peak(peaks: tuple[tuple[int, int], ...], bucket: int, used: int) -> tuple[tuple[int, int], ...]:
    """Return the buckets with this value in, and without those that are older than the recent time."""
    oldest = bucket - int(RECENT_SECONDS / _BUCKET_SECONDS)
    kept = tuple(peak for peak in peaks if peak[0] >= oldest)
    if kept and kept[-1][0] == bucket:
        return (*kept[:-1], (bucket, max(used, kept[-1][1])))
    return (*kept, (bucket, used))

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Thresholds of all rules, typed and with their reasons. Ratios and seconds, so that none depends on a GPU's size.

Each group belongs to one rule; what a rule does with them is in its own file.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .hysteresis import Holds

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=604800.0)]
Steps = Annotated[int, Meta(ge=1, le=24)]
Factor = Annotated[float, Meta(ge=0.0, le=1000.0)]


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


class _Held(_Group, frozen=True):
    raise_seconds: Seconds = 30.0
    """It is raised when it has held for so long."""
    clear_seconds: Seconds = 60.0
    """It is over when it has been away for so long."""

    @property
    def hold(self) -> Holds:
        """The two as the state machine takes them."""
        return Holds(raise_seconds=self.raise_seconds, clear_seconds=self.clear_seconds)


class OomRisk(_Group, frozen=True):
    """GPU memory is likely to run out in a named stage."""

    full_ratio: Share = 0.995
    """Here an allocation fails: the driver and the context keep the rest."""
    near_ratio: Share = 0.965
    """A training stage whose peak comes here in two steps has less left than one longer batch may take."""
    critical_ratio: Share = 0.985
    """The next step is likely to fail."""
    rising_from_ratio: Share = 0.85
    """A rise below this is growth, not yet a risk."""
    rising_steps: Steps = 5
    """Steps that show a rise; fewer are noise."""
    rising_correlation: Share = 0.9
    rising_least: Share = 0.02
    """The rise over these steps, as a share of the GPU's memory."""
    steps_left: Steps = 10
    """It is a risk when the line through the peaks meets the end within so many steps, and no farther ahead than it
    has been seen."""
    beside_peers: Share = 0.15
    """A GPU so much above the median of its pool..."""
    beside_peers_ratio: Share = 0.93
    """... and above this is the first to fail."""
    resume_above_gen: Share = 0.015
    """While the rollout resumes, trained and served weights share the GPU. Memory above what the rollout itself takes
    by so much is a window's, not the engine's own reservation."""
    spike_above_gen: Share = 0.025
    """A peak in generation so much above what its samples find is a moment's, such as the resume inside it."""
    trainer_near_ratio: Share = 0.985
    """The same as `near_ratio` where no stage is known: an allocator that caches fills a GPU without harm."""
    safe_ratio: Share = 0.92
    """What advice aims at."""


class MemoryGrowth(_Group, frozen=True):
    """A stage's memory grows step by step."""

    steps: Steps = 8
    """So many steps in a row must show it."""
    least: Share = 0.0125
    """Rise over these steps, as a share of the GPU's memory, where at least half the stages show it."""
    least_alone: Share = 0.04
    """The same where one stage alone shows it: growing answers, not a leak."""
    correlation: Share = 0.93
    late_share: Share = 0.3
    """So much of the rise must lie in the second half: what fills up at the start and stays is no growth."""


class RolloutMemory(_Group, frozen=True):
    """The rollout engine sleeps and keeps its memory."""

    kept_of_engine: Share = 0.35
    """Share of what it has while it generates. Graphs, contexts and buffers stay, some GiB."""
    kept_of_gpu: Share = 0.10
    """And as a share of the GPU."""
    freed_of_reserved: Share = 0.5
    """Where no process is listed: sleep frees at least so much of what `gpu_memory_utilization` reserves."""
    steps: Steps = 2


class Leftover(_Group, frozen=True):
    """Memory is held before the job's first process."""

    least_ratio: Share = 0.02
    least_bytes: Annotated[int, Meta(ge=0)] = 3 * 2**29
    """Both: the driver's own part is below."""
    flat_ratio: Share = 0.01
    """It may change by so much of the GPU; a process that loads changes more."""
    seconds: Seconds = 8.0


class Foreign(_Held, frozen=True):
    """Somebody else's context on a GPU."""

    raise_seconds: Seconds = 30.0
    least_bytes: Annotated[int, Meta(ge=0)] = 100 * 2**20
    """A CUDA context takes 300 to 900 MiB."""
    context_bytes: Annotated[int, Meta(ge=0)] = 2 * 2**30
    """No context takes more: 900 MiB, and as much again for buffers of communicators and workspaces of libraries. A
    process that has more than this on three GPUs or more works on all of them."""
    home_factor: Factor = 2.0
    """A process is at home on another GPU where it holds so much more."""


class HostMemory(_Held, frozen=True):
    """The pod's host memory is likely to reach its limit."""

    raise_seconds: Seconds = 20.0
    near_ratio: Share = 0.95
    critical_ratio: Share = 0.97
    rising_from_ratio: Share = 0.85
    rising_minutes: Annotated[int, Meta(ge=3, le=30)] = 8
    """So many minutes, each by its highest value, must show a rise."""
    correlation: Share = 0.9
    seconds_left: Seconds = 1200.0
    """It is a risk when the rise meets the limit within this."""
    cache_ratio: Share = 0.75
    """Where processes and /dev/shm hold less than this of what is in use, and once held more, the rest is file cache,
    which the kernel drops."""
    fast_from_ratio: Share = 0.92
    fast_seconds_left: Seconds = 120.0
    """From there on, what rises so fast that it is full within this is a risk without a longer look."""


class SharedMemory(_Held, frozen=True):
    """Shared memory is likely to run out."""

    raise_seconds: Seconds = 10.0
    near_ratio: Share = 0.93
    small_near_ratio: Share = 0.85
    """The same for a /dev/shm that was not made for a job."""
    rising_from_ratio: Share = 0.88
    small_rising_from_ratio: Share = 0.70
    rising_minutes: Annotated[int, Meta(ge=3, le=30)] = 4
    seconds_left: Seconds = 600.0
    correlation: Share = 0.9


class Imbalance(_Group, frozen=True):
    """GPUs of one pool and stage differ."""

    memory_difference: Share = 0.18
    """Distance of a stage's peak from the pool's median, as a share of the GPU's memory."""
    pipeline_memory_difference: Share = 0.40
    """The same under pipeline parallelism, whose last and first stages hold more, as they must."""
    utilization_difference: Share = 0.35
    utilization_busy: Share = 0.5
    """The busiest GPU of the pool must reach this, else nobody waits for anybody."""
    time_factor: Factor = 1.4
    """A rank takes so much longer for a stage than the median rank..."""
    time_seconds: Seconds = 8.0
    """... and at least by this."""
    steps: Steps = 3
    """The same GPUs must be odd in so many steps in a row..."""
    gen_steps: Steps = 5
    """... and in so many rollouts: long answers fall on some GPU each time, by chance also on the same."""


class Throttling(_Group, frozen=True):
    """Clocks are held down by heat or a power brake."""

    ratio: Share = 0.3
    """Share of a stage's time."""
    seconds: Seconds = 8.0
    """And at least so long in one stage."""
    steps: Steps = 2
    """In so many of the last `steps` + 1 steps."""
    live_seconds: Seconds = 180.0
    """Or so long in a stage that still runs."""


class LowUtilization(_Group, frozen=True):
    """A stage wastes GPU time over whole steps."""

    steps: Steps = 3
    """In so many steps in a row; the first, which compiles, does not count."""
    share_of_step: Share = 0.2
    """The stage takes at least so much of the step."""
    seconds: Seconds = 20.0
    gen_idle: Share = 0.4
    """Part of generation in which no GPU of the pool does anything."""
    gen_utilization: Share = 0.3
    """Mean load of a whole generation, its tail included: tools, prefill and long tails leave a healthy one above."""
    training_utilization: Share = 0.35
    pause_share: Share = 0.4
    """Part of the step in which no stage runs: reward, data or the driver keeps the GPUs waiting."""
    window_utilization: Share = 0.35
    """Where no stage is told: mean of a window..."""
    windows: Steps = 5
    """... in so many windows in a row."""


class Hang(_Group, frozen=True):
    """The job makes no progress."""

    spin_seconds: Seconds = 180.0
    """Kernels are resident all the time at a power that real work in this stage does not have (`History.spins`)."""
    idle_seconds: Seconds = 300.0
    """All stand still in a stage that computes, and in generation for three times as long as they ever did there and
    then went on: it may wait for tools or rewards."""
    untold_idle_seconds: Seconds = 900.0
    """All stand still where no stage is told: it may be a checkpoint or an evaluation."""
    between_seconds: Seconds = 900.0
    """All stand still between two stages: the driver computes, or saves, or ends."""
    pause_seconds: Seconds = 2700.0
    """All stand still while they load or save."""
    pause_spin_seconds: Seconds = 600.0
    """All spin while they load, save or send weights."""
    longer_than_usual: Factor = 1.25
    """A training stage must last so much longer than the longest before."""
    gen_longer_than_usual: Factor = 2.0


class Faults(_Group, frozen=True):
    """Xids and lost GPUs."""

    hardware_seconds: Seconds = 1800.0
    """An Xid that does not come again is forgotten after this."""
    application_seconds: Seconds = 600.0
    aftermath_seconds: Seconds = 120.0
    """What the driver cleans up within this after a fault is its consequence; the same fault on several GPUs of a pod
    within this is one."""


class Telemetry(_Held, frozen=True):
    """What cannot be seen."""

    raise_seconds: Seconds = 20.0
    clear_seconds: Seconds = 20.0
    silent_seconds: Seconds = 100.0
    """No line of a pod or a GPU for so long, while others came."""
    unreadable_seconds: Seconds = 45.0
    """Lines come, and a value is not in them."""
    stages_silent_seconds: Seconds = 1800.0
    """Nobody tells stages for so long, and for eight steps, while GPUs work."""
    never_seconds: Seconds = 180.0
    """A pod that runs has never been heard."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Thresholds of all rules."""

    oom_risk: OomRisk = OomRisk()
    memory_growth: MemoryGrowth = MemoryGrowth()
    rollout_memory: RolloutMemory = RolloutMemory()
    leftover: Leftover = Leftover()
    foreign: Foreign = Foreign()
    host_memory: HostMemory = HostMemory()
    shared_memory: SharedMemory = SharedMemory()
    imbalance: Imbalance = Imbalance()
    throttling: Throttling = Throttling()
    low_utilization: LowUtilization = LowUtilization()
    hang: Hang = Hang()
    faults: Faults = Faults()
    telemetry: Telemetry = Telemetry()

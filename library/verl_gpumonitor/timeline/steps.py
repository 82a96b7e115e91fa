# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Training steps of one pod, recognised from the order of its stages, and what each of its GPUs did in them. Pure.

verl's step is gen, [reward], old_log_prob, [ref], [values], adv, [update_critic], update_actor, update_weights. A step
ends where, after an update, a stage of that first half begins again: `gen` where the pod generates, the first stage of
its cycle where it only trains. Validation and checkpoints lie within steps and make none. A pod that only generates
goes by the weights it is given. Where marks carry verl's own number, the number decides alone.

The job's last step ends with its update, once the pod has been idle for a while. Where models are set up anew, the job
was begun again in the same pods: what ran was its last step, or is none, broken off. No cycle, no steps: a job that
only fine-tunes has none, unless its marks say so.
"""

from collections import deque
from typing import Final

import msgspec

from verl_gpumonitor.model.report import MAX_STAGES
from verl_gpumonitor.model.vocabulary import UNKNOWN

from .stages import Settled
from .totals import OVERFLOW, Share, Totals
from .words import Part

FIRST_HALF: Final = frozenset({"gen", "reward", "old_log_prob", "ref", "values", "adv"})
UPDATES: Final = frozenset({"update_actor", "update_critic"})
IDLE: Final = frozenset({"other", "unknown"})
INIT: Final = "init"
RESTS: Final = IDLE | {INIT}
"""Stages in which nothing is done for a step."""
MIN_FIRST_HALF_SECONDS: Final = 0.3
"""So long must the first half last to be one: between two updates a generating server may shine through."""
IDLE_SECONDS: Final = 30.0
"""Idleness after an update that lasts so long ended the step when it began: the job's last, or a pool that waits."""
INIT_SECONDS: Final = 10.0
"""A set-up that lasts so long is a job's begin; calls of an instant have the same stage at any time."""
GRACE_SECONDS: Final = 6.0
"""A step is closed so long after its end: the samples of its last seconds come behind, each 5 s from Ray's agent."""
MAX_KEPT: Final = 32
"""Steps that are kept for a controller that does not answer."""
MAX_OPEN: Final = 16
"""Steps that wait for their last samples. So many in `GRACE_SECONDS` come only of a broken source."""
_NUMBERLESS_CYCLES: Final = 2
"""So many cycles without a number after one that had some, and the cycle decides again."""


class StepStageSums(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one step."""

    stage: str
    role: str
    begin: float
    seconds: float
    """Wall time of the pod in it, all pieces together."""
    gpus: dict[str, Totals]
    """By UUID."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One whole step of the pod."""

    number: int
    """Counts from 1."""
    step: int | None
    """verl's own number, where marks say it."""
    begin: float
    end: float
    job: str
    stages: tuple[StepStageSums, ...]
    """In the order in which they began."""


class _Stage:
    """What adds up for one stage of an open step."""

    __slots__ = ("begin", "gpus", "seconds")

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.seconds = 0.0
        self.gpus: dict[str, Totals] = {}

    def join(self, other: "_Stage") -> None:
        self.begin = min(self.begin, other.begin)
        self.seconds += other.seconds
        for uuid, totals in other.gpus.items():
            self.gpus.setdefault(uuid, Totals()).join(totals)


class _Open:
    """A time that is not closed yet: a step, or a gap between two of them."""

    def __init__(self, part: Part, *, gap: bool = False, whole: bool = False, tentative: bool = False) -> None:
        self.begin = part.begin
        self.end: float | None = None
        """None while it runs."""
        self.gap = gap
        self.whole = whole
        """Its beginning was seen."""
        self.tentative = tentative
        """It may yet turn out to go on with the one before it."""
        self.number: int | None = None
        self.step = part.step
        self.job = part.job
        self.generated = False
        self.updated = False
        """The cycle has come so far that the next first half is another step's."""
        self.until = part.begin
        """How far it has come."""
        self.updating = False
        """Whether an update runs."""
        self.idle = False
        """Whether it has come to its end and nothing runs."""
        self.seconds = 0.0
        """How long a tentative one has lasted in that which made it."""
        self.init_seconds = 0.0
        """How much of a gap was set-up."""
        self.cycles_passed_over = 0
        self.stages: dict[tuple[str, str], _Stage] = {}

    def stage(self, part: Part) -> _Stage:
        """Return the sums of a stage; of those past the bound, common ones."""
        key = (part.stage, part.role)
        if key not in self.stages and len(self.stages) >= MAX_STAGES - 1:
            key = OVERFLOW[1:]
        return self.stages.setdefault(key, _Stage(part.begin))

    def note(self, part: Part) -> None:
        """Go on by a part of the pod's time."""
        length = part.end - part.begin
        self.stage(part).seconds += length
        self.step = part.step if self.step is None else self.step
        self.job = self.job or part.job
        self.generated = self.generated or part.stage == "gen"
        weights = part.stage == "update_weights" and self.generated
        self.updated = self.updated or part.stage in UPDATES or weights
        if part.stage in (RESTS if self.gap else FIRST_HALF):
            self.seconds += length
        if part.stage == INIT and self.gap:
            self.init_seconds += length
        self.idle = part.stage in IDLE and part.step is None
        self.updating = part.stage in UPDATES
        self.until = part.end

    def join(self, later: "_Open") -> None:
        """Take in the one that follows, which turned out to be none of its own."""
        self.step = later.step if self.step is None else self.step
        for (stage, role), sums in later.stages.items():
            self.stage(Part(sums.begin, sums.begin, stage, role)).join(sums)
        self.until, self.idle, self.updating = max(self.until, later.until), later.idle, later.updating

    @property
    def lasts(self) -> bool:
        """Whether a tentative one has lasted so long that it is one of its own."""
        if not self.gap:
            return self.seconds >= MIN_FIRST_HALF_SECONDS
        return self.seconds >= IDLE_SECONDS or self.init_seconds >= INIT_SECONDS


class Steps:
    """Makes steps of what the timeline settles."""

    def __init__(self, *, known_before: bool = False) -> None:
        self._open: deque[_Open] = deque()
        """By begin; the last one runs."""
        self._known_before = known_before
        """Whether anything was known of the pod before: what is first seen in its middle is no whole step."""
        self._kept: deque[Step] = deque(maxlen=MAX_KEPT)
        self._always_weights = False
        """All steps so far went on to hand out their weights: one that did not is none yet."""
        self._last_step: int | None = None
        """verl's number of the last step that ended."""
        self.ended = 0
        """Whole steps that ended, those included whose last samples are still to come."""

    @property
    def running(self) -> int | None:
        """Number of the step that runs, or of the last one that ended; verl's own where marks say it."""
        for each in reversed(self._open):
            if each.step is not None:
                return each.step
            if not each.gap and not each.tentative and each.whole:
                return each.number or self.ended + 1
        return self.ended or None

    @property
    def kept(self) -> tuple[Step, ...]:
        """Closed steps that were not forgotten yet, oldest first."""
        return tuple(self._kept)

    def forget(self, number: int) -> None:
        """Let go of the steps up to this one: they arrived."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()

    def take(self, settled: Settled) -> None:
        """Take in what the timeline has counted."""
        for part in settled.pod:
            self._see(part)
        for share in settled.shares:
            self._credit(share)
        self._close(settled.until)

    def finish(self) -> None:
        """Close what is open, at the end of the pod: a step that came to its update is whole."""
        if self._open and self._open[-1].tentative and not self._open[-1].gap:
            self._merge()
        last = self._open[-1] if self._open else None
        if last is not None and last.gap and last.tentative:
            self._confirm()
        elif last is not None and last.end is None and self._came_to_its_end(last):
            self._end(last, last.until)
        self._close(float("inf"))

    def _came_to_its_end(self, last: _Open) -> bool:
        """Say whether the step that runs at the end of the job was whole, and not broken off in its update."""
        if last.updating and self._always_weights:
            return False
        return last.updated or (last.idle and last.step is not None)

    def _see(self, part: Part) -> None:
        """Go on with the pod's own stages."""
        last = self._open[-1] if self._open else None
        if last is not None and last.tentative and self._refutes(part, last):
            last = self._merge()
        opened = self._opened(part, last)
        if opened is not None:
            if last is not None and last.tentative:
                self._merge()  # It ends before it could last.
            self._open.append(opened)
            last = opened
        if last is not None:
            last.note(part)
            if last.tentative and last.lasts:
                self._confirm()
        if opened is not None and not opened.tentative:
            self._confirm()
        self._known_before = self._known_before or part.stage != UNKNOWN

    @staticmethod
    def _refutes(part: Part, last: _Open) -> bool:
        """Say whether this part shows that what seemed to be new goes on with what was before."""
        if last.gap:
            return part.stage not in RESTS or part.step is not None
        return part.stage in UPDATES or part.stage == "update_weights"

    def _opened(self, part: Part, last: _Open | None) -> _Open | None:
        """Return the step or gap that begins with this part; None when it goes on with the last one."""
        if last is None or (last.gap and not last.tentative):
            begins = part.stage in FIRST_HALF if part.step is None else part.step != self._last_step
            if not begins:
                return None
            return _Open(part, whole=part.begun or self._known_before)
        if part.step is not None and last.step is not None:
            return _Open(part, whole=True) if _is_another(part, last) else None
        if last.updated and part.stage in FIRST_HALF:
            return self._turned(part, last)
        rests = part.stage == INIT or (last.updated and part.stage in IDLE)
        if (
            rests
            and not (last.gap or last.tentative)
            and part.step is None
            and (last.step is None or part.stage in IDLE)
        ):
            return _Open(part, gap=True, tentative=True)
        return None

    @staticmethod
    def _turned(part: Part, last: _Open) -> _Open | None:
        """The cycle begins anew. Where numbers decide, that counts only once they have stopped for good."""
        if last.step is None:
            return _Open(part, whole=True, tentative=part.step is None)
        last.cycles_passed_over += 1
        last.updated = False
        return _Open(part, whole=True) if last.cycles_passed_over >= _NUMBERLESS_CYCLES else None

    def _merge(self) -> _Open:
        """Join the last one, a tentative one, with the one before it."""
        tentative = self._open.pop()
        before = self._open[-1]
        before.join(tentative)
        return before

    def _confirm(self) -> None:
        """The last one is one of its own: the one before it has ended."""
        last = self._open[-1]
        last.tentative = False
        if len(self._open) > 1 and self._open[-2].end is None:
            before = self._open[-2]
            before.whole = before.whole and (last.init_seconds <= 0.0 or self._came_to_its_end(before))
            self._end(before, last.begin)

    def _end(self, step: _Open, end: float) -> None:
        step.end = end
        if step.whole and not step.gap:
            weights = any(stage == "update_weights" for stage, _ in step.stages)
            self._always_weights = weights and (self._always_weights or self.ended == 0)
            self.ended += 1
            step.number = self.ended
            self._last_step = step.step

    def _credit(self, share: Share) -> None:
        """Add what a GPU did to the step it did it in."""
        middle = (share.part.begin + share.part.end) / 2
        for step in reversed(self._open):
            if step.begin <= middle:
                sums = step.stage(share.part)
                sums.gpus.setdefault(share.uuid, Totals()).take(share)
                return

    def _close(self, until: float) -> None:
        """Close those whose last samples must be in."""
        while self._open and (end := self._open[0].end) is not None:
            if end + GRACE_SECONDS > until and len(self._open) <= MAX_OPEN:
                return
            closed = self._open.popleft()
            if closed.number is not None:
                self._kept.append(_closed(closed, closed.number, end))


def _is_another(part: Part, last: _Open) -> bool:
    """Say whether a number is another step's.

    A lower one counts only where a first half begins by it: a job that went back to a checkpoint, and not a straggler
    of the step before.
    """
    if part.step is None or last.step is None or part.step == last.step:
        return False
    return part.step > last.step or (part.begun and part.stage in FIRST_HALF and part.begin > last.begin)


def _closed(step: _Open, number: int, end: float) -> Step:
    stages = sorted(step.stages.items(), key=lambda item: item[1].begin)
    return Step(
        number=number,
        step=step.step,
        begin=step.begin,
        end=end,
        job=step.job,
        stages=tuple(
            StepStageSums(stage=stage, role=role, begin=sums.begin, seconds=_wall(sums), gpus=sums.gpus)
            for (stage, role), sums in stages
        ),
    )


def _wall(sums: _Stage) -> float:
    """Return the pod's own time in a stage, or the longest of its GPUs' where the pod as a whole was in another."""
    return sums.seconds or max((totals.observed_seconds for totals in sums.gpus.values()), default=0.0)

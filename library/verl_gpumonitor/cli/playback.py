# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A recorded run as it went by: GPUs, stage, step, and findings as they were raised and resolved. Pure.

The diagnosis is fed line by line, so that at each moment it knows what it would have known then, and no more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from verl_gpumonitor.advice import advise
from verl_gpumonitor.advice.present import context_at
from verl_gpumonitor.diagnosis.doctor import Diagnosis
from verl_gpumonitor.diagnosis.history import GpuHistory
from verl_gpumonitor.model.findings import TrackedFinding
from verl_gpumonitor.model.samples import GpuProcess, GpuSample
from verl_gpumonitor.model.trace import GpuLine, Header, JobLine, Record
from verl_gpumonitor.model.vocabulary import UNKNOWN, GpuState

from .view import History

LOOK_SECONDS: Final = 1.0
"""Findings and the stage are looked at so often, in the run's own time."""
_LOST: Final = ("GPU_IS_LOST", "NOT_FOUND", "GPU_NOT_FOUND")

_Problem = tuple[str, float, str | None]


class Change(NamedTuple):
    """Something that a person who looks on would notice."""

    t: float
    kind: str
    """`stage`, `step`, `job`, `raised` or `resolved`."""
    text: str
    finding: TrackedFinding | None = None


class Playback:
    """Takes the lines of a run in order, and shows the run at the moment of the last one."""

    def __init__(self, header: Header) -> None:
        """Begin before the first line."""
        self.header = header
        self.diagnosis = Diagnosis(header)
        self.loads = History()
        self.titles: dict[int, str] = {}
        """Processes on GPUs, by the titles that they had last."""
        self.findings: list[TrackedFinding] = []
        """What is open."""
        self.stage = ""
        self._processes: dict[str, tuple[GpuProcess, ...]] = {}
        self._looked_t = float("-inf")
        self._step = 0
        self._phase: str | None = None
        self._open: Counter[_Problem] = Counter()

    @property
    def t(self) -> float:
        """The moment that is shown."""
        return self.diagnosis.history.t

    @property
    def step(self) -> int:
        """Number of the step that runs, counted from 1; the first may have begun before the record."""
        return self.diagnosis.history.step + 1

    def feed(self, record: Record) -> list[Change]:
        """Take the next line; say what changed by it."""
        self.diagnosis.feed(record)
        if isinstance(record, GpuLine):
            self._sample(record)
        changes = self._job(record) if isinstance(record, JobLine) else []
        if self.diagnosis.history.step != self._step or record.t - self._looked_t >= LOOK_SECONDS or changes:
            changes += self.look()
        return changes

    def look(self) -> list[Change]:
        """Say what changed since the last look."""
        self._looked_t = self.t
        return [*self._new_step(), *self._new_stage(), *self._new_findings()]

    def gpus(self) -> list[GpuSample]:
        """Return all GPUs as they are now, by pod and index."""
        pods = list(self.diagnosis.history.pods)
        ordered = sorted(
            self.diagnosis.history.gpus.values(),
            key=lambda gpu: (pods.index(gpu.pod.name), gpu.index is None, gpu.index or 0, gpu.uuid),
        )
        return [self._shown(gpu) for gpu in ordered]

    def names(self) -> Mapping[str, str]:
        """Return what each GPU is called where there are several pods: `worker-a/3`; empty for one pod."""
        pods = {gpu.pod.name for gpu in self.diagnosis.history.gpus.values()}
        if len(pods) < 2:
            return {}
        return {
            gpu.uuid: f"{gpu.pod.name[-12:]}/{'?' if gpu.index is None else gpu.index}"
            for gpu in self.diagnosis.history.gpus.values()
        }

    def stages(self) -> Mapping[str, str]:
        """Return what each GPU does: `update_actor (actor)`; nothing for one of which it is not known."""
        return {gpu.uuid: _stage(gpu) for gpu in self.diagnosis.history.gpus.values()}

    def advised(self, tracked: TrackedFinding) -> TrackedFinding:
        """Return a finding with what could be changed about it, as is known now."""
        context = context_at(self.diagnosis, {one.finding.reason for one in self.findings})
        finding = msgspec.structs.replace(tracked.finding, advice=advise(tracked.finding, context))
        return msgspec.structs.replace(tracked, finding=finding)

    def _sample(self, line: GpuLine) -> None:
        self.loads.add([GpuSample(uuid=line.uuid, utilization=line.utilization)])
        if line.processes is None:
            return
        self._processes[line.uuid] = tuple(
            GpuProcess(pid=one.pid, memory_used_bytes=_whole(one.memory_used_bytes)) for one in line.processes
        )
        self.titles.update({one.pid: one.title for one in line.processes if one.title is not None})
        if len(self.titles) > 4096:
            self.titles.clear()

    def _shown(self, gpu: GpuHistory) -> GpuSample:
        line, pod = gpu.last, gpu.pod
        error = gpu.error or pod.library_error
        state = GpuState.OK if error is None else GpuState.LOST if error in _LOST else GpuState.ERROR
        if line is None or state is not GpuState.OK:
            return GpuSample(uuid=gpu.uuid, index=gpu.index, model=gpu.model, state=state, error=error)
        return GpuSample(
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            utilization=line.utilization,
            memory_used_bytes=_whole(line.memory_used_bytes),
            memory_total_bytes=_whole(gpu.total_bytes),
            power_watts=None if line.power_watts is None else float(line.power_watts),
            power_limit_watts=None if gpu.power_limit_watts is None else float(gpu.power_limit_watts),
            temperature_celsius=line.temperature_celsius,
            throttled=None if line.throttled is None else tuple(line.throttled),
            processes=self._processes.get(gpu.uuid),
        )

    def _job(self, line: JobLine) -> list[Change]:
        if line.phase is None or line.phase == self._phase:
            return []
        self._phase = line.phase
        return [Change(line.t, "job", f"{line.phase}{f': {line.message}' if line.message else ''}")]

    def _new_step(self) -> list[Change]:
        before, self._step = self._step, self.diagnosis.history.step
        if before == self._step or not (self.diagnosis.history.step_ends or self.diagnosis.history.stages_told):
            return []  # Where nobody tells steps the history counts stretches of time, which are none.
        seconds = self.diagnosis.history.step_seconds
        took = f" after {seconds[-1]:.0f} s" if seconds else ""
        return [Change(self.t, "step", f"step {self._step} ended{took}")]

    def _new_stage(self) -> list[Change]:
        stage = common_stage(self.stages().values())
        if stage == self.stage:
            return []
        self.stage = stage
        return [Change(self.t, "stage", stage or "nothing that is known")]

    def _new_findings(self) -> list[Change]:
        self.findings = self.diagnosis.open
        now = Counter(map(_problem, self.findings))
        raised = [self.advised(one) for one in self.findings if now[_problem(one)] > self._open[_problem(one)]]
        over = self._open - now
        resolved = (
            [one for one in self.diagnosis.findings if one.resolved is not None and over[_problem(one)] > 0]
            if over
            else []
        )
        self._open = now
        return [
            *(Change(self.t, "raised", one.finding.message, one) for one in raised),
            *(Change(self.t, "resolved", one.finding.message, one) for one in resolved),
        ]


def common_stage(stages: Iterable[str]) -> str:
    """Return what most GPUs do; empty where that is not known of most."""
    counted = Counter(stages).most_common(1)
    return counted[0][0] if counted else ""


def _stage(gpu: GpuHistory) -> str:
    if gpu.stage == UNKNOWN:
        return ""
    return gpu.stage if gpu.role == UNKNOWN else f"{gpu.stage} ({gpu.role})"


def _problem(tracked: TrackedFinding) -> _Problem:
    return tracked.finding.reason, tracked.first_seen, tracked.finding.scope.stage


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)

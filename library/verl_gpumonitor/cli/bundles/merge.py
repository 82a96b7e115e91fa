# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The records of a job's pods as one trace, in order of time.

Each pod has its node's clock. An answer tells what that clock showed when it was sent, and so how the clocks stand to
each other, as well as the time of a request allows. A clock that differs from the middle one by more than that, and by
more than two seconds, is put right, and that is said; smaller differences are left, as the diagnosis bears them.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from verl_gpumonitor.cli.monitors import GPUMonitor
from verl_gpumonitor.cli.times import began_note
from verl_gpumonitor.model.kubernetes import unix_seconds
from verl_gpumonitor.model.trace import (
    TRACE_FORMAT,
    Frameworks,
    Header,
    JobLine,
    PodLine,
    Record,
    TracePod,
    Workload,
)

from .answers import PodRecord
from .pods import JobPod

SKEW_SECONDS: Final = 2.0
"""The reader of a trace puts lines in order that are so far apart."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that was gathered."""

    monitor: GPUMonitor
    pods: Sequence[JobPod]
    records: Mapping[str, PodRecord]
    """By pod; those that answered."""
    notes: Sequence[str] = ()
    """Why others did not."""

    @property
    def corrections(self) -> dict[str, float]:
        """Pod -> seconds by which its clock is ahead of the others', where that is to be put right."""
        if not self.records:
            return {}
        middle = median(record.ahead_seconds for record in self.records.values())
        doubt = median(record.doubt_seconds for record in self.records.values())
        found = {pod: record.ahead_seconds - middle for pod, record in self.records.items()}
        return {
            pod: ahead
            for pod, ahead in found.items()
            if abs(ahead) > max(SKEW_SECONDS, self.records[pod].doubt_seconds + doubt)
        }

    @property
    def began_unix(self) -> float:
        """When the trace begins."""
        moved = self.corrections
        return min(record.began_unix - moved.get(pod, 0.0) for pod, record in self.records.items())

    def header(self) -> Header:
        """Return the first line."""
        monitor, launch = self.monitor, self.monitor.status.launch
        ref = monitor.spec.workload_ref
        return Header(
            format=TRACE_FORMAT,
            workload=Workload(
                api_version=ref.api_version or None,
                kind=ref.kind or None,
                namespace=monitor.metadata.namespace or None,
                name=ref.name or None,
            ),
            entrypoint=launch.command,
            frameworks=Frameworks(verl=launch.verl_version),
            pods=[self._pod(pod) for pod in self.pods],
            notes=self.all_notes(),
        )

    def all_notes(self) -> list[str]:
        """Return what a reader must know."""
        moved = [
            f"the clock of {pod} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others: what it"
            " recorded was moved by that"
            for pod, ahead in sorted(self.corrections.items())
        ]
        cut = [f"{pod} answered in part: its last minutes may be missing" for pod in sorted(self._cut())]
        left_out = self.monitor.status.launch.overrides_left_out
        hidden = [_hidden(left_out)] if left_out else []
        began = [began_note(self.began_unix)] if self.records else []
        return [*began, *self.notes, *cut, *moved, *hidden]

    def lines(self) -> Iterator[Record]:
        """Yield all other lines, in order."""
        begin, moved = self.began_unix, self.corrections
        teller = max(self.records, key=lambda pod: (self.records[pod].steps, pod), default=None)
        every = (
            record.records(shift=record.began_unix - moved.get(pod, 0.0) - begin, steps=pod == teller)
            for pod, record in self.records.items()
        )
        of_pods = sorted(self._of_pods(begin), key=lambda line: line.t)
        yield from heapq.merge(self._job(begin), of_pods, *every, key=lambda line: line.t)

    def _cut(self) -> Iterable[str]:
        return (pod for pod, record in self.records.items() if not record.whole)

    def _pod(self, pod: JobPod) -> TracePod:
        record = self.records.get(pod.name)
        if record is None:
            return pod.header()
        return msgspec.structs.replace(pod.header(), gpus=record.gpus, memory_limit_bytes=record.memory_limit_bytes)

    def _job(self, begin: float) -> Iterator[JobLine]:
        """Yield the job's phase: that it ran, and when it ended, where that is known."""
        status, ended = self.monitor.status, self.monitor.has_ended
        end = unix_seconds(status.workload.completion_time) if ended else None
        if end is None or end > begin:
            yield JobLine(t=0.0, phase=status.phase if status.phase == "Pending" else "Running")
        if end is not None:
            yield JobLine(t=round(max(0.0, end - begin), 3), phase=status.phase, message=status.workload.message)

    def _of_pods(self, begin: float) -> Iterator[PodLine]:
        """Yield phases and ends of containers. An end before the trace's begin is left to the notes."""
        for pod in self.pods:
            yield PodLine(t=0.0, pod=pod.name, phase=pod.phase)
            for end in pod.ends:
                if end.at_unix is not None and end.at_unix >= begin:
                    yield PodLine(
                        t=round(end.at_unix - begin, 3),
                        pod=pod.name,
                        container=end.container,
                        reason=end.reason,
                        exit_code=end.exit_code,
                        restart_count=end.restarts,
                    )


def _hidden(left_out: int) -> str:
    """Say what of the command line a status does not hold."""
    many = "1 setting of the command line is" if left_out == 1 else f"{left_out} settings of the command line are"
    return f"{many} missing here, since a GPUMonitor has room for the most important ones only: advice cannot heed them"

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Scenario bench: recall and precision of the diagnosis beside a monitor of thresholds, and what a report costs.

`python -m tests.bench.scenarios [NAME...]` fails when recall or precision of the recorded scenarios is below 0.95.
The monitor of thresholds is asked for neither stage nor advice, which it does not know.
"""

import sys
import time
import tracemalloc
from collections.abc import Iterable

import msgspec

from tests.scenarios.cases import CASES, build, own
from tests.scenarios.naive import naive
from tests.scenarios.score import Expectation, Scenario, Score, judged, ours, visible
from tests.scenarios.simulate import Job
from verl_gpumonitor.cli.traces import TraceReader
from verl_gpumonitor.diagnosis.doctor import Diagnosis

LEAST = 0.95


def _lenient(expectation: Expectation) -> Expectation:
    must = [msgspec.structs.replace(m, stage=None, advice_any=[], advice_none=[]) for m in expectation.must]
    return msgspec.structs.replace(expectation, must=must)


def _table(title: str, scenarios: Iterable[Scenario]) -> Score:
    print(f"\n{title}\n{'scenario':24} {'ours: found':>12} {'false':>6} {'thresholds: found':>18} {'false':>6}  faults")
    total, other = Score(), Score()
    for scenario in scenarios:
        score, faults = judged(scenario.expectation, ours(scenario.lines))
        plain, _ = judged(_lenient(scenario.expectation), naive(scenario.lines))
        total.add(score)
        other.add(plain)
        wanted = len(scenario.expectation.must)
        print(
            f"{scenario.name:24} {f'{score.found}/{wanted}':>12} {score.false:>6}"
            f" {f'{plain.found}/{wanted}':>18} {plain.false:>6}  {'; '.join(faults)}",
            flush=True,
        )
    for name, score in (("ours", total), ("thresholds", other)):
        print(f"{name:12} recall {score.recall:.3f}  precision {score.precision:.3f}")
    return total


def _cost(pods: int = 8, steps: int = 10) -> None:
    """Say what one sample costs and what a workload takes, at 8 GPUs a pod and a sample each 15 s."""
    job = Job("large", seed=1, pods=pods, gpus=8, interval=15.0)
    job.start()
    for step in range(steps):
        job.usual_step(step)
    reader = TraceReader(job.record())
    records = list(reader.records())
    diagnosis = Diagnosis(reader.header)
    begin = time.process_time()
    for record in records:
        diagnosis.feed(record)
    seconds = time.process_time() - begin
    tracemalloc.start()
    diagnosis = Diagnosis(reader.header)
    for record in records:
        diagnosis.feed(record)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    gpus = pods * 8
    print(
        f"\n{gpus} GPUs, {steps} steps, {len(records)} lines: {1e6 * seconds / len(records):.0f} us a line,"
        f" {size / gpus / 1024:.1f} KiB a GPU, {size / 2**20:.1f} MiB in all"
    )


def main(names: list[str]) -> int:
    """Print the tables; returns 1 where the recorded scenarios are not judged well enough."""
    if names:
        chosen = [scenario for scenario in visible() if scenario.name in names]
        chosen += [build(case) for case in CASES if case.__name__ in names]
        total = _table("chosen", chosen)
        return 0 if min(total.recall, total.precision) >= LEAST else 1
    total = _table("recorded scenarios", visible())
    simulated = _table("scenarios of our own", own())
    _cost()
    return 0 if min(total.recall, total.precision, simulated.recall, simulated.precision) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Scenarios, their expectations, and recall and precision of whoever found something in them."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from verl_gpumonitor.cli.diagnose import diagnose
from verl_gpumonitor.cli.traces import TraceReader
from verl_gpumonitor.model.findings import TrackedFinding

VISIBLE = Path(__file__).parent.parent / "data" / "scenarios"


class Must(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding that must be there: `NAME.expect.json`, `must[]`."""

    reason: str
    stage: str | None = None
    metric: str | None = None
    gpus: list[str] = []
    """One of these must be named."""
    by: float | None = None
    advice_any: list[str] = []
    advice_none: list[str] = []


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must and must not be found in one scenario."""

    must: list[Must] = []
    must_not: list[str] = []


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A record and its expectation."""

    name: str
    lines: Sequence[bytes]
    expectation: Expectation


class Score(msgspec.Struct, kw_only=True):
    """Counts over scenarios."""

    found: int = 0
    missed: int = 0
    false: int = 0
    """Reasons raised that must not be."""

    def add(self, other: "Score") -> None:
        """Add another's counts."""
        self.found += other.found
        self.missed += other.missed
        self.false += other.false

    @property
    def recall(self) -> float:
        """Share of what must be found; 1 of nothing."""
        return self.found / (self.found + self.missed) if self.found + self.missed else 1.0

    @property
    def precision(self) -> float:
        """Share of what was found that is right; 1 of nothing."""
        return self.found / (self.found + self.false) if self.found + self.false else 1.0


Finder = Callable[[Sequence[bytes]], list[TrackedFinding]]


def ours(lines: Iterable[bytes]) -> list[TrackedFinding]:
    """Diagnose a record as `gpumon diagnose` does."""
    reader = TraceReader(lines)
    return diagnose(reader.header, reader.records())[1]


def visible() -> Iterator[Scenario]:
    """Read the scenarios of the data folder, by name."""
    for path in sorted(VISIBLE.glob("*.jsonl.gz")):
        name = path.name.removesuffix(".jsonl.gz")
        yield load(name)


def load(name: str) -> Scenario:
    """Read one scenario of the data folder."""
    with gzip.open(VISIBLE / f"{name}.jsonl.gz") as file:
        lines = file.read().splitlines()
    expected = msgspec.json.decode((VISIBLE / f"{name}.expect.json").read_bytes(), type=Expectation)
    return Scenario(name=name, lines=lines, expectation=expected)


def judged(expectation: Expectation, findings: Sequence[TrackedFinding]) -> tuple[Score, list[str]]:
    """Return the counts of one scenario, and each fault in words."""
    score, faults = Score(), []
    for must in expectation.must:
        if any(_meets(must, tracked) for tracked in findings):
            score.found += 1
        else:
            score.missed += 1
            faults.append(f"missed {_words(must)}")
    for reason in sorted({tracked.finding.reason for tracked in findings} & set(expectation.must_not)):
        score.false += 1
        first = next(tracked for tracked in findings if tracked.finding.reason == reason)
        faults.append(f"false {reason} at {first.first_seen:.0f}: {first.finding.message}")
    return score, faults


def _meets(must: Must, tracked: TrackedFinding) -> bool:
    finding = tracked.finding
    parameters = {advice.parameter for advice in finding.advice}
    return (
        finding.reason == must.reason
        and must.stage in (None, finding.scope.stage)
        and must.metric in (None, finding.evidence.get("metric"))
        and (not must.gpus or not set(must.gpus).isdisjoint(finding.scope.gpus))
        and (must.by is None or tracked.first_seen <= must.by)
        and (not must.advice_any or not parameters.isdisjoint(must.advice_any))
        and parameters.isdisjoint(must.advice_none)
    )


def _words(must: Must) -> str:
    given = {key: value for key, value in msgspec.to_builtins(must).items() if value}
    return json.dumps(given)

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A workload's ledger as text, and back: what the controller goes on from after a restart. Pure.

The text is short: compressed arrays without field names, and without what stands at its default at their ends. Where
there is no room for all pods, sums of what can never report again are kept, and starts that will most likely report
again are not.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from .ledger import PodLedger, StartLedger
from .totals import NOTHING, Peak, StageKey, StageSum, StageSums, Totals, sum_of


def _short(values: list[Any], defaults: tuple[Any, ...]) -> list[Any]:
    """Return the values without those at the end that equal their defaults."""
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return values


class _WrittenStage(msgspec.Struct, frozen=True, array_like=True):
    name: int
    """Place in `_Written.names`."""
    observed_seconds: float = 0.0
    busy_seconds: float = 0.0
    energy_joules: float | None = None
    peak: tuple[int, int] | None = None
    floor_bytes: int | None = None


class _WrittenTotals(msgspec.Struct, frozen=True, array_like=True):
    gpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    energy_joules: float | None = None
    peak: tuple[int, int] | None = None
    gaps_seconds: float = 0.0
    lost_starts: int = 0
    stages: list[_WrittenStage] = []


class _WrittenStart(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    started_at: float
    seconds: float
    """From `started_at` to `sent_at`."""
    totals: _WrittenTotals = _WrittenTotals()
    final: bool = False
    steps: int = 0


class _WrittenPod(msgspec.Struct, frozen=True, array_like=True):
    starts: dict[str, _WrittenStart]
    folded: _WrittenTotals = _WrittenTotals()
    folded_until: float = 0.0
    folded_steps: int = 0


class _Written(msgspec.Struct, frozen=True, array_like=True):
    folded: _WrittenTotals
    base: _WrittenTotals
    pods: dict[str, _WrittenPod]
    names: list[tuple[str, str, str]] = []
    """Stages that are counted apart, each with role and job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenLedger:
    """A workload's ledger as it outlives the controller."""

    folded: Totals = NOTHING
    """Sum over pods that are gone."""
    base: Totals = NOTHING
    """What a borrowed cluster had counted before this workload began."""
    pods: Mapping[str, PodLedger] = field(default_factory=dict)
    """By pod uid."""


MAX_WRITTEN: Final = 32_768
"""Longest text of a ledger: some 300 pods, or 90 with all of their stages."""

VERSION: Final = "3:"
"""The text begins with it."""

_READ: Final = ("2:", VERSION)
"""Versions that are understood. The second knew no stages, and its arrays are shorter by them."""

_MAX_READ: Final = 2**20
"""Longest document in a text. A text of `MAX_WRITTEN` could be made to say a thousand times that."""

_LEAST_PER_POD: Final = 40
"""No pod takes less of a text than this: the uids alone, which no compression makes shorter, take half of it."""


class WrittenText(NamedTuple):
    """A ledger as text."""

    text: str
    left_out: int
    """Pods for whose newest starts there was no room."""


def write(ledger: WrittenLedger) -> WrittenText:
    """Return the ledger as text of at most `MAX_WRITTEN` characters.

    Where all of it would be longer, each pod's ended starts are folded, and newest ones go without their stages. Where
    that is not enough, pods are left out, those first that have counted least: their newest start says all again with
    its next report, and is missed only if it ends before that. What their ended starts have counted joins the sum over
    pods that are gone.
    """
    if len(ledger.pods) * _LEAST_PER_POD <= MAX_WRITTEN:
        text = _text(ledger)
        if len(text) <= MAX_WRITTEN:
            return WrittenText(text, 0)
    pods = {uid: pod.lean() for uid, pod in ledger.pods.items()}
    by_size = sorted(pods, key=lambda uid: pods[uid].totals(gone=False).gpu_seconds, reverse=True)
    room = min(len(by_size), MAX_WRITTEN // _LEAST_PER_POD)
    ended = {uid: sums for uid, pod in pods.items() if (sums := _ended(pod)) != NOTHING}
    while True:
        kept, left_out = by_size[:room], by_size[room:]
        folded = sum_of([ledger.folded, *(ended[uid] for uid in left_out if uid in ended)])
        text = _text(WrittenLedger(folded=folded, base=ledger.base, pods={uid: pods[uid] for uid in kept}))
        if len(text) <= MAX_WRITTEN or not room:
            return WrittenText(text, len(left_out))
        # All pods take about the same, so that the second text mostly fits.
        room = min(room - 1, int(room * 0.97 * MAX_WRITTEN / len(text)))


def _ended(pod: PodLedger) -> Totals:
    """Sum of what cannot report again. `pod`: its newest start alone is kept apart."""
    ended = all(start.final for start in pod.starts.values())
    return pod.totals(gone=True) if ended else pod.folded


def _text(ledger: WrittenLedger) -> str:
    names = _Names()
    document = [
        _totals_out(ledger.folded, names),
        _totals_out(ledger.base, names),
        {uid: _pod_out(pod, names) for uid, pod in ledger.pods.items()},
        list(names),
    ]
    return VERSION + base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()


def read(text: str) -> WrittenLedger | None:
    """Read what `write` wrote; None for whatever else (somebody edited it, or another version wrote it)."""
    if not text.startswith(_READ):
        return None
    try:
        packed = base64.b64decode(text.partition(":")[2], validate=True)
        document = msgspec.json.decode(zlib.decompressobj().decompress(packed, _MAX_READ), type=_Written)
        names = [StageKey(*name) for name in document.names]
        return WrittenLedger(
            folded=_totals_in(document.folded, names),
            base=_totals_in(document.base, names),
            pods={uid: _pod_in(pod, names) for uid, pod in document.pods.items()},
        )
    except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError, RecursionError, IndexError):
        return None


class _Names(dict[StageKey, int]):
    """Gives each name the next free number."""

    def __missing__(self, key: StageKey) -> int:
        self[key] = number = len(self)
        return number


def _whole(value: float, digits: int) -> float | int:
    """Round; without a fraction where there is none, since `.0` is two characters."""
    rounded = round(value, digits)
    return int(rounded) if rounded.is_integer() else rounded


def _stages_out(stages: StageSums, names: _Names) -> list[list[Any]]:
    return [
        _short(
            [
                names[key],
                _whole(value.observed_seconds, 1),
                _whole(value.busy_seconds, 1),
                None if value.energy_joules is None else _whole(value.energy_joules, 0),
                list(value.peak) if value.peak else None,
                value.floor_bytes,
            ],
            (None, 0, 0, None, None, None),
        )
        for key, value in stages.items()
    ]


def _stages_in(stages: list[_WrittenStage], names: list[StageKey]) -> dict[StageKey, StageSum]:
    return {
        names[item.name]: StageSum(
            item.observed_seconds,
            item.busy_seconds,
            item.energy_joules,
            Peak(*item.peak) if item.peak and item.peak[1] > 0 else None,
            item.floor_bytes,
        )
        for item in stages
    }


def _totals_out(totals: Totals, names: _Names) -> list[Any]:
    return _short(
        [
            _whole(totals.gpu_seconds, 3),
            _whole(totals.busy_seconds, 3),
            None if totals.energy_joules is None else _whole(totals.energy_joules, 1),
            list(totals.peak) if totals.peak else None,
            _whole(totals.gaps_seconds, 1),
            totals.lost_starts,
            _stages_out(totals.stages, names),
        ],
        (0, 0, None, None, 0, 0, []),
    )


def _totals_in(totals: _WrittenTotals, names: list[StageKey]) -> Totals:
    return Totals(
        gpu_seconds=totals.gpu_seconds,
        busy_seconds=totals.busy_seconds,
        energy_joules=totals.energy_joules,
        peak=Peak(*totals.peak) if totals.peak and totals.peak[1] > 0 else None,
        gaps_seconds=totals.gaps_seconds,
        lost_starts=totals.lost_starts,
        stages=_stages_in(totals.stages, names),
    )


def _start_out(start: StartLedger, names: _Names) -> list[Any]:
    started_at, seconds = round(start.started_at, 3), round(start.sent_at - start.started_at, 3)
    values = [start.sequence, started_at, seconds, _totals_out(start.totals, names), start.final, start.steps]
    return _short(values, (None, None, None, [], False, 0))


def _pod_out(pod: PodLedger, names: _Names) -> list[Any]:
    starts = {start_id: _start_out(start, names) for start_id, start in pod.starts.items()}
    values = [starts, _totals_out(pod.folded, names), pod.folded_until, pod.folded_steps]
    return _short(values, (None, [], 0, 0))


def _pod_in(pod: _WrittenPod, names: list[StageKey]) -> PodLedger:
    starts = {
        start_id: StartLedger(
            sequence=start.sequence,
            started_at=start.started_at,
            sent_at=start.started_at + start.seconds,
            final=start.final,
            steps=start.steps,
            written=_totals_in(start.totals, names),
        )
        for start_id, start in pod.starts.items()
    }
    return PodLedger(
        starts=starts,
        folded=_totals_in(pod.folded, names),
        folded_until=pod.folded_until,
        folded_steps=pod.folded_steps,
    )

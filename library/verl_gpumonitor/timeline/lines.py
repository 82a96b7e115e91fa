# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The stages of the time that is decided, and how pieces of a GPU's time are shared out among them. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import islice, pairwise

import msgspec

from verl_gpumonitor.model.vocabulary import UNKNOWN

from .pieces import Piece
from .totals import Share
from .words import OTHER, Own, Part, Span, parts


class Line:
    """The stages of the time that is decided, to split pieces by."""

    def __init__(self, stages: list[Part]) -> None:
        self._parts = stages
        self._begins = [part.begin for part in stages]

    def split(self, piece: Piece, uuid: str) -> list[Share]:
        """Return the piece's shares: all of it, whatever the lengths. It lies within the line."""
        first = max(0, bisect_right(self._begins, piece.begin) - 1)
        last = max(first, bisect_left(self._begins, piece.end) - 1)
        found = self._parts[first : last + 1]
        length = piece.end - piece.begin
        if piece.lost is not None:
            return [_found_again(piece, uuid, found)]
        if len(found) == 1 or length <= 0.0:
            return [_share(piece, uuid, found[-1], 1.0, [used for _, used in piece.memory], piece.engine)]
        shares: list[Share] = []
        for part in found:
            begin, end = max(part.begin, piece.begin), min(part.end, piece.end)
            within = [used for at, used in piece.memory if self._at(at, found) is part]
            listed = piece.engine if piece.engine and self._at(piece.engine[0], found) is part else None
            if piece.observed <= 0.0 and piece.energy is None and not within and listed is None:
                continue  # Only readings of memory are in the piece, and none of this part.
            shares.append(_share(piece, uuid, part, (end - begin) / length, within, listed))
        return shares

    @staticmethod
    def _at(at: float, found: list[Part]) -> Part:
        """Return the part of a moment; of one before or behind all of them, the nearest."""
        return next((part for part in found if at < part.end), found[-1])


def _found_again(piece: Piece, uuid: str, found: list[Part]) -> Share:
    """Return the share that is a peak whose moment is not known: of the only stage it can be of, else of none."""
    only = found[0] if len({(part.stage, part.role, part.job) for part in found}) == 1 else None
    part = only or Part(piece.begin, piece.end, UNKNOWN, UNKNOWN)
    return _share(piece, uuid, part, 0.0, [piece.lost or 0], None)


def line_of(lines: dict[Own, Line], spans: list[Span], own: Own) -> Line:
    """Return the stages as this GPU has them, worked out once for all GPUs alike."""
    if own not in lines:
        lines[own] = Line(parts(spans, own))
    return lines[own]


def lines_of(lines: dict[Own, Line], spans: list[Span], own: Own, jobs: tuple[str, ...]) -> dict[str, Line]:
    """Return the stages as this GPU has them, for each job as if it were alone."""
    return {job: line_of(lines, spans, msgspec.structs.replace(own, job=job)) for job in jobs}


def apart(lines: Mapping[str, Line], piece: Piece, uuid: str) -> dict[str, list[Share]]:
    """Return the piece's shares by job: equal ones of those that work at a time; where none does, the first one's."""
    found: dict[str, list[Share]] = {job: [] for job in lines}
    if piece.lost is not None:
        first = next(iter(lines))
        found[first].append(_found_again(piece, uuid, [Part(piece.begin, piece.end, UNKNOWN, UNKNOWN)]))
        return found
    for section in _sections(lines, piece):
        here = {job: line.split(section, uuid) for job, line in lines.items()}
        working = {job: shares for job, shares in here.items() if any(_works(share.part) for share in shares)}
        for job, shares in (working or dict(islice(here.items(), 1))).items():
            found[job].extend(_part_of(share, max(1, len(working))) for share in shares)
    return found


def _sections(lines: Mapping[str, Line], piece: Piece) -> list[Piece]:
    """Cut a piece wherever any job's stage begins or ends."""
    parts = [share.part for line in lines.values() for share in line.split(piece, "")]
    cuts = sorted({piece.begin, piece.end, *(part.begin for part in parts), *(part.end for part in parts)})
    length = piece.end - piece.begin
    if len(cuts) < 3 or length <= 0.0:
        return [piece]
    sections = [_section(piece, begin, end, (end - begin) / length) for begin, end in pairwise(cuts)]
    for reading in piece.memory:
        next((each for each in sections if reading[0] < each.end), sections[-1]).memory.append(reading)
    if piece.engine is not None:
        listed_at = piece.engine[0]
        next((each for each in sections if listed_at < each.end), sections[-1]).engine = piece.engine
    return sections


def _section(piece: Piece, begin: float, end: float, share: float) -> Piece:
    energy = None if piece.energy is None else piece.energy * share
    throttled = None if piece.throttled is None else piece.throttled * share
    return Piece(
        begin, end, observed=piece.observed * share, busy=piece.busy * share, energy=energy, throttled=throttled
    )


def _works(part: Part) -> bool:
    return bool(part.job) or part.stage not in (OTHER, UNKNOWN)


def _part_of(share: Share, among: int) -> Share:
    return msgspec.structs.replace(
        share,
        observed_seconds=share.observed_seconds / among,
        busy_seconds=share.busy_seconds / among,
        energy_joules=None if share.energy_joules is None else share.energy_joules / among,
        throttled_seconds=None if share.throttled_seconds is None else share.throttled_seconds / among,
    )


def _share(
    piece: Piece, uuid: str, part: Part, share: float, memory: list[int], engine: tuple[float, int] | None
) -> Share:
    begin, end = max(part.begin, piece.begin), min(part.end, piece.end)
    return Share(
        uuid=uuid,
        part=Part(begin, end, part.stage, part.role, part.job, part.step, part.begun and begin == part.begin),
        observed_seconds=piece.observed * share,
        busy_seconds=piece.busy * share,
        energy_joules=None if piece.energy is None else piece.energy * share,
        throttled_seconds=None if piece.throttled is None else piece.throttled * share,
        memory=tuple(memory),
        engine_bytes=None if engine is None else engine[1],
    )

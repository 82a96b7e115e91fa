# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What a record could not show, in sentences for a person: silence about a problem is no health. Pure."""

from collections.abc import Collection, Iterator

from verl_gpumonitor.diagnosis.coverage import Coverage
from verl_gpumonitor.diagnosis.rule import duration


def sentences(coverage: Coverage, found: Collection[str] = ()) -> list[str]:
    """Return one for what the record is too short for, and one for what nobody tells.

    `found`: reasons that were found all the same, such as by a first look.
    """
    return [*_too_short(coverage, found), *_untold(coverage, found)]


def too_short(coverage: Coverage, found: Collection[str] = ()) -> str | None:
    """Return the first of these alone; None where the record is long enough."""
    return next(_too_short(coverage, found), None)


def _too_short(coverage: Coverage, found: Collection[str]) -> Iterator[str]:
    short = [lack for lack in coverage.lacks if lack.needs is not None and lack.reason not in found]
    if short:
        needs = [
            f"{short[0].reason} (needs {short[0].needs})",
            *(f"{lack.reason} ({lack.needs})" for lack in short[1:]),
        ]
        where = "" if coverage.stages_told else " where no stages are told"
        yield f"Too short to judge {', '.join(needs)}{where}: {_length(coverage)} recorded."


def _length(coverage: Coverage) -> str:
    if not coverage.stages_told:
        return f"{duration(coverage.seconds)} {'is' if round(coverage.seconds) == 1 else 'are'}"
    return "1 whole step is" if coverage.steps == 1 else f"{coverage.steps} whole steps are"


def _untold(coverage: Coverage, found: Collection[str]) -> Iterator[str]:
    by_message: dict[str, list[str]] = {}
    for lack in coverage.lacks:
        if lack.needs is None and lack.reason not in found:
            by_message.setdefault(lack.message, []).append(lack.reason)
    if by_message:
        told = [f"{' and '.join(reasons)} ({message})" for message, reasons in by_message.items()]
        yield f"Not judged: {', '.join(told)}."

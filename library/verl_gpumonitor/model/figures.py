# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them. Pure."""

from typing import Final

GIB: Final = 2**30
RATIO_PLACES: Final = 4
"""Decimal places of a ratio that is written down."""


def gib(size: float) -> str:
    """Return bytes as `76.9 GiB`, or `48 MiB` where that says more."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def percent(ratio: float) -> str:
    """Return a ratio in whole percent: 0.714 gives `71%`.

    One that was rounded to four places before, as statuses and reports hold it, gives the same as the ratio itself:
    0.97496 and its 0.975 both give `98%`, and no table says another number than the message beside it.
    """
    return f"{100 * round(ratio, RATIO_PLACES):.0f}%"


def counted(number: int, what: str) -> str:
    """Return `1 GPU` or `4 GPUs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"

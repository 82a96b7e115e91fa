# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them. Pure."""

from typing import Final

GIB: Final = 2**30


def gib(size: float) -> str:
    """Return bytes as `76.9 GiB`, or `48 MiB` where that says more."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"


def percent(ratio: float) -> str:
    """Return a ratio in whole percent: 0.714 gives `71%`."""
    return f"{100 * ratio:.0f}%"

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How far the clock of another node is from ours, as far as the tasks that it began tell. Pure.

A task that one look did not see and the next one did has begun between them, by our clock; its own node says when, by
its clock. What does not fit is the difference. Looks a second apart see differences of some two seconds and more.
"""

from collections import deque
from typing import Final

_KEPT: Final = 32
"""Tasks that are remembered of a node: clocks drift, and are set right."""


class Skew:
    """Bounds of one node's clock against ours."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def began(self, begin: float, first: float, last: float) -> None:
        """Take a task that began at `begin` by the node's clock, and between the two others by ours."""
        self._bounds.append((begin - last, begin - first))

    @property
    def seconds(self) -> float:
        """How far the node's clock is ahead; 0 where nothing speaks against it.

        Else the lower bound, which the task that was seen soonest after its begin brings close to the truth.
        """
        if not self._bounds:
            return 0.0
        least = max(low for low, _ in self._bounds)
        most = min(high for _, high in self._bounds)
        if least > most:
            # The clock was set meanwhile: the last task alone counts.
            least, most = self._bounds[-1]
        return 0.0 if least <= 0 <= most else least

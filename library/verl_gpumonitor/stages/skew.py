# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How far the clock of another node is from ours, as far as what it says of its time tells. Pure.

A task that one look did not see and the next one did has begun between them, by our clock; its own node says when, by
its clock. What does not fit is the difference. Looks a second apart see differences of some two seconds and more. So
does one who answers and says what time it is: some twenty answers tell the difference to a tenth of a second.
"""

from collections import deque
from typing import Final

_KEPT: Final = 32
"""Tasks and answers that are remembered of a node: clocks drift, and are set right."""
MOST_SECONDS: Final = 30.0
"""Times that are told by way of the controller are set right by so much at most: it keeps two minutes of them."""


class Skew:
    """Bounds of one node's clock against ours."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def began(self, begin: float, first: float, last: float) -> None:
        """Take a task that began at `begin` by the node's clock, and between the two others by ours."""
        self._bounds.append((begin - last, begin - first))

    def said(self, second: float, first: float, last: float) -> None:
        """Take the whole second that a clock showed between two moments of ours."""
        self._bounds.append((second - last, second + 1.0 - first))

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

    @property
    def bearable_seconds(self) -> float:
        """The same; 0 where it is so much that the clocks cannot be reconciled."""
        return self.seconds if abs(self.seconds) <= MOST_SECONDS else 0.0

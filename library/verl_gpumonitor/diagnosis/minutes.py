# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The highest value of each of the last minutes, which shows a rise that single samples hide. Pure."""

from array import array
from collections.abc import Iterator
from typing import Final

BUCKET_SECONDS: Final = 60.0
MAX_MINUTES: Final = 30


class Minutes:
    """Begin of a minute and the highest value in it, oldest first: 12 bytes each. Values keep seven digits."""

    __slots__ = ("_begins", "_values")

    def __init__(self) -> None:
        self._begins: array[float] | None = None
        """None before there is a value: of most pods nobody tells."""
        self._values: array[float] = _NO_VALUES

    def add(self, t: float, value: float | None) -> None:
        """Take the value of a time, which never runs back; None: not known, nothing is taken."""
        if value is None:
            return
        if self._begins is None:
            self._begins, self._values = array("d"), array("f")
        begin = t - t % BUCKET_SECONDS
        if self._begins and self._begins[-1] == begin:
            self._values[-1] = max(self._values[-1], value)
            return
        self._begins.append(begin)
        self._values.append(value)
        if len(self._begins) > MAX_MINUTES:
            del self._begins[0], self._values[0]

    def clear(self) -> None:
        """Forget all."""
        self._begins, self._values = None, _NO_VALUES

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self._begins or (), self._values, strict=True)

    def __getitem__(self, number: int) -> tuple[float, float]:
        if self._begins is None:
            raise IndexError(number)
        return self._begins[number], self._values[number]


_NO_VALUES: Final = array("f")

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Range checks on raw readings. Drivers answer sentinels and garbage; none of it may leave the reader. Pure.

Each function returns the value in base units, or None for an impossible one. The bounds are far outside of what any
GPU does, so that only nonsense is dropped.
"""

from typing import Final

MAX_GPUS: Final = 64
MAX_MEMORY_BYTES: Final = 2**44
"""16 TiB: some hundred times the memory of a GPU of today."""
MAX_COUNTER: Final = 2**62
"""NVML's blank values begin at 2**63 - 16, and 2**64 - 1 stands for `not available`."""
MAX_POWER_MILLIWATTS: Final = 5_000_000
MAX_ENERGY_MILLIJOULES: Final = 10**17
"""3,000 W for a thousand years."""
MAX_PID: Final = 2**22
"""Linux's PID_MAX_LIMIT on 64 bits."""
MAX_TEXT: Final = 96


def percent(raw: float) -> float | None:
    """Return 0..100 as a ratio; anything else is None (100 % is the most that a share can be)."""
    return raw / 100.0 if 0 <= raw <= 100 else None


def power_watts(milliwatts: float) -> float | None:
    """Return watts; None beyond 5 kW."""
    return milliwatts / 1000.0 if 0 <= milliwatts <= MAX_POWER_MILLIWATTS else None


def temperature(celsius: float) -> float | None:
    """Return degrees Celsius from -40 to 200, beyond which silicon does not answer."""
    return float(celsius) if -40 <= celsius <= 200 else None


def memory_total(total: int) -> int | None:
    """Return the size of a GPU's memory; zero is no size."""
    return total if 0 < total <= MAX_MEMORY_BYTES else None


def memory_part(part: int, total: int | None) -> int | None:
    """Return a part of the memory; None when it is larger than the whole, or the whole is unknown."""
    return part if total is not None and 0 <= part <= total else None


def counter(raw: float) -> int | None:
    """Return a counter's value; None for blanks and for what is no finite number, which no comparison holds for."""
    return int(raw) if 0 <= raw < MAX_COUNTER else None


def kibibytes(raw: float) -> int | None:
    """Return a counter of KiB in bytes."""
    value = counter(raw)
    return None if value is None else value * 1024


def energy_joules(millijoules: float) -> float | None:
    """Return joules."""
    return millijoules / 1000.0 if 0 <= millijoules <= MAX_ENERGY_MILLIJOULES else None


def pid(raw: int) -> int | None:
    """Return a process id that Linux can give."""
    return raw if 0 < raw <= MAX_PID else None


def text(raw: str) -> str | None:
    """Return a name or UUID: printable, not empty, of a sane length."""
    return raw if 0 < len(raw) <= MAX_TEXT and raw.isprintable() and not raw.isspace() else None


def gpu_count(raw: int) -> int | None:
    """Return how many GPUs there are; None beyond what a node can hold."""
    return raw if 0 <= raw <= MAX_GPUS else None

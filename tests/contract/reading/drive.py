# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Run the reader or the sampler in a process of its own, on orders: one JSON line in, one out.

A process of its own, because the library is found by LD_LIBRARY_PATH, read once at a process's start, and because
hung threads must not live on in the test runner.
"""

import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
import pynvml

from verl_gpumonitor.reading.nvml.reader import NvmlReader
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings


class Clock:
    """The monotonic clock, which orders can push ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Driven:
    """What the orders act on."""

    def __init__(self) -> None:
        self.sampler: Sampler | None = None
        self.begin_anew()

    def begin_anew(self, slow_seconds: float = 0.0) -> None:
        """Take a new reader, on a library that is closed. It reads everything at each pass, unless told otherwise."""
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        self.clock = Clock()
        self.driver_loaded = False
        self.reader = NvmlReader(
            slow_seconds=slow_seconds, clock=self.clock, is_driver_loaded=lambda: self.driver_loaded
        )

    def obey(self, order: dict[str, Any]) -> Any:
        match order:
            case {"do": "begin anew"}:
                return self.begin_anew(order.get("slow_seconds", 0.0))
            case {"do": "read"}:
                return self.reader.read_all(skip=frozenset(order["skip"]), processes=order["processes"])
            case {"do": "memory"}:
                return self.reader.read_memory()
            case {"do": "advance"}:
                self.clock.ahead += order["seconds"]
                return None
            case {"do": "driver"}:
                self.driver_loaded = order["loaded"]
                return None
            case {"do": "sample"}:
                settings = msgspec.convert(order["settings"], SamplerSettings)
                self.sampler = Sampler(settings=settings, clock=self.clock)
                self.sampler.start()
                return None
            case {"do": "latest"} if self.sampler is not None:
                return {"now": self.clock(), "sample": self.sampler.latest()}
            case {"do": "stop"} if self.sampler is not None:
                began = time.monotonic()
                self.sampler.stop()
                return time.monotonic() - began
        raise ValueError(f"no such order: {order}")


def main() -> None:
    driven = Driven()
    for line in sys.stdin:
        answer = msgspec.json.encode(driven.obey(msgspec.json.decode(line)))
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Calls into NVML under the watch, and the count of those that failed or brought nothing of use."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pynvml

from verl_gpumonitor.reading.watch import CallWatch

from .errors import GPU_GONE, LIBRARY_GONE, NOT_OFFERED, OLDER_SYMBOL, GpuLost, LibraryLost, error_name
from .gpu import Gpu, Handle

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Makes the calls of one reader. The three counts are sums since its start; see ReadingHealth."""

    def __init__(self, watch: CallWatch) -> None:
        self.watch = watch
        """Of the thread that reads; replaced when another takes over."""
        self.unsupported: dict[str, int] = {}
        self.implausible: dict[str, int] = {}
        self.failed: dict[str, int] = {}

    def call(self, part: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one call under the watch. Raises NVMLError, and Abandoned if it came back too late."""
        watch = self.watch
        watch.begin(part, function.__name__)
        try:
            return function(*args, **kwargs)
        finally:
            watch.end()

    def offered(self, gpu: Gpu, field: str, function: Callable[[Handle], T], handle: Handle) -> T | None:
        """Return the reading; None where this GPU or driver does not offer it, or it failed (which is counted)."""
        try:
            result = self.call(gpu.uuid, function, handle)
        except pynvml.NVMLError as error:
            self.note_error(gpu, field, error.value)
            return None
        except (ValueError, IndexError):  # the binding chokes on garbage: bytes that are no text, an absurd count
            self.note_implausible(field)
            return None
        gpu.answered = True
        return result

    def newest(self, gpu: Gpu, field: str, variants: tuple[Callable[[Handle], T], ...]) -> T | None:
        """Ask by the newest symbol that the library has.

        All are tried at each pass: to find one missing costs no call, while to remember it from one GPU's answer would
        cost the others their values.
        """
        for variant in variants:
            if gpu.handle is None:
                return None
            try:
                result = self.call(gpu.uuid, variant, gpu.handle)
            except pynvml.NVMLError as error:
                if error.value in OLDER_SYMBOL:
                    continue
                self.note_error(gpu, field, error.value)
                return None
            except (ValueError, IndexError):
                self.note_implausible(field)
                return None
            gpu.answered = True
            return result
        self.note_unsupported(field)
        return None

    def checked(self, field: str, value: T | None) -> T | None:
        """Count a reading that the checks threw away, and hand it on."""
        if value is None:
            self.note_implausible(field)
        return value

    def note_error(self, gpu: Gpu, field: str, code: int) -> None:
        """Count a failed call. Raises when it means that the GPU or the library is gone."""
        if code in NOT_OFFERED:
            self.note_unsupported(field)
            return
        name = self.note_failed(code)
        if code in LIBRARY_GONE:
            raise LibraryLost(code)
        if code in GPU_GONE:
            raise GpuLost(name)
        gpu.error = gpu.error or name

    def note_failed(self, code: int) -> str:
        """Count a call that ended in an error, and return the error's name."""
        name = error_name(code)
        _count(self.failed, name)
        return name

    def note_unsupported(self, field: str) -> None:
        """Count a reading that is not offered."""
        _count(self.unsupported, field)

    def note_implausible(self, field: str) -> None:
        """Count a reading that was thrown away."""
        _count(self.implausible, field)


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1

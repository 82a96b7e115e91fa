# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Single questions to a GPU that NVML answers in one call each.

Those of each pass are asked without the binding's own structures, which run Python at each access. Every answer has
memory of its own: a call that hangs may write into it at any later time.
"""

import ctypes
import struct
from functools import lru_cache
from typing import Final

import pynvml

from .gpu import Handle

_UTILIZATION: Final = struct.Struct("=II")
"""nvmlUtilization_t: of the chip, of the memory."""
_MEMORY_V1: Final = struct.Struct("=Q8xQ")
"""nvmlMemory_t: total, (free,) used."""
_MEMORY_V2: Final = struct.Struct("=8xQQ8xQ")
"""nvmlMemory_v2_t: (version, padding,) total, reserved, (free,) used."""
_REASONS: Final = struct.Struct("=Q")
_ASKED_MEMORY_V2: Final = struct.pack("=I36x", pynvml.nvmlMemory_v2)
_ARRAYS: Final = {size: ctypes.c_char * size for size in (8, 24, 40)}
_CLOCKS_EVENT_REASONS: Final = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
_MAX_CLOCKS_EVENT_REASONS: Final = 0xFFFF
"""Bits of today end at 0x400; a word with higher ones is garbage."""


def utilization(handle: Handle) -> tuple[int, int]:
    """Return load of the chip and of its memory, in percent."""
    chip, memory = _UTILIZATION.unpack(_ask("nvmlDeviceGetUtilizationRates", handle, bytes(8)))
    return chip, memory


def temperature(handle: Handle) -> int:
    """Return the chip's, in degrees Celsius."""
    return pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)


def memory_v2(handle: Handle) -> tuple[int, int, int | None]:
    """Return total, used and reserved bytes."""
    total, reserved, used = _MEMORY_V2.unpack(_ask("nvmlDeviceGetMemoryInfo_v2", handle, _ASKED_MEMORY_V2))
    return total, used, reserved


def memory_v1(handle: Handle) -> tuple[int, int, int | None]:
    """Return total and used bytes; the reserved ones are not told."""
    total, used = _MEMORY_V1.unpack(_ask("nvmlDeviceGetMemoryInfo", handle, bytes(24)))
    return total, used, None


def clocks_event_reasons(handle: Handle) -> int:
    """Return the bits of why clocks are held down."""
    (raw,) = _REASONS.unpack(_ask("nvmlDeviceGetCurrentClocksEventReasons", handle, bytes(8)))
    return int(raw)


def clocks_throttle_reasons(handle: Handle) -> int:
    """Return the same by the older symbol."""
    (raw,) = _REASONS.unpack(_ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, bytes(8)))
    return int(raw)


@lru_cache(maxsize=64)
def reason_names(raw: int) -> tuple[str, ...] | None:
    """Return the clocks' event reasons by name; None for garbage. Bits without a name are passed over."""
    if not 0 <= raw <= _MAX_CLOCKS_EVENT_REASONS:
        return None
    return tuple(name for bit, name in _CLOCKS_EVENT_REASONS if raw & bit)


def _ask(name: str, handle: Handle, asked: bytes) -> ctypes.Array[ctypes.c_char]:
    """Call a function that writes its answer over what is asked. Raises NVMLError."""
    function = getattr(pynvml.nvmlLib, name, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    answer = _ARRAYS[len(asked)].from_buffer_copy(asked)
    code = function(handle, answer)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return answer

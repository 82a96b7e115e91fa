# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Field values: many readings of a GPU in one call. Which are asked for, and what the answers say."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final

import pynvml

from verl_gpumonitor.reading import plausible

from .calls import Calls
from .errors import NOT_OFFERED
from .gpu import Gpu, Handle

_ALL_LINKS: Final = 0xFFFFFFFF
_SUCCESS: Final = pynvml.NVML_SUCCESS
POWER: Final = "power_watts"
_Fields = tuple[tuple[int, int, str, Callable[[float], float | None]], ...]
_QUICK_FIELDS: Final[_Fields] = (
    (pynvml.NVML_FI_DEV_POWER_AVERAGE, 0, POWER, plausible.power_watts),
    (pynvml.NVML_FI_DEV_POWER_INSTANT, 0, POWER, plausible.power_watts),
    (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0, "energy_joules", plausible.energy_joules),
)
"""Field, scope, name in a sample, check; NVML answers in this order.

Power: as nvmlDeviceGetPowerUsage has it, the mean of a second where the GPU offers that, else (A100 and older) the
moment's; its own call is for drivers that offer neither.
"""
_SLOW_FIELDS: Final[_Fields] = (
    (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0, "memory_temperature_celsius", plausible.temperature),
    (pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0, "ecc_uncorrected_errors", plausible.counter),
    (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, "pcie_sent_bytes", plausible.counter),
    (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, "pcie_received_bytes", plausible.counter),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS, "nvlink_sent_bytes", plausible.kibibytes),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS, "nvlink_received_bytes", plausible.kibibytes),
)
SLOW: Final = ("temperature_celsius", *(field for _, _, field, _ in _SLOW_FIELDS))
"""Names in a sample of all that is read slowly."""
_FIELD_VALUE: Final = struct.Struct("=24xII8s")
"""nvmlFieldValue_t: (field, scope, time, latency,) type of value, return code, value. Read and written as bytes: the
binding's own structures run Python at each access, which was half the cost of a pass."""


class _Questions:
    """What one call for field values asks."""

    __slots__ = ("array", "asked", "fields")

    def __init__(self, fields: _Fields) -> None:
        self.fields = fields
        self.asked = b"".join(struct.pack("=II32x", field, scope) for field, scope, _, _ in fields)
        self.array = ctypes.c_char * len(self.asked)


_QUICK_QUESTIONS: Final = _Questions(_QUICK_FIELDS)
_ALL_QUESTIONS: Final = _Questions(_QUICK_FIELDS + _SLOW_FIELDS)
_FIELD_NOT_OFFERED: Final = NOT_OFFERED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""Drivers answer INVALID_ARGUMENT for the id of a field that they do not know yet."""
_VALUE_FORMATS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: struct.Struct("=d"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: struct.Struct("=I4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: struct.Struct("@L"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: struct.Struct("=Q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: struct.Struct("=q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: struct.Struct("=i4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: struct.Struct("=H6x"),
}


def read_fields(calls: Calls, gpu: Gpu, *, slow: bool) -> dict[str, Any]:
    """Read the quick fields, or all of them, in one call. A field that is not offered has no key.

    Raises GpuLost and LibraryLost.
    """
    found: dict[str, Any] = {}
    function, questions = (field_values, _ALL_QUESTIONS) if slow else (quick_field_values, _QUICK_QUESTIONS)
    values = calls.offered(gpu, "fields", function, gpu.handle) if gpu.handle is not None else None
    if values is None:
        return found
    answers = _FIELD_VALUE.iter_unpack(values)
    for (_, _, field, check), (kind, code, raw) in zip(questions.fields, answers, strict=True):
        if code == _SUCCESS:
            # The first of two answers for one name is the better one; 0 W is none, for a GPU that can answer.
            if found.get(field):
                continue
            form = _VALUE_FORMATS.get(kind)
            value = found[field] = None if form is None else check(form.unpack(raw)[0])
            if value is None:
                calls.note_implausible(field)
        elif code not in _FIELD_NOT_OFFERED:
            calls.note_error(gpu, field, code)
        elif field != POWER:
            calls.note_unsupported(field)
    return found


def field_values(handle: Handle) -> ctypes.Array[ctypes.c_char]:
    """Ask for all field values."""
    return _answers(handle, _ALL_QUESTIONS)


def quick_field_values(handle: Handle) -> ctypes.Array[ctypes.c_char]:
    """Ask for those that change at once."""
    return _answers(handle, _QUICK_QUESTIONS)


def _answers(handle: Handle, questions: _Questions) -> ctypes.Array[ctypes.c_char]:
    """Ask. The binding's function writes the questions one by one, in Python.

    The answer has memory of its own at each call: a hung one may write into it at any later time.
    """
    function = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    values = questions.array.from_buffer_copy(questions.asked)
    code = function(handle, len(questions.fields), values)
    if code != _SUCCESS:
        raise pynvml.NVMLError(code)
    return values

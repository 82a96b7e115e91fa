# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What is called of nvidia-ml-py, and nothing else, so that a new call is seen in review."""

from ctypes import CDLL, Structure, _Pointer

NVML_SUCCESS: int
NVML_ERROR_UNINITIALIZED: int
NVML_ERROR_INVALID_ARGUMENT: int
NVML_ERROR_NOT_SUPPORTED: int
NVML_ERROR_NO_PERMISSION: int
NVML_ERROR_NOT_FOUND: int
NVML_ERROR_DRIVER_NOT_LOADED: int
NVML_ERROR_TIMEOUT: int
NVML_ERROR_LIBRARY_NOT_FOUND: int
NVML_ERROR_FUNCTION_NOT_FOUND: int
NVML_ERROR_GPU_IS_LOST: int
NVML_ERROR_RESET_REQUIRED: int
NVML_ERROR_LIB_RM_VERSION_MISMATCH: int
NVML_ERROR_NO_DATA: int
NVML_ERROR_ARGUMENT_VERSION_MISMATCH: int
NVML_ERROR_DEPRECATED: int
NVML_ERROR_GPU_NOT_FOUND: int
NVML_ERROR_UNKNOWN: int

NVML_TEMPERATURE_GPU: int
NVML_FI_DEV_ECC_DBE_VOL_TOTAL: int
NVML_FI_DEV_MEMORY_TEMP: int
NVML_FI_DEV_POWER_AVERAGE: int
NVML_FI_DEV_POWER_INSTANT: int
NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: int
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: int
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: int
NVML_FI_DEV_PCIE_COUNT_TX_BYTES: int
NVML_FI_DEV_PCIE_COUNT_RX_BYTES: int
NVML_VALUE_TYPE_DOUBLE: int
NVML_VALUE_TYPE_UNSIGNED_INT: int
NVML_VALUE_TYPE_UNSIGNED_LONG: int
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: int
NVML_VALUE_TYPE_SIGNED_LONG_LONG: int
NVML_VALUE_TYPE_SIGNED_INT: int
NVML_VALUE_TYPE_UNSIGNED_SHORT: int
nvmlEventTypeXidCriticalError: int
nvmlMemory_v2: int

nvmlLib: CDLL | None  # None until the first nvmlInitWithFlags that finds it.

class NVMLError(Exception):
    value: int
    def __init__(self, value: int) -> None: ...

class struct_c_nvmlDevice_t(Structure): ...

c_nvmlDevice_t = _Pointer[struct_c_nvmlDevice_t]

class c_nvmlEventSet_t: ...

class c_nvmlMemory_t(Structure): ...
class c_nvmlMemory_v2_t(Structure): ...

class c_nvmlUtilization_t:
    gpu: int
    memory: int

class c_nvmlEventData_t:
    device: c_nvmlDevice_t
    eventType: int
    eventData: int

class nvmlFriendlyObject:
    pid: int
    usedGpuMemory: int | None

def nvmlInitWithFlags(flags: int) -> None: ...
def nvmlShutdown() -> None: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetHandleByUUID(uuid: str) -> c_nvmlDevice_t: ...
def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetEnforcedPowerLimit(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMemoryInfo(
    handle: c_nvmlDevice_t, version: int | None = ...
) -> c_nvmlMemory_t | c_nvmlMemory_v2_t: ...
def nvmlDeviceGetUtilizationRates(handle: c_nvmlDevice_t) -> c_nvmlUtilization_t: ...
def nvmlDeviceGetPowerUsage(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetTemperature(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetCurrentClocksEventReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetCurrentClocksThrottleReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeRunningProcesses_v2(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetComputeRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlEventSetCreate() -> c_nvmlEventSet_t: ...
def nvmlDeviceRegisterEvents(handle: c_nvmlDevice_t, eventTypes: int, eventSet: c_nvmlEventSet_t) -> None: ...
def nvmlEventSetWait_v2(eventSet: c_nvmlEventSet_t, timeoutms: int) -> c_nvmlEventData_t: ...
def nvmlEventSetFree(eventSet: c_nvmlEventSet_t) -> None: ...

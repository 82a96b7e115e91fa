# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's calls into NVML and nothing else: what it would cost at least. Started by `tests.bench.sidecar`.

One thread, the sidecar's binding and pace; the answers are thrown away. What it takes is the simulated driver's part,
the binding's, and that of waking up twice a second.
"""

import itertools
import time
from contextlib import suppress

import pynvml

from verl_gpumonitor.reading.nvml import SLOW_SECONDS, _field_values, _memory_v2, _quick_field_values


def main() -> None:
    """Call until killed."""
    pynvml.nvmlInitWithFlags(0)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    events = pynvml.nvmlEventSetCreate()
    for second in itertools.count():
        is_slow = second % int(SLOW_SECONDS) == 0
        for handle in handles:
            pynvml.nvmlDeviceGetUtilizationRates(handle)
            if is_slow:
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            _memory_v2(handle)
            (_field_values if is_slow else _quick_field_values)(handle)
        with suppress(pynvml.NVMLError):  # There is none to be had.
            pynvml.nvmlEventSetWait_v2(events, 0)
        time.sleep(0.5)
        for handle in handles:
            _memory_v2(handle)
        time.sleep(0.5)


if __name__ == "__main__":
    main()

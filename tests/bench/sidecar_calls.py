# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's calls into NVML and nothing else: what it would cost at least. Started by `tests.bench.sidecar`.

One thread, the sidecar's own functions and pace; the answers are thrown away. What it takes is the simulated driver's
part, that of asking it, and that of waking up twice a second.
"""

import itertools
import time
from contextlib import suppress

import pynvml

from verl_gpumonitor.reading.nvml.fields import field_values, quick_field_values
from verl_gpumonitor.reading.nvml.questions import clocks_event_reasons, memory_v2, temperature, utilization
from verl_gpumonitor.reading.nvml.values import SLOW_SECONDS


def main() -> None:
    """Call until killed."""
    pynvml.nvmlInitWithFlags(0)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    events = pynvml.nvmlEventSetCreate()
    for second in itertools.count():
        is_slow = second % int(SLOW_SECONDS) == 0
        for handle in handles:
            utilization(handle)
            if is_slow:
                temperature(handle)
            clocks_event_reasons(handle)
            memory_v2(handle)
            (field_values if is_slow else quick_field_values)(handle)
        with suppress(pynvml.NVMLError):  # There is none to be had.
            pynvml.nvmlEventSetWait_v2(events, 0)
        time.sleep(0.5)
        for handle in handles:
            memory_v2(handle)
        time.sleep(0.5)


if __name__ == "__main__":
    main()

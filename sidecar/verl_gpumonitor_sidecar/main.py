# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Entry of `gpumon-sidecar`. Hears SIGTERM before anything slow happens, then starts the program.

The sidecar is often PID 1 of its container, and the kernel drops a SIGTERM for which PID 1 has no handler: the pod
would then wait for its whole grace period. The imports take seconds where the container has a twentieth of a core, so
the handler comes before them. `program` takes the signals over when there is something to finish.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGINT)


def main() -> NoReturn:
    """Run until SIGTERM or SIGINT; exits with 0 within a second of it, and never before."""
    for number in ENDING:
        signal.signal(number, _leave)
    from .program import run

    run(ENDING)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit: nothing was read yet, so nothing is owed to anybody."""
    os._exit(0)


if __name__ == "__main__":
    main()

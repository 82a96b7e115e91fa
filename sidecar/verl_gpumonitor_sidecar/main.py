# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Entry of `gpumon-sidecar`. Takes SIGTERM before anything slow happens, then starts the program.

The sidecar is often PID 1 of its container, and the kernel drops a SIGTERM that PID 1 neither handles nor blocks: the
pod would then wait for its whole grace period. So the signals are blocked here, before the real imports, and waited
for in `program`; one that arrives meanwhile is kept by the kernel.
"""

import signal
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGINT)


def main() -> NoReturn:
    """Run until SIGTERM or SIGINT; exits with 0 within a second of it, and never before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    from . import lean

    lean.prepare()
    from .program import run

    run(ENDING)


if __name__ == "__main__":
    main()

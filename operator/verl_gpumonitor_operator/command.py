# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command of an injected container: the webhook writes it, and the controller knows its own container by it."""

from typing import Final

from verl_gpumonitor.model.wiring import SIDECAR_PROGRAM

_PROGRAM: Final = SIDECAR_PROGRAM
COMMAND: Final = (
    "/bin/sh",
    "-c",
    f"if [ -x {_PROGRAM} ]; then exec {_PROGRAM}; fi; trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done",
)
"""Under a foreign image (see rescue) there is no program: it then sleeps until it is told to end. The `&` and `wait`
let the shell hear the signal while it sleeps."""

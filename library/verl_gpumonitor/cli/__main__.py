# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_gpumonitor.cli` is `gpumon`."""

from .main import main

main(prog_name="gpumon")

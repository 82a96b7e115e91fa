# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon` itself: its list is right, shows an example for each command, and imports none of them."""

import subprocess
import sys

import click
import pytest

from verl_gpumonitor.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert (command.name, command.short_help) == (name, COMMANDS[name][1])
    assert (command.epilog or "").startswith(f"Example: gpumon {name}")


def test_the_list_imports_no_command() -> None:
    program = (
        "import sys\nfrom verl_gpumonitor.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.startswith(('rich', 'jinja2', 'verl_gpumonitor.diagnosis'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "top" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"

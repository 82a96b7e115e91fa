# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon` itself: its list is right, shows an example for each command, and imports none of them."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

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


@pytest.mark.parametrize(
    ("arguments", "code", "usage"),
    [
        pytest.param(["nothing"], 2, "Usage: main [", id="a command that does not exist"),
        pytest.param(["--nothing"], 2, "Usage: main [", id="an option that does not exist"),
        pytest.param(["report"], 2, "Usage: main report [", id="an argument is missing"),
        pytest.param(["diagnose", "nothing.csv"], 2, "", id="a file is missing"),
    ],
)
def test_all_errors_begin_alike(arguments: list[str], code: int, usage: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code
    assert done.stderr.startswith(usage)
    assert done.stderr.splitlines()[-1].startswith("gpumon: ")
    assert "Error:" not in done.stderr


def test_what_cannot_be_written_is_said_alike(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text("timestamp,index,utilization.gpu\n0,0,50\n5,0,50\n")
    done = CliRunner().invoke(main, ["report", str(log), "-o", str(tmp_path / "none" / "a.html")])
    assert (done.exit_code, done.stderr) == (1, f"gpumon: {tmp_path / 'none' / 'a.html'}: No such file or directory\n")


def test_without_a_command_there_is_help() -> None:
    done = CliRunner().invoke(main, [])
    assert "Commands:" in done.output
    assert "gpumon:" not in done.output

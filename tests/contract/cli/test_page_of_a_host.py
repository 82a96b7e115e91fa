# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""docs/host.md does what it says: its commands are run one after another, on simulated GPUs, in empty folders."""

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import simgpu
import yaml

from verl_gpumonitor.cli.main import main
from verl_gpumonitor.diagnosis.coverage import least_steps
from verl_gpumonitor.diagnosis.history import WINDOW_SECONDS
from verl_gpumonitor.diagnosis.thresholds import Thresholds

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "host.md").read_text()
RUNS_SECONDS = 4.0
"""After this a command that runs until Ctrl-C gets one."""
LONG = "--duration 1h"
"""Nobody waits for that: such a command gets Ctrl-C as well."""
ENDS_SECONDS = 60.0
"""Any other has ended by then, however busy the machine is."""


def runs_on(line: str) -> bool:
    """Whether a command runs until somebody ends it."""
    return LONG in line or (
        line.startswith(("gpumon log", "gpumon top", "gpumon record"))
        and not re.search(r"--(count|duration|once|help)", line)
    )


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    return [line.removeprefix("$ ") for block in blocks("console", page) for line in block.splitlines()]


COMMANDS = commands(PAGE)


def is_run(line: str) -> bool:
    """Whether a command can be run by itself; the others have tests of their own."""
    return not line.startswith(("pip ", "curl ", "gpumon serve"))


def written(line: str) -> str | None:
    """Name of the file that a command writes."""
    found = re.search(r"-o (\S+)", line)
    return found[1] if found else None


def parts() -> Iterator[tuple[str, list[str]]]:
    """Each section with commands to run, by its title, and those before it whose files it reads."""
    done: list[str] = []
    for section in re.split(r"^#+ ", PAGE, flags=re.MULTILINE):
        lines = [line for line in commands(section) if is_run(line)]
        if lines:
            read = {word for line in lines for word in line.split()}
            yield section.splitlines()[0], [line for line in done if written(line) in read] + lines
        done += lines


PARTS = dict(parts())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Shell:
    """Runs lines of the page, in one folder of one machine."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.port = free_port()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        state = simgpu.init(folder / "state", gpus=4).path
        marks = {"GPUMONITOR_MARKS_PORT": str(free_port())}
        self._environ = {
            **os.environ,
            **marks,
            "FAKENVML_STATE": str(state),
            "LD_LIBRARY_PATH": str(library),
            "PATH": path,
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        # Ports of this test's own: others run beside it.
        # A second between two samples is for people.
        quick = line.replace(" -l 1 ", " -l 0.2 ").replace(" -l 5 --count 120 ", " -l 0.2 --count 20 ")
        quick = quick.replace(" --from +2h30m --to +3h ", " --from +1 --to +3 ")
        words = shlex.split(quick.replace("9410", str(self.port)))
        if words[:2] == ["gpumon", "serve"]:
            words += ["--marks-port", "0"]
        if words[:2] == ["gpumon", "record"]:
            words += ["--no-marks"]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, line: str) -> tuple[int, str, str]:
        """Exit code, and what it printed; Ctrl-C for what would run on."""
        process = self.start(line)
        try:
            out, err = process.communicate(timeout=RUNS_SECONDS if runs_on(line) else ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def shell(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("host"), library)


@pytest.fixture
def serving(shell: Shell) -> Iterator[str]:
    """Address of a running `gpumon serve`."""
    (line,) = [line for line in COMMANDS if line.startswith("gpumon serve")]
    process = shell.start(line)
    assert process.stderr is not None
    assert f":{shell.port}/metrics" in process.stderr.readline()
    yield f"http://127.0.0.1:{shell.port}"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 0


@pytest.mark.parametrize("title", PARTS)
def test_the_commands_of_the_page(title: str, library: Path, tmp_path: Path) -> None:
    """In their order, as later ones read what earlier ones wrote."""
    shell = Shell(tmp_path, library)
    for line in PARTS[title]:
        code, out, err = shell.run(line)
        assert code == 0, f"{line}: {err}"
        name = written(line)
        assert out or name, line
        if name:
            assert (tmp_path / name).stat().st_size > 0, line


def test_without_a_gpu_simulated_ones_answer(tmp_path: Path) -> None:
    (recipe,) = blocks("sh")
    lines = recipe.replace("/tmp/gpus", str(tmp_path / "gpus")).replace("--seconds 600", "--seconds 30")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # What was begun in the background ends with the shell.
    done = subprocess.run(
        ["bash", "-ec", f"trap 'kill $!' EXIT\n{lines.replace('gpumon top', 'sleep 2; gpumon top')}"],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=ENDS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "8 GPUs" in done.stdout
    assert "60.0" in done.stdout


def test_the_lengths_of_the_page_are_those_of_the_rules() -> None:
    rows = re.findall(r"^\| (`.*?) \| (\d+) steps?.*?\| (\d+) min", PAGE, flags=re.MULTILINE)
    told = {
        reason: (int(steps), int(minutes)) for names, steps, minutes in rows for reason in re.findall(r"\w+", names)
    }
    with_stages, without = (least_steps(Thresholds(), stages_told=stages) for stages in (True, False))
    assert told.pop("Hang")[1] == round((WINDOW_SECONDS + Thresholds().hang.untold_idle_seconds) / 60)
    assert told == {reason: (with_stages[reason], without[reason] * WINDOW_SECONDS / 60) for reason in with_stages}


def test_each_command_is_in_a_part() -> None:
    assert {line for lines in PARTS.values() for line in lines} == {line for line in COMMANDS if is_run(line)}


def test_what_is_served_can_be_fetched(shell: Shell, serving: str) -> None:
    (line,) = [line for line in COMMANDS if line.startswith("curl ")]
    end = time.monotonic() + 15
    while True:
        if shutil.which("curl"):
            code, text, err = shell.run(line)
            assert code == 0, err
        else:
            with urllib.request.urlopen(serving + "/metrics", timeout=5) as answer:
                text = answer.read().decode()
        if "gpumonitor_gpu_utilization_ratio{" in text:
            break
        assert time.monotonic() < end
        time.sleep(0.2)
    assert 'namespace="host"' in text
    assert f'pod="{socket.gethostname()}"' in text


def test_every_command_of_gpumon_is_on_the_page() -> None:
    """But for what wants a cluster: that is on the page of the GPUMonitor, whose commands are run by test_bundle."""
    import click

    used = {line.split()[1] for line in COMMANDS if line.startswith("gpumon ")} | {"bundle"}
    assert set(main.list_commands(click.Context(main))) <= used | {"--help"}


def test_what_pip_is_to_install_exists() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (line,) = [line for line in COMMANDS if line.startswith("pip ")]
    name, extra = re.fullmatch(r"pip install '([\w-]+)\[(\w+)\]'", line).groups()  # type: ignore[union-attr]
    assert name == project["name"]
    assert extra in project["optional-dependencies"]


def test_the_loop_of_the_page(shell: Shell, tmp_path: Path) -> None:
    (loop,) = blocks("python")
    before = "total_steps, prompts = 20, []\ngenerate = update = save = lambda *_: None\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", before + loop],
        cwd=tmp_path,
        env=shell._environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "after_checkpoint" in (tmp_path / "resources.csv").read_text()


def test_the_unit_of_systemd_starts_a_command_that_exists() -> None:
    (block,) = blocks("ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block)
    program, command, *options = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "gpumon"
    import click

    found = main.get_command(click.Context(main), command)
    assert found is not None
    known = {option for parameter in found.params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known


def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    (block,) = blocks("yaml")
    shutil.copy(REPOSITORY / "charts" / "gpumonitor" / "files" / "rules.yaml", tmp_path)
    config = tmp_path / "prometheus.yaml"
    config.write_text(block)
    assert yaml.safe_load(block)["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:9410"]}]
    promtool = shutil.which("promtool") or str(REPOSITORY / ".cache" / "tools" / "promtool")
    subprocess.run([promtool, "check", "config", config], check=True, capture_output=True)

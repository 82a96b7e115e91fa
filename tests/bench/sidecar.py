# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.sidecar`: what the sidecar costs with 8 simulated GPUs, beside nvitop-exporter.

Real processes on the simulated driver library, all at the same time, so that a busy machine treats them alike; each
has simulated GPUs of its own. At first calls cost what the simulation takes, then 30 us of CPU more, as an ioctl that
polls. The sidecar samples each second, reports over TLS each 15 s, and is scraped each 15 s: alone, and with all
sources of stages on (`sidecar_ray`), as on a worker and as on a head. The same calls and nothing else
(`sidecar_calls`) show what no program could save.
nvitop-exporter is measured where it can be installed, in an environment of its own under .cache/bench.

CPU is the process's own time, the kernel's part included; memory is what /proc says at the end. After that the
sidecar's parts go through many collections in fast forward (`sidecar_forward`), with processes on the GPUs that come
and go, to see whether memory stays flat. Six minutes in all.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIMULATION = ROOT / "tests" / "fakenvml"
sys.path.insert(0, str(SIMULATION))  # As pytest does by its settings.

import simgpu  # noqa: E402 - its folder is known from here on

from tests.bench.sidecar_ray import IP, Job, answer, in_a_pod  # noqa: E402
from tests.contract.sidecar.controller import SERVER_NAME, Authority, Controller  # noqa: E402
from verl_gpumonitor.model import wiring  # noqa: E402
from verl_gpumonitor_sidecar.settings import ENV_MARKS_PORT  # noqa: E402

CACHE = ROOT / ".cache" / "bench"
PROGRAM = Path(sys.executable).parent / "gpumon-sidecar"
GPUS = 8
SCRAPE_SECONDS = 15.0
SETTLE_SECONDS = 70.0
"""Until imports and opening are over, and what is looked at often at first: processes that are none of Ray's."""
BUDGET = (
    "budget: NVML alone 30 MiB, 0.3 % of a core at 30 us a call, 70 calls/s; all sources 35 MiB and 0.5 % on a worker,"
    " 45 MiB and 1 % on a head; 120 series a GPU; flat over 100,000 collections"
)
MEANING = """\
RSS, private: resident memory, and the part that no other process shares. CPU: of one core, driver's part included.
a call: CPU that a call into the driver takes beyond the simulation's own. series: on /metrics, for each GPU.
the bare calls: the sidecar's calls at its pace, and nothing else; the rest of its CPU is what it makes of them.
worker, head: all sources on (titles of 8 processes among 50 in a namespace of its own, Ray's agent each 5 s, on the
head the State API each second, else the head's word in the answers), with another stage each 5 s; marked: the job
marks its stages, and titles and agent rest. Compare within a run: a busy machine doubles the CPU."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one program cost while it ran."""

    program: str
    call_microseconds: int
    rss_mib: float
    private_mib: float
    cpu_percent: float
    calls_per_second: float
    series_per_gpu: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """Memory over many collections in fast forward."""

    collections: int
    first_mib: float
    """After the first tenth, when all caches are warm."""
    last_mib: float
    highest_mib: float
    series_first: int
    series_last: int
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    options = _parser().parse_args(arguments)
    subprocess.run(["make", "-s", "-C", str(SIMULATION)], check=True)
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        os.environ["FAKENVML_STATE"] = str(where / "gpus")
        simgpu.init(where / "gpus", gpus=GPUS)
        together = list(programs(where, options.without_nvitop))
        for call_microseconds in (0, 30):
            print(f"{len(together)} programs at {call_microseconds} us a call, {options.seconds:.0f} s", flush=True)
            costs += measure(together, where, call_microseconds=call_microseconds, seconds=options.seconds)
        flatness = run_fast_forward(options.collections) if options.collections else None
    _print(costs, flatness)
    if options.json:
        result = {"costs": [asdict(cost) for cost in costs], "flatness": asdict(flatness) if flatness else None}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sidecar", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="time that the programs are measured")
    parser.add_argument("--collections", type=int, default=100_000, help="collections in fast forward; 0: none")
    parser.add_argument("--without-nvitop", action="store_true", help="install and measure nothing else")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser


# ---- the programs ----


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something to measure."""

    name: str
    command: list[str]
    environ: dict[str, str]
    apart: bool = False
    """It is a child of the command, in a process namespace of its own."""
    port: int | None = None
    """Of its /metrics; None: it has none."""
    around: Callable[[], "Iterator[dict[str, str]]"] = lambda: iter([{}])
    """What must run beside it, and the variables that tell it so."""


def programs(where: Path, without_nvitop: bool) -> Iterator[Program]:
    """Yield the sidecar as it runs in a pod, alone and with all sources on, its bare calls, and the other exporter."""
    yield Program(name="the bare calls", command=[sys.executable, "-m", "tests.bench.sidecar_calls"], environ={})
    yield Program(
        name="gpumon-sidecar",
        command=[str(PROGRAM)],
        environ=pod_environ(19_410),
        port=19_410,
        around=lambda: reporting(where),
    )
    for name, node_type, port, marks_port in (
        ("worker", "worker", 19_411, None),
        ("marked worker", "worker", 19_414, 19_424),
        ("head", "head", 19_413, None),
    ):
        yield Program(
            name=f"gpumon-sidecar, {name}",
            command=in_a_pod([str(PROGRAM)], GPUS),
            apart=True,
            environ=pod_environ(port)
            | {
                wiring.ENV_RAY_NODE_TYPE: node_type,
                wiring.ENV_POD_IP: IP,
                wiring.ENV_SHARED_PROCESSES: "1",
                ENV_MARKS_PORT: str(marks_port or port + 10),
            },
            port=port,
            around=partial(reporting_on_ray, where, head=node_type == "head", marks_port=marks_port),
        )
    other = None if without_nvitop else nvitop()
    if other:
        yield Program(
            name=other[0],
            command=[other[1], "--bind-address", "127.0.0.1", "--port", "19412", "--interval", "1"],
            environ={},
            port=19_412,
        )


def pod_environ(port: int) -> dict[str, str]:
    """Return what a pod of the whole node is told."""
    return {
        wiring.ENV_POD_NAMESPACE: "team",
        wiring.ENV_POD_NAME: "grpo-8b-worker-0",
        wiring.ENV_POD_UID: "3f2a7c1e-0000-4000-8000-000000000000",
        wiring.ENV_NODE_NAME: "node-a",
        wiring.ENV_GPUS_REQUESTED: str(GPUS),
        wiring.ENV_METRICS_PORT: str(port),
        ENV_MARKS_PORT: "0",
    }


def reporting(where: Path, *, stages: bool = False) -> Iterator[dict[str, str]]:
    """Run a controller to report to. `stages`: it passes on what a head says."""
    authority = Authority()
    controller = Controller(authority.server_context(where))
    if stages:
        controller.answer = answer
    (where / "token").write_text("token")
    yield {
        wiring.ENV_REPORT_URL: controller.url,
        wiring.ENV_REPORT_SERVER_NAME: SERVER_NAME,
        wiring.ENV_REPORT_CA: authority.pem,
        "GPUMON_REPORT_TOKEN_FILE": str(where / "token"),
    }
    controller.close()


def reporting_on_ray(where: Path, *, head: bool, marks_port: int | None) -> Iterator[dict[str, str]]:
    """The same, and a job on Ray, as a worker's sidecar meets it or a head's."""
    job = Job(GPUS, head=head, marks_port=marks_port)
    try:
        for environ in reporting(where, stages=not head):
            yield environ | {
                wiring.ENV_RAY_METRICS_URL: job.ray.url + "/metrics",
                wiring.ENV_RAY_DASHBOARD_URL: job.ray.url,
            }
    finally:
        job.close()


def nvitop() -> tuple[str, str] | None:
    """Return name and path of nvitop-exporter, installed where it is not yet; None where that is not possible."""
    where = CACHE / "nvitop"
    program = where / "bin" / "nvitop-exporter"
    try:
        if not program.exists():
            print("installing nvitop-exporter to compare with (an environment of its own)", flush=True)
            venv.create(where, with_pip=True, clear=True)
            pip = [str(where / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", "nvitop-exporter"], check=True, timeout=300)
        shown = subprocess.run([program, "--version"], check=True, timeout=60, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvitop-exporter is not measured: {error}", flush=True)
        return None
    return f"nvitop-exporter {shown.stdout.split()[-1].strip('()')}", str(program)


# ---- measuring ----


def measure(together: list[Program], where: Path, *, call_microseconds: int, seconds: float) -> list[Cost]:
    """Run the programs at the same time, let them settle, and see what each takes in so many seconds."""
    with ExitStack() as running:
        started = [running.enter_context(_started(program, where, call_microseconds)) for program in together]
        time.sleep(SETTLE_SECONDS)
        for one in started:
            one.scrape()
        before = [one.spent() for one in started]
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            time.sleep(min(SCRAPE_SECONDS, end - now))
            for one in started:
                one.scrape()
        return [one.cost(call_microseconds, spent) for one, spent in zip(started, before, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a process has taken since its start."""

    at: float
    cpu_seconds: float
    calls: int


@dataclass(kw_only=True)
class Started:
    """A program that runs."""

    program: Program
    pid: int
    gpus: simgpu.StateFile
    page: str = ""

    def scrape(self) -> None:
        if self.program.port is not None:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.program.port}/metrics", timeout=20) as answer:
                self.page = answer.read().decode()

    def spent(self) -> Spent:
        calls = sum(client.calls for client in simgpu.clients(self.gpus))
        # The process's CPU clock, as clock_getcpuclockid gives it: /proc counts in hundredths of a second.
        return Spent(at=time.monotonic(), cpu_seconds=time.clock_gettime((~self.pid << 3) | 2), calls=calls)

    def cost(self, call_microseconds: int, before: Spent) -> Cost:
        """Return what it took since then."""
        now = self.spent()
        rss, private = _memory_mib(self.pid)
        return Cost(
            program=self.program.name,
            call_microseconds=call_microseconds,
            rss_mib=rss,
            private_mib=private,
            cpu_percent=100 * (now.cpu_seconds - before.cpu_seconds) / (now.at - before.at),
            calls_per_second=(now.calls - before.calls) / (now.at - before.at),
            series_per_gpu=_series_per_gpu(self.page),
            seconds=now.at - before.at,
        )


@contextmanager
def _started(program: Program, where: Path, call_microseconds: int) -> Iterator[Started]:
    """Start a program on GPUs of its own, and what must run beside it."""
    gpus = simgpu.init(where / program.name.replace(" ", "-"), gpus=GPUS)
    if call_microseconds:
        simgpu.delay(call_microseconds, spin=True, file=gpus)
    own = {"FAKENVML_STATE": str(gpus.path)}
    with contextmanager(program.around)() as environ, _running(program, environ | own) as pid:
        yield Started(program=program, pid=pid, gpus=gpus)


@contextmanager
def _running(program: Program, environ: dict[str, str]) -> Iterator[int]:
    known = {"PATH": os.environ["PATH"]}
    library = {"LD_LIBRARY_PATH": str(SIMULATION / "build")}
    process = subprocess.Popen(
        program.command,
        env=known | library | program.environ | environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield _only_child(process.pid) if program.apart else process.pid
    finally:
        process.kill()
        process.wait()


def _only_child(pid: int) -> int:
    """Return the pid of a process's child, as this namespace knows it, once there is one."""
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        time.sleep(0.05)
    return int(children[0])


def _series_per_gpu(page: str) -> float:
    of_gpus = [line for line in page.splitlines() if not line.startswith("#") and re.search(r"\buuid=", line)]
    return len(of_gpus) / GPUS


def _memory_mib(pid: int) -> tuple[float, float]:
    """Return resident memory, and the part that is the process's alone."""
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    private = int(rollup["Private_Clean"]) + int(rollup["Private_Dirty"])
    return int(rollup["Rss"]) / 1024, private / 1024


# ---- fast forward ----


def run_fast_forward(collections: int) -> Flatness:
    """Run `sidecar_forward` while processes come and go on the GPUs."""
    print(f"{collections} collections in fast forward", flush=True)
    environ = dict(os.environ) | {"LD_LIBRARY_PATH": str(SIMULATION / "build")}
    command = [sys.executable, "-m", "tests.bench.sidecar_forward", str(collections)]
    began = time.monotonic()
    lines: list[dict[str, float]] = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(json.loads(text))
            _churn()
            if len(lines) % 10 == 0:
                done, mib = lines[-1]["collections"], lines[-1]["rss_mib"]
                print(f"  {done:.0f} collections, {mib:.2f} MiB, {time.monotonic() - began:.0f} s", flush=True)
    if process.returncode:
        raise SystemExit("the fast forward failed")
    warm = lines[len(lines) // 10 :]
    return Flatness(
        collections=collections,
        first_mib=warm[0]["rss_mib"],
        last_mib=warm[-1]["rss_mib"],
        highest_mib=max(line["rss_mib"] for line in warm),
        series_first=int(warm[0]["series"]),
        series_last=int(warm[-1]["series"]),
        seconds=time.monotonic() - began,
    )


def _churn() -> None:
    """Let some processes' contexts come and go."""
    for index in range(GPUS):
        with simgpu.Gpu(index) as gpu:
            gpu.allocate((index + 1) * 2**28)


# ---- output ----


def _row(cost: Cost) -> str:
    return (
        f"{cost.program:29} {cost.call_microseconds:>5} us {cost.rss_mib:>8.1f} {cost.private_mib:>8.1f}"
        f" {cost.cpu_percent:>8.2f} {cost.calls_per_second:>8.1f} {cost.series_per_gpu:>8.1f}"
    )


def _print(costs: list[Cost], flatness: Flatness | None) -> None:
    print(f"\n{'':29} {'a call':>8} {'RSS MiB':>8} {'private':>8} {'CPU %':>8} {'calls/s':>8} {'series':>8}")
    for cost in costs:
        print(_row(cost))
    if flatness is not None:
        print(
            f"fast forward: {flatness.collections} collections in {flatness.seconds:.0f} s;"
            f" {flatness.first_mib:.2f} MiB after a tenth, {flatness.last_mib:.2f} at the end"
            f" (highest {flatness.highest_mib:.2f}); series {flatness.series_first} and {flatness.series_last}"
        )
    print(MEANING)
    print(BUDGET)


if __name__ == "__main__":
    sys.exit(main())

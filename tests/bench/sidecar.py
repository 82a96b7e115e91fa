# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.sidecar`: what the sidecar costs with 8 simulated GPUs, beside nvitop-exporter.

Real processes, one after another, on the simulated driver library: at first with calls that cost nothing, then with
30 us of CPU each, as an ioctl that polls. The sidecar samples each second, reports over TLS each 15 s, and is scraped
each 15 s. CPU is the process's own time, so that a busy machine changes it little; memory is what /proc says at the
end. After that the sidecar's parts go through many collections in fast forward, with processes on the GPUs that come
and go, to see whether memory stays flat. nvitop-exporter is measured the same way where it can be installed, in an
environment of its own under .cache/bench.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIMULATION = ROOT / "tests" / "fakenvml"
sys.path.insert(0, str(SIMULATION))  # As pytest does by its settings.

import simgpu  # noqa: E402 - its folder is known from here on

from tests.contract.sidecar.controller import SERVER_NAME, Authority, Controller  # noqa: E402
from tests.contract.sidecar.ray import Ray, agent_page  # noqa: E402
from verl_gpumonitor.model import wiring  # noqa: E402

CACHE = ROOT / ".cache" / "bench"
PROGRAM = Path(sys.executable).parent / "gpumon-sidecar"
GPUS = 8
SCRAPE_SECONDS = 15.0
SETTLE_SECONDS = 6.0
BUDGET = (
    "budget: NVML alone 30 MiB, 0.3 % of a core at 30 us a call, 70 calls/s; all sources 35 MiB, 0.5 %;"
    " 120 series a GPU; flat over 100,000 collections"
)


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
        for call_microseconds in (0, 30):
            for program in programs(where, options.without_nvitop):
                costs.append(measure(program, call_microseconds=call_microseconds, seconds=options.seconds))
                print(_row(costs[-1]), flush=True)
        simgpu.clear_faults()
        flatness = run_fast_forward(options.collections) if options.collections else None
    _print(costs, flatness)
    if options.json:
        result = {"costs": [asdict(cost) for cost in costs], "flatness": asdict(flatness) if flatness else None}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sidecar", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="time that each program is measured")
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
    port: int
    around: Callable[[], "Iterator[dict[str, str]]"] = lambda: iter([{}])
    """What must run beside it, and the variables that tell it so."""


def programs(where: Path, without_nvitop: bool) -> Iterator[Program]:
    """Yield the sidecar as it runs in a pod, with Ray's agent beside it, and the other exporter."""
    yield Program(
        name="gpumon-sidecar",
        command=[str(PROGRAM)],
        environ=pod_environ(19_410),
        port=19_410,
        around=lambda: reporting(where),
    )
    yield Program(
        name="gpumon-sidecar + Ray",
        command=[str(PROGRAM)],
        environ=pod_environ(19_411) | {wiring.ENV_RAY_NODE_TYPE: "worker"},
        port=19_411,
        around=lambda: reporting_on_ray(where),
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
    }


def reporting(where: Path) -> Iterator[dict[str, str]]:
    """Run a controller to report to."""
    authority = Authority()
    controller = Controller(authority.server_context(where))
    (where / "token").write_text("token")
    yield {
        wiring.ENV_REPORT_URL: controller.url,
        wiring.ENV_REPORT_SERVER_NAME: SERVER_NAME,
        wiring.ENV_REPORT_CA: authority.pem,
        "GPUMON_REPORT_TOKEN_FILE": str(where / "token"),
    }
    controller.close()


def reporting_on_ray(where: Path) -> Iterator[dict[str, str]]:
    """The same, and an agent whose page is as long as a worker's."""
    ray = Ray()
    page = agent_page(list(range(GPUS)))
    filler = b'ray_component_uss_bytes{Component="ray::WorkerDict",NodeAddress="10.0.0.9",pid="1"} 1.0\n'
    ray.pages["/metrics"] = filler * ((72_000 - len(page)) // len(filler)) + page
    for environ in reporting(where):
        yield environ | {wiring.ENV_RAY_METRICS_URL: ray.url + "/metrics"}
    ray.close()


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


def measure(program: Program, *, call_microseconds: int, seconds: float) -> Cost:
    """Run a program, let it settle, and see what it takes in so many seconds."""
    simgpu.clear_faults()
    if call_microseconds:
        simgpu.delay(call_microseconds, spin=True)
    with contextmanager(program.around)() as environ, _running(program, environ) as pid:
        time.sleep(SETTLE_SECONDS)
        _scrape(program.port)
        began, cpu, calls = time.monotonic(), _cpu_seconds(pid), _calls(pid)
        end = began + seconds
        while (now := time.monotonic()) < end:
            time.sleep(min(SCRAPE_SECONDS, end - now))
            page = _scrape(program.port)
        elapsed = time.monotonic() - began
        rss, private = _memory_mib(pid)
        return Cost(
            program=program.name,
            call_microseconds=call_microseconds,
            rss_mib=rss,
            private_mib=private,
            cpu_percent=100 * (_cpu_seconds(pid) - cpu) / elapsed,
            calls_per_second=(_calls(pid) - calls) / elapsed,
            series_per_gpu=_series_per_gpu(page),
            seconds=elapsed,
        )


@contextmanager
def _running(program: Program, environ: dict[str, str]) -> Iterator[int]:
    known = {"PATH": os.environ["PATH"], "FAKENVML_STATE": os.environ["FAKENVML_STATE"]}
    library = {"LD_LIBRARY_PATH": str(SIMULATION / "build")}
    process = subprocess.Popen(
        program.command,
        env=known | library | program.environ | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def _series_per_gpu(page: str) -> float:
    of_gpus = [line for line in page.splitlines() if not line.startswith("#") and re.search(r"\buuid=", line)]
    return len(of_gpus) / GPUS


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> tuple[float, float]:
    """Return resident memory, and the part that is the process's alone."""
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    private = int(rollup["Private_Clean"]) + int(rollup["Private_Dirty"])
    return int(rollup["Rss"]) / 1024, private / 1024


def _calls(pid: int) -> int:
    return sum(client.calls for client in simgpu.clients() if client.pid == pid)


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
        f"{cost.program:24} {cost.call_microseconds:>5} us {cost.rss_mib:>8.1f} {cost.private_mib:>8.1f}"
        f" {cost.cpu_percent:>8.2f} {cost.calls_per_second:>8.1f} {cost.series_per_gpu:>8.1f}"
    )


def _print(costs: list[Cost], flatness: Flatness | None) -> None:
    print(f"\n{'':24} {'a call':>8} {'RSS MiB':>8} {'private':>8} {'CPU %':>8} {'calls/s':>8} {'series':>8}")
    for cost in costs:
        print(_row(cost))
    if flatness is not None:
        print(
            f"fast forward: {flatness.collections} collections in {flatness.seconds:.0f} s;"
            f" {flatness.first_mib:.2f} MiB after a tenth, {flatness.last_mib:.2f} at the end"
            f" (highest {flatness.highest_mib:.2f}); series {flatness.series_first} and {flatness.series_last}"
        )
    print(BUDGET)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""ResourceMonitor without a GPU: labels, history, files, threads, forks. Real GPUs' part is in the contract tests."""

import csv
import fcntl
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_gpumonitor import ResourceMonitor, ResourceSample
from verl_gpumonitor.model.samples import GpuSample
from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason
from verl_gpumonitor.monitor import MIN_INTERVAL_SECONDS, _Gpus, describe
from verl_gpumonitor.reading.reader import Reading
from verl_gpumonitor.reading.watch import CallWatch
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT
from verl_gpumonitor.stages.sources.marks import MarkReceiver

GIB = 2**30
GPU = GpuSample(
    uuid="GPU-a",
    index=0,
    model="NVIDIA H100, 80GB",
    utilization=0.97,
    memory_used_bytes=60 * GIB,
    memory_total_bytes=80 * GIB,
    power_watts=412.4,
    temperature_celsius=63.0,
)


class FakeReader:
    """A reader that answers, or hangs until it is let go."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.go = threading.Event()
        self.go.set()
        self.raises: Exception | None = None

    def use(self, watch: CallWatch) -> None:
        raise NotImplementedError

    def read_all(self, *, skip: frozenset[str], processes: bool) -> Reading:
        assert not skip
        assert not processes
        self.go.wait(20)
        if self.raises is not None:
            raise self.raises
        return self.reading

    def read_memory(self, *, skip: frozenset[str]) -> Reading:
        raise NotImplementedError


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[MarkReceiver]:
    receiver = MarkReceiver(0)
    monkeypatch.setenv(ENV_MARKS_PORT, str(receiver.port))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield receiver
    receiver.close()


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader(Reading(gpus=(GPU,)))


@pytest.fixture
def monitor(receiver: MarkReceiver, reader: FakeReader) -> Iterator[ResourceMonitor]:
    monitor = ResourceMonitor(interval=0.1)
    monitor._gpus = _Gpus(lambda: reader)
    yield monitor
    monitor.stop()
    assert monitor._sender is not None
    monitor._sender.close()


def test_collect_has_cpu_memory_and_each_gpu(monitor: ResourceMonitor) -> None:
    sample = monitor.collect()
    assert sample.gpus == (GPU,)
    assert sample.memory_percent is not None
    assert 0 < sample.memory_percent <= 100
    assert abs(sample.t - time.time()) < 5
    plain = sample.as_dict()
    assert plain["gpus"][0]["utilization"] == 0.97
    assert plain["memory_percent"] == sample.memory_percent


def test_log_writes_one_line_with_its_label(monitor: ResourceMonitor, caplog: pytest.LogCaptureFixture) -> None:
    monitor.log("after_rollout")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("[after_rollout] | CPU ")
    assert line.endswith("| GPU0 97% 60.0/80.0 GiB 75% 412 W 63 C")


def test_a_line_is_seen_under_verls_logging(receiver: MarkReceiver) -> None:
    """verl calls basicConfig with WARNING, and many programs call nothing at all."""
    program = "from verl_gpumonitor import ResourceMonitor\nResourceMonitor(interval=1).log('epoch_3')\n"
    for before in ("import logging; logging.basicConfig(level=logging.WARNING)\n", ""):
        done = subprocess.run([sys.executable, "-c", before + program], capture_output=True, text=True, check=True)
        assert "[epoch_3] | CPU" in done.stderr


@pytest.mark.parametrize("label", ["start", "epoch_3", "", 'a,b "c"', "é" * 300])
def test_any_label_will_do(monitor: ResourceMonitor, label: str, caplog: pytest.LogCaptureFixture) -> None:
    with monitor.stage(label):
        assert monitor.log(label).stage == label
    assert all("\n" not in record.getMessage() for record in caplog.records)


class Word(str, Enum):  # noqa: UP042 - as programs for Python 3.10 have them
    GEN = "gen"


class Number:
    """A number as NumPy and torch have them: it converts itself, and JSON knows nothing of it."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __int__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value == other

    __hash__ = None  # type: ignore[assignment]  # as arrays


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        pytest.param(Word.GEN, "gen", id="an enum is its word"),
        pytest.param(b"gen", "gen", id="bytes"),
        pytest.param(5, "5", id="a number"),
        pytest.param(None, "", id="None is no name"),
        pytest.param('a,b\n"c"\n', 'a,b?"c"', id="several lines"),
        pytest.param("\ud800", "?", id="half a pair"),
    ],
)
def test_any_name_reaches_log_file_and_sidecar(
    receiver: MarkReceiver, reader: FakeReader, tmp_path: Path, stage: Any, named: str
) -> None:
    monitor = ResourceMonitor(path=tmp_path / "log.jsonl")
    monitor._gpus = _Gpus(lambda: reader)
    with monitor.stage(stage, role=stage):
        inside = monitor.collect()
    assert (inside.stage, inside.role) == (named, named)
    assert monitor.log(stage).as_dict()["stage"] == named
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    assert [i.stage for i in receiver.word(time.time()).intervals] == [named or "other"]


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param(Number(3), 3, id="a number of NumPy or torch"),
        pytest.param(3.0, 3, id="a whole float"),
        pytest.param(True, 1, id="a bool"),
        pytest.param(3.5, None, id="a fraction"),
        pytest.param(float("nan"), None, id="not a number"),
        pytest.param(-1, None, id="below zero"),
        pytest.param(2**70, None, id="beyond what JSON's readers know"),
        pytest.param("3", None, id="a word"),
        pytest.param([3], None, id="a list"),
    ],
)
def test_any_step_leaves_its_stage_intact(
    receiver: MarkReceiver, reader: FakeReader, tmp_path: Path, step: Any, number: int | None
) -> None:
    monitor = ResourceMonitor(path=tmp_path / "log.jsonl")
    monitor._gpus = _Gpus(lambda: reader)
    with monitor.stage("gen", step=step):
        plain = monitor.collect().as_dict()
    assert plain["step"] == number
    assert type(plain["step"]) is type(number)
    assert (tmp_path / "log.jsonl").read_text()
    assert [(i.stage, i.step) for i in receiver.word(time.time()).intervals] == [("gen", number)]


def test_samples_carry_the_innermost_stage(monitor: ResourceMonitor) -> None:
    with monitor.stage("step", step=3), monitor.stage("gen", role="rollout", step=3):
        inside = monitor.collect()
    outside = monitor.collect()
    assert (inside.stage, inside.role, inside.step) == ("gen", "rollout", 3)
    assert (outside.stage, outside.role, outside.step) == ("", "", None)
    assert monitor.metrics == [inside, outside]


def test_history_is_bounded(receiver: MarkReceiver, reader: FakeReader) -> None:
    monitor = ResourceMonitor(history=3, marks=False)
    monitor._gpus = _Gpus(lambda: reader)
    samples = [monitor.collect() for _ in range(5)]
    assert monitor.metrics == samples[-3:]


def test_stages_reach_the_sidecar(monitor: ResourceMonitor, receiver: MarkReceiver) -> None:
    with monitor.stage("step", step=7), monitor.stage("gen", step=7):
        monitor.log("step")  # a label, not the end of a step
    now = time.time()
    [interval] = receiver.word(now).intervals
    assert (interval.stage, interval.role, interval.step) == ("gen", "rollout", 7)
    assert [(span.step, span.end is not None) for span in receiver.steps(now)] == [(7, True)]


def test_without_marks_nothing_is_sent(receiver: MarkReceiver, reader: FakeReader) -> None:
    monitor = ResourceMonitor(marks=False)
    monitor._gpus = _Gpus(lambda: reader)
    with monitor.stage("gen"):
        monitor.log("x")
    assert receiver.poll() == 0


def test_background_samples_until_stopped(monitor: ResourceMonitor) -> None:
    threads = threading.active_count()
    monitor.start_background()
    monitor.start_background()
    until = time.monotonic() + 10
    while len(monitor.metrics) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    monitor.stop()
    assert threading.active_count() == threads
    taken = len(monitor.metrics)
    assert taken >= 3
    time.sleep(0.3)
    assert len(monitor.metrics) == taken
    with monitor:
        assert monitor._thread is not None
    assert threading.active_count() == threads


def test_no_thread_outlives_the_program() -> None:
    """A program that forgets `stop` ends at once, quietly, with the code it wanted."""
    program = (
        "import sys, time\nfrom verl_gpumonitor import ResourceMonitor\nmonitor = ResourceMonitor(interval=0.1)\n"
        "monitor.start_background()\ntime.sleep(0.3)\nsys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (7, "")
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


def test_no_gpu_gives_an_empty_list_and_one_warning(
    monitor: ResourceMonitor, reader: FakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.reading = Reading(unavailable=UnavailableReason.NO_LIBRARY, error="LIBRARY_NOT_FOUND", message="-")
    assert [monitor.collect().gpus for _ in range(3)] == [(), (), ()]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "no GPU is monitored: libnvidia-ml.so.1 is not found" in record.getMessage()


def test_a_reader_that_breaks_costs_the_gpus_alone(monitor: ResourceMonitor, reader: FakeReader) -> None:
    monitor.collect()
    reader.raises = RuntimeError("odd binding")
    assert monitor.collect().gpus == ()
    reader.raises = None
    assert monitor.collect().gpus == (GPU,)


def test_a_driver_that_hangs_keeps_nobody(monitor: ResourceMonitor, reader: FakeReader) -> None:
    """The first reading waits its second, the next ones do not wait at all; and values are never old ones."""
    monitor.collect()
    threads = threading.active_count()
    reader.go.clear()
    hung = monitor.collect().gpus
    begin = time.monotonic()
    for _ in range(20):
        hung = monitor.collect().gpus
    assert time.monotonic() - begin < 1.0
    assert [(gpu.state, gpu.utilization) for gpu in hung] == [(GpuState.NOT_RESPONDING, None)]
    assert threading.active_count() == threads + 1
    reader.go.set()
    until = time.monotonic() + 10
    while monitor.collect().gpus != (GPU,):
        assert time.monotonic() < until


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_begins_anew(monitor: ResourceMonitor) -> None:
    monitor.start_background()
    monitor.collect()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = len(monitor.metrics)
            sample = monitor.collect()
            monitor.stop()
            ok = before == 0 and sample.pid == os.getpid() and threading.active_count() == 1
            os.write(write_end, b"yes" if ok else b"no")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 8) == b"yes"
    os.close(read_end)
    os.close(write_end)


def test_a_pickled_monitor_is_a_new_one(monitor: ResourceMonitor, tmp_path: Path) -> None:
    monitor.collect()
    original = ResourceMonitor(interval=7, path=tmp_path / "x.csv", history=2, marks=False)
    copy = pickle.loads(pickle.dumps(original))  # noqa: S301 - our own
    assert (copy.interval, copy._arguments, copy.metrics) == (7, original._arguments, [])
    pickle.dumps(monitor)


def test_nothing_warns_of_a_socket_left_open(receiver: MarkReceiver) -> None:
    program = "from verl_gpumonitor import ResourceMonitor\nResourceMonitor().log('x')\n"
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ResourceWarning" not in done.stderr


def test_csv_has_a_line_for_each_gpu(monitor: ResourceMonitor, tmp_path: Path, reader: FakeReader) -> None:
    path = tmp_path / "resources.csv"
    written = ResourceMonitor(path=path, marks=False)
    written._gpus = _Gpus(lambda: reader)
    with written.stage("gen", step=3):
        written.log('odd, "label"')
    reader.reading = Reading()
    written.collect()
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["stage"], first["step"], first["gpu_name"]) == ('odd, "label"', "3", "NVIDIA H100, 80GB")
    assert (first["gpu_utilization"], first["gpu_memory_used_bytes"]) == ("0.97", str(60 * GIB))
    assert (second["stage"], second["gpu_uuid"], second["gpu_utilization"]) == ("", "", "")


def test_jsonl_comes_back_as_it_was(tmp_path: Path, reader: FakeReader) -> None:
    path = tmp_path / "resources.jsonl"
    written = ResourceMonitor(path=path, marks=False)
    written._gpus = _Gpus(lambda: reader)
    samples = [written.collect(), written.log("x")]
    found = [msgspec.json.decode(line, type=ResourceSample) for line in path.read_bytes().splitlines()]
    assert found == samples


def test_ranks_that_begin_together_write_one_head(reader: FakeReader, tmp_path: Path) -> None:
    """One of them has made the file, and is about to write the head, when another comes with its first sample."""
    late = ResourceMonitor(marks=False, path=tmp_path / "log.csv")
    late._gpus = _Gpus(lambda: reader)
    thread = threading.Thread(target=late.collect)
    with (tmp_path / "log.csv").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.3)
        file.write("the head\n")
    thread.join(10)
    head, line = (tmp_path / "log.csv").read_text().splitlines()
    assert head == "the head"
    assert "GPU-a" in line


def test_a_file_stays_where_it_was_named(reader: FakeReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra and many programs change their folder after they began."""
    monkeypatch.chdir(tmp_path)
    monitor = ResourceMonitor(marks=False, path="log.csv")
    monitor._gpus = _Gpus(lambda: reader)
    monitor.collect()
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")
    monitor.collect()
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def test_a_signals_handler_may_take_a_sample(monitor: ResourceMonitor) -> None:
    """It may have interrupted its own thread wherever that holds a lock; the second of patience bounds it."""
    begin = time.monotonic()
    with monitor._gpus._lock, monitor._lock:
        assert monitor.log("SIGTERM").stage == "SIGTERM"
        monitor.stop()
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_half_a_line_that_a_full_disk_left_spoils_no_other(
    tmp_path: Path, reader: FakeReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    path = tmp_path / f"resources{ending}"
    written = ResourceMonitor(path=path, marks=False)
    written._gpus = _Gpus(lambda: reader)
    written.log("one")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:20]))
        written.log("two")
    written.log("three")
    lines = path.read_text().splitlines()
    assert [label for label in ("one", "two", "three") if any(label in line for line in lines)] == ["one", "three"]
    assert len(lines) == (4 if ending == ".csv" else 3)
    assert sum("is not written: [Errno 28]" in record.getMessage() for record in caplog.records) == 1


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, reader: FakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    written = ResourceMonitor(path=tmp_path / "not there" / "x.csv", marks=False)
    written._gpus = _Gpus(lambda: reader)
    written.collect()
    written.collect()
    [record] = caplog.records
    assert "x.csv is not written" in record.getMessage()


def test_wrong_arguments_are_said_at_once(tmp_path: Path) -> None:
    for wrong in (0.0, -1.0, MIN_INTERVAL_SECONDS / 2, float("nan")):
        with pytest.raises(ValueError, match="interval"):
            ResourceMonitor(interval=wrong)
    with pytest.raises(ValueError, match=r"\.csv or \.jsonl"):
        ResourceMonitor(path=tmp_path / "x.txt")
    with pytest.raises(ValueError, match="history"):
        ResourceMonitor(history=0)


def test_what_is_unknown_is_a_dash() -> None:
    line = describe(ResourceSample(t=0.0, pid=1, gpus=(GpuSample(uuid="GPU-b"), GPU)))
    assert line == "[] | CPU - | memory - | GPU? - - | GPU0 97% 60.0/80.0 GiB 75% 412 W 63 C"


def test_the_package_alone_loads_nothing() -> None:
    program = "import sys, verl_gpumonitor\nprint([m for m in sys.modules if m in ('msgspec', 'pynvml', 'logging')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    program = "import sys\nfrom verl_gpumonitor import ResourceMonitor\nprint('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

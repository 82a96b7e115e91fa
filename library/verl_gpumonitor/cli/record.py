# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon record`: the flight record of this host, as a trace that `diagnose`, `report` and `replay` read."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from verl_gpumonitor.reading.machine import MachineReader
from verl_gpumonitor.reading.sampler import Sampler, SamplerSettings
from verl_gpumonitor.stages.sources.marks import MarkReceiver

from .gpus import await_first
from .recording.file import Output, TraceFile, open_output
from .recording.gpus import PROCESSES_SECONDS
from .recording.processes import Processes
from .recording.ray import RayWatch
from .recording.recorder import TURN_SECONDS, Recorder, Sources, encoded
from .signals import stopped_by_signals
from .times import Seconds, clock

FLUSH_SECONDS: Final = 3.0
"""What is not written yet is lost with us: so much, and what waits to be put in order."""
MAX_INTERVAL_SECONDS: Final = 10.0
"""A longer silence is a gap to the diagnosis, of which nothing is known."""
OFF: Final = ("off", "no", "none")


@click.command(
    "record",
    short_help="Record this host's GPUs and what runs on them.",
    epilog="Example: gpumon record -o run.jsonl.gz --duration 1h",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="File to write, packed if it ends in .gz; `-` is standard output. A file that is there is kept as FILE.1."
    " [default: gpumon-HOST-TIME.jsonl.gz]",
)
@click.option(
    "-l",
    "--interval",
    type=click.FloatRange(0.5, MAX_INTERVAL_SECONDS),
    default=2.0,
    show_default=True,
    help="Seconds between two lines of a GPU. Memory is read twice a second whatever this is.",
)
@click.option("--duration", type=Seconds(), help="End after so long: 90, 10m, 1h30m.")
@click.option(
    "--ray",
    default="auto",
    show_default=True,
    metavar="URL|auto|off",
    help="Ray's dashboard, which tells what runs; auto looks on this host.",
)
@click.option(
    "--proc/--no-proc", default=True, show_default=True, help="Look at processes: titles, memory, and whose they are."
)
@click.option("--marks/--no-marks", default=True, show_default=True, help="Take in what training programs mark.")
def command(*, output: Path | None, interval: float, duration: float | None, ray: str, proc: bool, marks: bool) -> None:
    """Record this host: load, memory, power of each GPU, host memory, what Ray and programs say of stages, faults.

    The file is a trace (gpumonitor-trace/1): see it with `gpumon diagnose`, `report` and `replay`. It can be read up
    to the last few seconds whatever happens to this command. Ends on Ctrl-C, SIGTERM or SIGHUP, which nohup keeps
    away. Command lines are written without the secrets in them.
    """
    if ray not in ("auto", *OFF) and not ray.startswith("http://"):
        raise click.BadParameter(f"{ray!r} is none of http://HOST:PORT, auto, off", param_hint="--ray")
    try:
        with stopped_by_signals() as stop, _sources(interval, ray=ray, proc=proc, marks=marks) as sources:
            _record(sources, output, interval=interval, duration=duration, stop=stop)
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or output or 'the record'}: {error.strerror or error}") from error


@contextmanager
def _sources(interval: float, *, ray: str, proc: bool, marks: bool) -> Iterator[Sources]:
    """Start who is asked. Raises NoGpuError."""
    sampler = Sampler(
        settings=SamplerSettings(
            interval_seconds=min(1.0, interval),
            memory_interval_seconds=TURN_SECONDS,
            processes_interval_seconds=min(PROCESSES_SECONDS, max(2.0, interval)),
        )
    )
    sampler.start()
    watch, receiver = None, None
    processes = Processes() if proc else None
    try:
        await_first(sampler)
        receiver = _receiver(processes) if marks else None
        if ray not in OFF:
            watch = RayWatch(None if ray == "auto" else ray)
            watch.start()
            if watch.latest().trouble and ray != "auto":
                _say(f"Ray's dashboard tells nothing yet: {watch.latest().trouble}")
        yield Sources(
            node=sampler.latest,
            machine=MachineReader(),
            processes=processes,
            ray=watch,
            marks=receiver,
        )
    finally:
        sampler.stop()
        if watch is not None:
            watch.stop()
        if receiver is not None:
            receiver.close()


def _receiver(processes: Processes | None) -> MarkReceiver:
    """Listen for marks, of the job's own processes where these are looked at.

    Where the port is another's, marks are not in the trace; it is tried again now and then.
    """
    receiver = MarkReceiver(wanted=None if processes is None else processes.is_the_jobs)
    if receiver.problem:
        _say(f"marks of training programs are not recorded, somebody else receives them: {receiver.problem}")
    return receiver


def _record(
    sources: Sources, path: Path | None, *, interval: float, duration: float | None, stop: threading.Event
) -> None:
    recorder = Recorder(sources, interval=interval)
    first = recorder.turn()
    header = recorder.header()
    target = _target(path)
    output = open_output(target, encoded(header))
    count = len((header.pods or [])[0].gpus or ())
    kept = output.kept_as if isinstance(output, TraceFile) else None
    if kept is not None:
        _say(f"{target} was there and is kept as {kept}")
    _say(f"recording {count} GPU{'s' * (count != 1)} to {target or 'standard output'}; Ctrl-C ends it")
    try:
        output.write(first)
        why = _loop(recorder, output, duration=duration, stop=stop)
        output.write(recorder.end(why))
        output.flush()
    finally:
        output.close()
    _say(f"{clock(recorder.seconds)} recorded, {recorder.lines} lines")
    for note in recorder.notes:
        _say(note)
    if target is not None:
        _say(f"see it with: gpumon diagnose {target}")


def _loop(recorder: Recorder, output: Output, *, duration: float | None, stop: threading.Event) -> str:
    """Record until told to stop; return why it ended."""
    due = time.monotonic()
    flush_at = due + min(1.0, FLUSH_SECONDS)  # Soon for the first time: a wrong path or a full disk is then said.
    while not stop.is_set():
        if duration is not None and recorder.seconds >= duration:
            return "the recording ended after the time that was asked for"
        output.write(recorder.turn())
        if recorder.header_is_old:
            output.rewrite_head(encoded(recorder.header()))
        if time.monotonic() >= flush_at:
            output.flush()
            flush_at = time.monotonic() + FLUSH_SECONDS
        due = max(due + TURN_SECONDS, time.monotonic())
        left = due - time.monotonic()
        stop.wait(max(0.0, left if duration is None else min(left, duration - recorder.seconds)))
    return "the recording was ended"


def _target(path: Path | None) -> Path | None:
    """Return where to write; None is standard output."""
    if path is None:
        host = "".join(sign if sign.isalnum() or sign in "-." else "-" for sign in socket.gethostname()) or "host"
        return Path(f"gpumon-{host}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl.gz")
    return None if str(path) == "-" else path


def _say(text: str) -> None:
    click.echo(f"gpumon: {text}", err=True)

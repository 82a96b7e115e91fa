# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""`gpumon replay`: a recorded run in fast motion, as `top` would have shown it, and what would have been found when."""

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from verl_gpumonitor.model.findings import Advice, TrackedFinding
from verl_gpumonitor.model.trace import Record, TraceError
from verl_gpumonitor.model.vocabulary import Severity

from .arguments import interval_option, refuse
from .findings import ordered, stage_text
from .keyboard import keys, on_screen, pressed
from .playback import Change, Playback
from .records import RecordedRun, open_run
from .signals import leaving_on_signals
from .times import Seconds, clock
from .view import gpu_table, plain, process_table

FRAMES: Final = 8.0
"""Views in a second."""
LEAST_SPEED, MOST_SPEED = 0.25, 14400.0
WORK_SECONDS: Final = 0.25
"""So long at most are lines read between two views: a fast replay of many GPUs must still hear keys."""
JUMP_SECONDS: Final = 0.5
NEWEST: Final = 4
"""Changes that stay on the screen."""
SHOWN_FINDINGS: Final = 5
_STYLES: Final = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow", Severity.INFO: ""}
_HELP: Final = "q quit  space pause  +/- or arrows: speed"


@click.command(
    "replay",
    short_help="Watch a recorded run in fast motion.",
    epilog="Example: gpumon replay run.jsonl.gz --speed 120 --from 10m",
)
@click.argument("run")
@click.option(
    "--speed",
    type=click.FloatRange(LEAST_SPEED, MOST_SPEED),
    default=60.0,
    show_default=True,
    help="Seconds of the run in one second.",
)
@click.option("--from", "begin", type=Seconds(), default="0", help="Begin at this time of the run: 90, 10m, 1:02:03.")
@click.option("--to", "end", type=Seconds(), help="End at this time of the run.")
@interval_option
def command(*, run: str, speed: float, begin: float, end: float | None, interval: float) -> None:
    """Watch RUN, a trace or a log of GPUs: stage, step, GPUs, and findings when they would have been raised.

    Keys: q quits, space pauses, + and - or the arrows change the speed. Without a terminal, a line is printed for each
    change of job, stage, step and findings.
    """
    if end is not None and end <= begin:
        raise click.BadParameter("it is not after --from", param_hint="--to")
    try:
        with open_run(run, interval_seconds=interval) as recorded:
            if sys.stdout.isatty():
                _watch(recorded, name=run, speed=speed, begin=begin, end=end)
            else:
                _print(recorded, begin=begin, end=end)
    except TraceError as error:
        refuse(run, error)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        raise SystemExit(0) from None
    for complaint in recorded.complaints:
        click.echo(f"gpumon: {run}: {complaint}", err=True)


# --- without a terminal ----------------------------------------------------------------------------------------


def _print(recorded: RecordedRun, *, begin: float, end: float | None) -> None:
    playback = Playback(recorded.header)
    last = 0.0
    for record in recorded.records:
        if end is not None and record.t > end:
            break
        last = record.t
        _print_all(playback.feed(record), begin)
    _print_all(playback.look(), begin)
    click.echo(f"{clock(last):>8}  end of what was {'recorded' if end is None else 'asked for'}")


def _print_all(changes: list[Change], begin: float) -> None:
    for change in changes:
        if change.t >= begin:
            click.echo(line(change))


def line(change: Change) -> str:
    """Return one change as one line: `   13:20  raised    OOMRisk (warning) in update_actor: GPU 3 …`."""
    return f"{clock(change.t):>8}  {change.kind:<9} {''.join(_printable(told(change)))}"


def told(change: Change) -> str:
    """Return what changed, in words; a finding with the first setting to change."""
    tracked = change.finding
    if tracked is None:
        return change.text
    if change.kind == "resolved":
        return f"{_heading(tracked)} after {clock(change.t - tracked.first_seen)}"
    advice = next((advice for advice in tracked.finding.advice if advice.parameter), None)
    return f"{_heading(tracked)}: {change.text}{_advice(advice)}"


def _heading(tracked: TrackedFinding) -> str:
    finding = tracked.finding
    return f"{finding.reason} ({finding.severity}){stage_text(finding.scope.stage)}"


def _advice(advice: Advice | None) -> str:
    if advice is None:
        return ""
    change = f" {advice.current or 'default'} -> {advice.suggested}" if advice.suggested else ""
    return f" [{advice.parameter}{change}]"


def _printable(text: str) -> Iterator[str]:
    """Yield what somebody else wrote without what would move a terminal's cursor."""
    yield from (sign if sign.isprintable() else " " for sign in text)


# --- in a terminal ---------------------------------------------------------------------------------------------


class Projector:
    """How fast the run goes by: the run's own time against ours. Pure."""

    def __init__(self, *, speed: float, begin: float, end: float | None) -> None:
        """It starts at `begin`."""
        self.speed = speed
        self.paused = False
        self.t = begin
        """The moment of the run that is shown."""
        self.over = False
        self._end = end

    def advance(self, seconds: float) -> float:
        """Let time pass; return the run's time up to which lines are due."""
        if not self.paused and not self.over:
            self.t += seconds * self.speed
            if self._end is not None and self.t >= self._end:
                self.t, self.over = self._end, True
        return self.t

    def press(self, key: str) -> bool:
        """Take a key; says whether it is the one that quits."""
        if key == " ":
            self.paused = not self.paused
        elif key in ("+", "=", "right", "up"):
            self.speed = min(MOST_SPEED, self.speed * 2)
        elif key in ("-", "left", "down"):
            self.speed = max(LEAST_SPEED, self.speed / 2)
        return key == "q"


def _watch(recorded: RecordedRun, *, name: str, speed: float, begin: float, end: float | None) -> None:
    """Show the run until its end and then until `q`."""
    playback, projector = Playback(recorded.header), Projector(speed=speed, begin=begin, end=end)
    reel = Reel(playback, recorded.records)
    console, newest = Console(), list[Change]()
    reel.play(begin, within=float("inf"))
    with leaving_on_signals(), keys(), on_screen(Live(console=console, screen=True, auto_refresh=False)) as live:
        before = time.monotonic()
        while True:
            newest = [*newest, *reel.play(projector.advance(0.0), within=WORK_SECONDS)][-NEWEST:]
            if reel.over:
                projector.over = True
            elif reel.behind:
                projector.t = max(begin, playback.t)
            live.update(screen(playback, projector, newest, name=name, width=console.width, height=console.height))
            live.refresh()
            if _quits(projector) or (projector.over and not sys.stdin.isatty()):
                return
            now = time.monotonic()
            # A terminal that was suspended must not find the run gone by.
            projector.advance(min(JUMP_SECONDS, now - before))
            before = now


def _quits(projector: Projector) -> bool:
    """Wait for the next view, and give the keys that are pressed meanwhile to the projector."""
    wanted = [projector.press(key) for key in pressed(1 / FRAMES)]
    return any(wanted)


class Reel:
    """The lines of a run, given to the playback up to a moment."""

    def __init__(self, playback: Playback, records: Iterator[Record]) -> None:
        """Nothing was played."""
        self._playback, self._records = playback, records
        self._next: Record | None = next(records, None)
        self.behind = False
        """Whether the last call ran out of time."""

    @property
    def over(self) -> bool:
        """Whether there are no more lines."""
        return self._next is None

    def play(self, t: float, *, within: float) -> list[Change]:
        """Give all lines up to a moment, for so many seconds at most; return what changed."""
        until, changes = time.monotonic() + within, list[Change]()
        self.behind = False
        while self._next is not None and self._next.t <= t:
            changes += self._playback.feed(self._next)
            self._next = next(self._records, None)
            if time.monotonic() > until:
                self.behind = True
                break
        return changes


def screen(
    playback: Playback, projector: Projector, newest: list[Change], *, name: str, width: int, height: int
) -> RenderableType:
    """Return the whole view, as high as the terminal: GPUs that do not fit are counted."""
    gpus, findings = playback.gpus(), ordered(playback.findings)
    below = [*_finding_lines(findings, width), *_newest_lines(newest, width)]
    room = max(3, height - len(below) - 5)
    parts: list[RenderableType] = [
        _head(playback, projector, name, width),
        gpu_table(gpus[:room], playback.loads, playback.stages(), width=width, names=playback.names(), unit="lines"),
    ]
    if len(gpus) > room:
        parts.append(Text(f"and {len(gpus) - room} GPUs more", style="dim"))
    left = room - len(gpus) - 2
    if not playback.names() and left > 0:
        parts += process_table(gpus, playback.titles, most=left)
    return Group(*parts, *below)


def _head(playback: Playback, projector: Projector, name: str, width: int) -> Text:
    state = "the end" if projector.over else "paused" if projector.paused else f"x{projector.speed:g}"
    t = playback.t if projector.over else max(projector.t, playback.t)
    doing = f"step {playback.step}  {playback.stage}" if playback.diagnosis.history.stages_told else playback.stage
    head = plain(f"{Path(name).name[-max(8, width - len(_HELP) - 2) :]}  {_HELP}")
    head.append("\n")
    head.append_text(plain(f"{clock(t)}  [{state}]  {doing}"[:width]))
    head.stylize("bold")
    return head


def _finding_lines(findings: list[TrackedFinding], width: int) -> list[Text]:
    """Return what is open, a line or two for each."""
    lines = [Text(), Text("FINDINGS", style="bold")] if findings else []
    for tracked in findings[:SHOWN_FINDINGS]:
        heading = f"{clock(tracked.first_seen):>8}  {_heading(tracked)}"
        lines.append(Text(heading[:width], style=_STYLES[tracked.finding.severity]))
        message = textwrap.shorten(tracked.finding.message, 2 * (width - 12), placeholder=" …")
        lines += [plain(" " * 10 + part) for part in textwrap.wrap(message, width - 10)[:2]]
    more = len(findings) - SHOWN_FINDINGS
    return [*lines, Text(f"and {more} more", style="dim")] if more > 0 else lines


def _newest_lines(newest: list[Change], width: int) -> list[Text]:
    found = [Text(), Text("LATELY", style="bold")] if newest else []
    return [*found, *(Text(line(change)[:width], style="dim") for change in newest)]

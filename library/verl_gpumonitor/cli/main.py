# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command `gpumon`: its subcommands are modules, imported when they are called, so that none pays for another.

Other packages add subcommands by an entry point of the group `gpumon.commands`: a function that makes the command.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Final

import click

from verl_gpumonitor import __version__

from . import output

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "gpumon.commands"

COMMANDS: Final = {
    "bundle": ("bundle", "Fetch the last half hour of a job from its cluster."),
    "compare": ("compare", "Compare two recorded runs."),
    "diagnose": ("diagnose", "Say what was wrong in a recorded run."),
    "list": ("listing", "Show the GPUs of this host."),
    "log": ("log", "Write load, memory, temperature of each GPU periodically."),
    "record": ("record", "Record this host's GPUs and what runs on them."),
    "replay": ("replay", "Watch a recorded run in fast motion."),
    "report": ("report", "Make a page of a recorded run."),
    "top": ("top", "Watch GPUs, processes and stages live."),
}
"""Name of a subcommand -> module of this package that holds it as `command`, and its short help: to show that alone,
all modules would be imported."""


class _Named(click.ClickException):
    """An error of click's, told as all others of ours: with our name before it."""

    def __init__(self, error: click.ClickException) -> None:
        super().__init__(error.format_message())
        self.exit_code = error.exit_code  # type: ignore[misc]  # click itself sets it on instances
        self.ctx = error.ctx if isinstance(error, click.UsageError) else None

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it, after how the command is called where that was wrong."""
        where = file or sys.stderr
        if self.ctx is not None:
            names = self.ctx.help_option_names
            click.echo(f"{self.ctx.get_usage()}\nTry '{self.ctx.command_path} {names[-1]}' for help.\n", file=where)
        click.echo(f"gpumon: {self.message}", file=where)


@contextmanager
def _told() -> Iterator[None]:
    """Have errors told in a line as ours."""
    try:
        yield
    except (BrokenPipeError, click.exceptions.NoArgsIsHelpError):
        raise  # A pipe that is closed is click's, and so is the help itself.
    except click.ClickException as error:
        raise _Named(error) from error
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> _Named:
    return _Named(click.ClickException(f"{error.filename or 'standard output'}: {error.strerror or error}"))


class LazyGroup(click.Group):
    """Knows its commands by name, and imports one when it is wanted."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command, whatever its standard output is."""
        output.prepare()
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            error = output.settle()
            if error is None or end.code or isinstance(error, BrokenPipeError):
                raise
            _unwritten(error).show()
            raise SystemExit(1) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; where its output cannot be written, say so in a line. A pipe that is closed is click's."""
        with _told():
            return super().invoke(ctx)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read our own options."""
        with _told():
            return super().make_context(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, sorted."""
        return sorted({*COMMANDS, *added()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a subcommand; None for an unknown name."""
        if cmd_name in COMMANDS:
            command = import_module(f"{__package__}.{COMMANDS[cmd_name][0]}").command
        else:
            entry = added().get(cmd_name)
            command = entry.load()() if entry else None
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing ours."""
        rows = [
            (name, COMMANDS[name][1] if name in COMMANDS else self._help_of(ctx, name))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _help_of(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=80)


def added() -> Mapping[str, "EntryPoint"]:
    """Return the subcommands of other packages, by name. Nothing of them is imported yet."""
    from importlib.metadata import entry_points  # It takes longer than all else here, and most calls need it not.

    return {entry.name: entry for entry in entry_points(group=GROUP)}


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="gpumon")
def main() -> None:
    """Look at GPUs, log them, and find out what is wrong with a verl job on them."""

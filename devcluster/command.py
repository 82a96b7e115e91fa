# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Running other programs: their output into a log, their failure as a ClusterError that shows its end."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from devcluster.errors import ClusterError

LINES_SHOWN = 20


def tail(text: str, lines: int = LINES_SHOWN) -> str:
    """Return the last lines of a text, indented."""
    return "\n".join("    " + line for line in text.rstrip().splitlines()[-lines:])


def run(
    argv: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    advice: str = "",
) -> None:
    """Run a program, append its output to `log`; `env` is added to our own. Raises ClusterError with the log's end."""
    command = [str(part) for part in argv]
    with appended(log) as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        start = output.tell()
        code = _exit_code(command, output=output, cwd=cwd, env=env)
    if code != 0:
        with log.open("rb") as written:
            written.seek(start)
            said = written.read().decode(errors="replace")
        raise ClusterError(f"{command[0]} ended with {code}:\n{tail(said)}\n    (all of it: {log})", advice)


def output(
    argv: Sequence[str | Path],
    *,
    text: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return what it writes; `text` is its input. Raises ClusterError."""
    command = [str(part) for part in argv]
    try:
        done = subprocess.run(
            command, input=text, cwd=cwd, env=_environment(env), capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command[:6])} ended with {done.returncode}:\n{tail(done.stderr or done.stdout)}")
    return done.stdout


def succeeds(argv: Sequence[str | Path], *, timeout_seconds: float = 20) -> bool:
    """Tell whether a program runs and ends with 0."""
    try:
        done = subprocess.run([str(part) for part in argv], capture_output=True, check=False, timeout=timeout_seconds)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextlib.contextmanager
def appended(log: Path) -> Iterator[IO[bytes]]:
    """Open a log for appending, with its folder."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        yield stream


def write_aside(path: Path, content: str | bytes, *, mode: int = 0o644) -> bool:
    """Write a file whole or not at all; return whether it changed. A killed run leaves the old content."""
    data = content.encode() if isinstance(content, str) else content
    if path.is_file() and path.read_bytes() == data:
        path.chmod(mode)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.chmod(mode)
    aside.rename(path)
    return True


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **(added or {})}


def _exit_code(command: list[str], *, output: IO[bytes], cwd: Path | None, env: Mapping[str, str] | None) -> int:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=_environment(env),
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed") from error
    return done.returncode

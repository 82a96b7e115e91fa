# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Standard output as it may be found: closed, full, or of an encoding that has no bars and no degree sign."""

import codecs
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Final

_PLAIN: Final = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    "·": "?",
    "…": ".",
    "—": "-",
    "°": " ",
    "→": ">",
}
"""Signs of ours -> what stands for them where there is nothing but ASCII. A gap must not look like a low bar."""


def prepare() -> None:
    """Make standard output and error fit to be written to, whatever they are. Called once, by the command itself."""
    if sys.stdout is None:  # `>&-`: who closes it wants to see nothing
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    codecs.register_error("gpumon-plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="gpumon-plain")


def _nowhere() -> TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")  # open for as long as the process lives


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def settle() -> OSError | None:
    """Write out what waits, at the end. Return why that fails; then nothing of it is left to fail a second time.

    Left to the interpreter, such an end has a message and an exit code of its own.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return error
    return None

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Single keys from the terminal, for views that are live."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Final

from rich.live import Live

_ARROWS: Final = {b"A": "up", b"B": "down", b"C": "right", b"D": "left"}


@contextlib.contextmanager
def keys() -> Iterator[None]:
    """Let single keys through while the view is there, and put the terminal back afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


@contextlib.contextmanager
def on_screen(live: Live) -> Iterator[Live]:
    """Show a live view while the block runs. Interrupted at its first drawing, `with live` would leave its screen."""
    try:
        with live:
            yield live
    finally:
        live.stop()


def pressed(within: float) -> list[str]:
    """Wait so many seconds, or until keys were pressed; return them: `q`, ` `, `up`. Without a terminal it waits."""
    if not sys.stdin.isatty():
        time.sleep(within)
        return []
    ready, _, _ = select.select([sys.stdin], [], [], within)
    return names(os.read(sys.stdin.fileno(), 64)) if ready else []


def names(raw: bytes) -> list[str]:
    """Return the keys in what a terminal sends: letters in lower case, and arrows by name. Others are left out."""
    found: list[str] = []
    while raw:
        if raw.startswith((b"\x1b[", b"\x1bO")):
            found += [_ARROWS[raw[2:3]]] if raw[2:3] in _ARROWS else []
            raw = raw[3:]
            continue
        sign = raw[:1]
        found += [sign.decode().lower()] if b" " <= sign < b"\x7f" else []
        raw = raw[1:]
    return found

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who a process is, in a word or two, for whoever may see a list of a GPU's processes. Pure, bounded, never raises.

Command lines hold secrets and what is nobody's business. So nothing of one is passed on but a program's name: Ray's and
an engine's own titles up to the class, an interpreter with the script or module that it runs, else the first word's
last part. A script that lies in an installed package is named with the package. Whatever has unusual characters, or
looks like a secret, is left out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from verl_gpumonitor.model.redaction import REDACTED, redact

from .tables import ENGINE_TITLES

MAX_COMMAND_BYTES: Final = 4096
"""Of a command line no more is looked at."""
MAX_PROGRAM: Final = 64

_RAY: Final = "ray::"
_WORD: Final = re.compile(r"[A-Za-z0-9_]+")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,47}\Z")
_PATH: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,59}\Z")
_PYTHON: Final = re.compile(r"(?:python|pypy)[0-9.]*\Z")
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_WITH_VALUE: Final = ("W", "X")
"""Python's options that take the next word where none is attached."""
_SPAWNED: Final = "from multiprocessing."
"""How the code begins that a child of Python's multiprocessing is started with."""


def program_of(cmdline: bytes) -> str:
    """Return who a process with this `/proc/<pid>/cmdline` is; empty where that cannot be told without its arguments.

    `ray::WorkerDict.actor_rollout_ref_update_actor` gives `ray::WorkerDict`; `python3 -u /app/train.py --key=x` gives
    `python3 train.py`; `python3 -c …` gives nothing, for what it runs is an argument.
    """
    words = cmdline[:MAX_COMMAND_BYTES].rstrip(b"\0 ").decode("utf-8", "replace").split("\0")
    first = words[0].strip()
    if first.startswith((_RAY, *ENGINE_TITLES)):
        return _titled(first)
    # A process that sets its title has all of it in the first word; a path with blanks cannot be told from that.
    name = _base(first if first.startswith("/") else first.partition(" ")[0].removesuffix(":"))
    if not name:
        return ""
    if not _PYTHON.match(name):
        return _shown(name)
    if len(words) == 1:
        return _shown(name) if " " not in first else ""
    run = _run_by(words[1:])
    return _shown(f"{name} {run}") if run else ""


def _titled(title: str) -> str:
    """Return a title up to its class: `VLLM::Worker_TP0`, `ray::WorkerDict`; after a colon comes a class, too."""
    kind, _, rest = title.partition("::")
    owner = rest.partition("(")[0].rpartition(":")[2]
    found = _WORD.match(owner)
    word = found[0] if found else ""
    shown = word if redact(word) == word else ""
    return f"{kind}::{shown}"[:MAX_PROGRAM]


def _run_by(words: Sequence[str]) -> str:
    """Return what a Python interpreter runs, by the words after its own; empty where that is not told."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            return _script(word)
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in ("c", "m"):
                return _given(letter, word[place:] or next(rest, ""))
            if letter in _WITH_VALUE:
                _skip_value(word[place:], rest)
                break
    return ""


def _given(letter: str, value: str) -> str:
    if letter == "m":
        return value if _NAME.match(value) else ""
    return "multiprocessing" if value.startswith(_SPAWNED) else ""


def _skip_value(attached: str, rest: Iterator[str]) -> None:
    if not attached:
        next(rest, None)


def _script(path: str) -> str:
    for packages in _PACKAGES:
        inside = path.rpartition(packages)[2]
        if inside != path and _PATH.match(inside):
            return inside
    return _base(path)


def _base(path: str) -> str:
    name = path.rpartition("/")[2]
    return name if _NAME.match(name) else ""


def _shown(text: str) -> str:
    return "" if REDACTED in redact(text) else text[:MAX_PROGRAM]

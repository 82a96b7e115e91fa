# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reads from a cluster by the user's own kubectl: their kubeconfig, context, and whatever plugin logs them in.

KubectlError
+-- NoKubectl     the program is not there
+-- NotFound      the API server has no such thing
+-- Forbidden     the user may not
+-- Unreachable   the API server could not reach what was asked for, or it is busy
"""

import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO, Final, NamedTuple

REQUEST_SECONDS: Final = 60
_GRACE_SECONDS: Final = 15
"""A kubectl that has not ended so long after that is ended."""
MAX_OBJECT_BYTES: Final = 256 * 1024 * 1024
"""A list of a thousand pods takes some 30 MB."""
_PIECE: Final = 1 << 16
_MAX_SAID: Final = 2000


class KubectlError(Exception):
    """What kubectl said, for the person at the keyboard."""


class NoKubectl(KubectlError):  # noqa: N818
    """There is no such program."""


class NotFound(KubectlError):  # noqa: N818
    """There is no such thing."""


class Forbidden(KubectlError):  # noqa: N818
    """The user may not."""


class Unreachable(KubectlError):  # noqa: N818
    """The API server did not reach it."""


_KINDS: Final = (
    (re.compile(r"\(NotFound\)"), NotFound),
    (re.compile(r"\(Forbidden\)"), Forbidden),
    (re.compile(r"\(ServiceUnavailable\)|error trying to reach service|\(Timeout\)|\(InternalError\)"), Unreachable),
)


class Answer(NamedTuple):
    """When an answer came, by the clock of this machine; Unix seconds."""

    asked_unix: float
    first_unix: float
    """When its first bytes came."""


class Kubectl:
    """One program, with the options that choose the cluster."""

    def __init__(self, program: str = "kubectl", options: Sequence[str] = ()) -> None:
        self._program = program
        self._options = list(options)

    def namespace(self) -> str:
        """Return the namespace of the context. Raises KubectlError."""
        with tempfile.TemporaryFile() as out:
            self._run(["config", "view", "--minify", "-o", "jsonpath={..namespace}"], out, max_bytes=_PIECE)
            out.seek(0)
            return out.read().decode(errors="replace").strip() or "default"

    def get(self, path: str) -> bytes:
        """Return the body of a GET below the API server. Raises KubectlError."""
        with tempfile.TemporaryFile() as out:
            self.fetch(path, out, max_bytes=MAX_OBJECT_BYTES)
            out.seek(0)
            return out.read()

    def fetch(self, path: str, out: BinaryIO, *, max_bytes: int) -> Answer:
        """Write the body of a GET into a file, at most so much of it. Raises KubectlError."""
        return self._run(["get", "--raw", path, f"--request-timeout={REQUEST_SECONDS}s"], out, max_bytes=max_bytes)

    def _run(self, words: Sequence[str], out: BinaryIO, *, max_bytes: int) -> Answer:
        with tempfile.TemporaryFile() as said:
            asked = first = time.time()
            try:
                process = subprocess.Popen(
                    [self._program, *self._options, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                )
            except OSError as error:
                raise NoKubectl(_missing(self._program, error)) from error
            timer = threading.Timer(REQUEST_SECONDS + _GRACE_SECONDS, process.kill)
            timer.start()
            try:
                first = _copy(process, out, max_bytes) or first
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()
            if code:
                said.seek(0)
                raise _error(said.read(_MAX_SAID).decode(errors="replace").strip(), code)
        return Answer(asked, first)


def _copy(process: subprocess.Popen[bytes], out: BinaryIO, max_bytes: int) -> float | None:
    """Copy what the program prints; return when it began to, None if it printed nothing."""
    assert process.stdout is not None  # noqa: S101 - for the type checker: it was asked for
    first, taken = None, 0
    with process.stdout as pipe:
        while piece := pipe.read1(_PIECE):  # type: ignore[attr-defined]
            first = time.time() if first is None else first
            taken += len(piece)
            if taken > max_bytes:
                process.kill()
                raise KubectlError(f"the answer is larger than {max_bytes >> 20} MiB")
            out.write(piece)
    return first


def _error(said: str, code: int) -> KubectlError:
    if code < 0:
        return Unreachable(f"no answer within {REQUEST_SECONDS + _GRACE_SECONDS} s")
    # It may repeat what a pod answered, which is not to steer a terminal.
    said = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in said)
    for pattern, kind in _KINDS:
        if pattern.search(said):
            return kind(said)
    return KubectlError(said or f"kubectl ended with {code}")


def _missing(program: str, error: OSError) -> str:
    return (
        f"{program} cannot be run ({error.strerror or error}): install kubectl, or say where it is with --kubectl;"
        " it is what reads the cluster, as you"
    )

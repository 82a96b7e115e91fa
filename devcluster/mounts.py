# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Mounts below our folders: killed programs leave them, and a tree must never be removed through one."""

import os
import re
import shutil
from pathlib import Path

from devcluster.command import succeeds


def below(top: Path, mountinfo: str) -> list[str]:
    """Return the mount points at or below a folder, innermost and latest first. `mountinfo`: /proc/self/mountinfo."""
    points = [_unescaped(fields[4]) for line in mountinfo.splitlines() if len(fields := line.split()) > 4]
    return [point for point in reversed(points) if point == str(top) or point.startswith(f"{top}/")]


def unmount_below(top: Path) -> None:
    """Unmount all that is mounted at or below a folder; what is busy is detached, and goes when its user goes."""
    for point in below(top, Path("/proc/self/mountinfo").read_text()):
        if not succeeds(["umount", point]):
            succeeds(["umount", "--lazy", point])


def remove_tree(top: Path) -> None:
    """Remove a folder and what is in it, but nothing that was mounted there."""
    if not top.exists():
        return
    unmount_below(top)
    if below(top, Path("/proc/self/mountinfo").read_text()):
        raise OSError(f"{top} still holds mounts; it is left as it is")
    shutil.rmtree(top, onerror=_make_writable_and_retry)


def _make_writable_and_retry(function: object, path: str, _: object) -> None:
    """Sockets and files vanish while we look (fine); the rest is tried once more with the folder writable."""
    if not os.path.lexists(path):
        return
    Path(path).parent.chmod(0o755)
    if callable(function):
        function(path)


def _unescaped(text: str) -> str:
    """The kernel writes a space as backslash 040, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

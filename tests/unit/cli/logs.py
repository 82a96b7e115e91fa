# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Logs for the tests: four A100 before and after the practice guide's worked fix, as nvidia-smi writes them."""

from collections.abc import Sequence
from pathlib import Path

HEAD = ", ".join(
    [
        *("timestamp", "index", "name", "temperature.gpu", "utilization.gpu [%]"),
        *("memory.used [MiB]", "memory.total [MiB]", "power.draw [W]"),
    ]
)


def guide_log(path: Path, utilization: Sequence[int], used_gib: Sequence[float], *, rounds: int = 240) -> Path:
    """Write a log of so many rounds, 5 s apart, in which values swing by two points. Returns `path`."""
    with path.open("w") as file:
        file.write(HEAD + "\n")
        for number in range(rounds):
            seconds = 5 * number
            clock = f"{10 + seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.000"
            for index, (load, used) in enumerate(zip(utilization, used_gib, strict=True)):
                swing = (number * 7 + index * 3) % 5 - 2
                file.write(
                    f"2026/11/30 {clock}, {index}, NVIDIA A100-SXM4-80GB, 60, {load + swing} %,"
                    f" {used * 1024 + 20 * swing:.0f} MiB, 81920 MiB, {100 + load:.2f} W\n"
                )
    return path


def before(folder: Path) -> Path:
    """GPU 0 does the work and holds 78 of 80 GiB, the others do little."""
    return guide_log(folder / "before.csv", [85, 11, 10, 12], [78, 19, 18, 20])


def after(folder: Path) -> Path:
    """All four share it."""
    return guide_log(folder / "after.csv", [62, 63, 61, 64], [37, 38, 39, 40])

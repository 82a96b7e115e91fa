# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A day of eight GPUs at one second, as one report: CPU time, memory, size of the page."""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl_gpumonitor.cli.columns import timestamp

HOURS, GPUS = 24, 8
HEAD = "timestamp,index,name,temperature.gpu,utilization.gpu [%],memory.used [MiB],memory.total [MiB]\n"


def write_log(path: Path, *, hours: int, gpus: int) -> None:
    """Write what `gpumon log --interval 1` writes in so many hours."""
    with path.open("w") as file:
        file.write(HEAD)
        for second in range(hours * 3600):
            at = timestamp(1_800_000_000 + second)
            load = 90 if second % 120 < 80 else 15
            rows = (
                f"{at},{gpu},NVIDIA H100 80GB HBM3,55,{load - gpu},{60_000 + 50 * (second % 120) + gpu},81559\n"
                for gpu in range(gpus)
            )
            file.writelines(rows)


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "gpu.csv", Path(folder) / "report.html"
        write_log(log, hours=HOURS, gpus=GPUS)
        begun = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "verl_gpumonitor.cli", "report", str(log), "-o", str(page)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"report of {HOURS} h of {GPUS} GPUs at 1 s ({log.stat().st_size / 1e6:.0f} MB): "
            f"{time.monotonic() - begun:.1f} s, {cpu:.1f} s of CPU, {after.ru_maxrss / 1024:.0f} MiB, "
            f"page {page.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()

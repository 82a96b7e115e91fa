# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the dashboards where the chart and the compose file look for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from compose.dashboards import gpu, job, jobs

FOLDER: Final = Path(__file__).parents[2] / "charts" / "gpumonitor" / "files" / "dashboards"


def texts() -> Mapping[str, str]:
    """Return file name -> content."""
    boards = {"jobs.json": jobs.BOARD, "job.json": job.BOARD, "gpu.json": gpu.BOARD}
    return {name: json.dumps(board.as_json(), indent=1, ensure_ascii=False) + "\n" for name, board in boards.items()}


def main() -> None:
    """Write all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

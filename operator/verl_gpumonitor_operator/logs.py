# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Log lines as JSON objects on stderr: a constant message, everything that varies under keys of its own."""

import json
import logging
import time
from typing import Any, Final

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Renders a record with what was passed as `extra`, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "timestamp": f"{moment}.{int(record.msecs):03d}Z",
            "severity": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: int = logging.INFO) -> None:
    """Send all logs of this process to stderr as JSON. Called once, by `main`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Renders the newest state for Prometheus: the health of the reading always, a value only where it is known.

Nothing here reads a GPU: a scrape looks at what the loop left. The number of series follows from the number of the
pod's own GPUs and from fixed lists alone; processes come and go without adding one.
"""

import time
from collections.abc import Callable

from . import gpu_metrics, pod_metrics
from .exports import Exports
from .exposition import labels


class Page:
    """The text of /metrics, rendered at most once a second, whoever asks and however often."""

    def __init__(
        self,
        current: Callable[[], Exports],
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        keep_seconds: float = 1.0,
    ) -> None:
        self._current = current
        self._clock = clock
        self._unix_clock = unix_clock
        self._keep_seconds = keep_seconds
        self._rendered_at: float | None = None
        self._text = b""
        self.renderings = 0
        """How often it was rendered."""

    def text(self) -> bytes:
        """Return the page. Called by one thread. Never raises: what breaks a rendering is shown instead of it."""
        now = self._clock()
        if self._rendered_at is None or not 0 <= now - self._rendered_at < self._keep_seconds:
            self.renderings += 1
            self._rendered_at = now
            self._text = self._render()
        return self._text

    def _render(self) -> bytes:
        try:
            return render(self._current(), now=self._clock(), now_unix=self._unix_clock()).encode()
        except Exception as error:  # noqa: BLE001 - a scrape that fails would hide every value there is
            name = type(error).__name__
            return (
                "# HELP gpumonitor_export_error The page could not be rendered, for a fault of ours.\n"
                "# TYPE gpumonitor_export_error gauge\n"
                f'gpumonitor_export_error{{error="{name}"}} 1\n'
            ).encode()


def render(shown: Exports, *, now: float, now_unix: float) -> str:
    """Return the whole page as of this moment. `now` is monotonic."""
    pod = labels(namespace=shown.identity.namespace, pod=shown.identity.pod)
    families = (
        *pod_metrics.families(shown, pod, now=now, now_unix=now_unix),
        *gpu_metrics.families(shown, pod, now=now, now_unix=now_unix),
    )
    return "".join(families)

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What one rendering of /metrics shows, put together by whoever has it."""

from collections.abc import Mapping

import msgspec

from .state import PodState


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What every series of this sidecar carries, and what its info series tell."""

    namespace: str
    pod: str
    node: str = ""
    version: str = ""
    start_id: str = ""
    started_unix: float = 0.0


class ReportCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How the reports fared so far."""

    enabled: bool = False
    by_code: Mapping[str, int] = {}
    """HTTP status, or `error`, `timeout`, `tls`, `token` where no answer came -> attempts."""
    dropped: int = 0
    last_success_unix: float | None = None


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the sidecar itself takes; None where /proc does not say."""

    cpu_seconds: float | None = None
    resident_bytes: int | None = None


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rendering shows."""

    identity: Identity
    state: PodState
    reports: ReportCounts = ReportCounts()
    use: ProcessUse = ProcessUse()
    settings_problems: tuple[str, ...] = ()
    """Sentences of SettingsError; each names its variable first."""

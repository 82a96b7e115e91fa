# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One JSON object a line, and only what changed."""

import json

import pytest

from verl_gpumonitor_sidecar.journal import Journal, write_stderr


def test_a_state_is_said_once_until_it_changes() -> None:
    lines: list[bytes] = []
    journal = Journal(lines.append, lambda: 12.3456)
    journal.state("reports", "reports do not arrive", code="timeout", error="after 1 s")
    journal.state("reports", "reports do not arrive", code="timeout", error="after 2 s")
    journal.state("reports", "reports do not arrive", code="tls", error="after 2 s")
    journal.state("reports", "reports are accepted")
    journal.state("reports", "reports do not arrive", code="tls")
    said = [json.loads(line) for line in lines]
    assert [line.get("code") for line in said] == ["timeout", "tls", None, "tls"]
    assert said[0] == {"time": 12.346, "message": "reports do not arrive", "code": "timeout", "error": "after 1 s"}


def test_lines_stay_single_and_bounded() -> None:
    lines: list[bytes] = []
    Journal(lines.append).event("said", error="a\nb" * 10_000)
    assert lines[0].count(b"\n") == 1
    assert len(lines[0]) < 4096


def test_a_closed_stderr_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int, _line: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("os.write", broken)
    write_stderr(b"line\n")

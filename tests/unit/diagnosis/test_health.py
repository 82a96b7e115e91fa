# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The public table of reasons, and the HEALTH column."""

import pytest

from verl_gpumonitor.diagnosis import REASONS, health_text, highest


def test_the_table_of_reasons_is_public() -> None:
    table = [(reason, info.condition, info.severity.value, info.rank) for reason, info in REASONS.items()]
    assert table == [
        ("Hang", "Hung", "critical", 1),
        ("GPUFault", "GPUFault", "critical", 2),
        ("HostMemoryRisk", "HostMemoryRisk", "warning", 3),
        ("OOMRisk", "OOMRisk", "warning", 4),
        ("SharedMemoryRisk", "HostMemoryRisk", "warning", 5),
        ("ApplicationFault", "ApplicationFault", "warning", 6),
        ("RolloutMemoryNotReleased", "OOMRisk", "warning", 7),
        ("MemoryGrowth", "OOMRisk", "warning", 8),
        ("LeftoverMemory", "ForeignGPUMemory", "warning", 9),
        ("ForeignProcess", "ForeignGPUMemory", "warning", 10),
        ("Imbalance", "Imbalanced", "warning", 11),
        ("Throttled", "Throttled", "warning", 12),
        ("LowUtilization", "Underutilized", "info", 13),
        ("TelemetryUnavailable", "TelemetryAvailable", "info", 14),
        ("TelemetryPartial", "TelemetryAvailable", "info", 15),
    ]


@pytest.mark.parametrize(
    ("reasons", "telemetry", "text"),
    [
        pytest.param([], True, "OK", id="nothing open"),
        pytest.param([], False, "Unknown", id="nothing to be seen"),
        pytest.param(["Imbalance"], True, "Imbalance", id="one"),
        pytest.param(["Imbalance", "OOMRisk"], True, "OOMRisk+1", id="the highest first"),
        pytest.param(["Imbalance", "Imbalance"], True, "Imbalance", id="the same twice is one"),
        pytest.param(["TelemetryPartial", "Hang", "Imbalance"], False, "Hang+2", id="findings also without telemetry"),
        pytest.param(["Later", "LowUtilization"], True, "LowUtilization+1", id="a reason of later comes last"),
    ],
)
def test_health_text(reasons: list[str], telemetry: bool, text: str) -> None:
    assert health_text(reasons, telemetry=telemetry) == text


def test_the_highest_of_none_is_none() -> None:
    assert highest([]) is None

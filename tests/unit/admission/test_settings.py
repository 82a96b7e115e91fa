# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Settings: what is refused, and in which words; the defaults are public."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_gpumonitor_operator import settings
from verl_gpumonitor_operator.settings import SettingsError

NEEDED: dict[str, Any] = {
    "release": "gpumonitor",
    "namespace": "gpumonitor-system",
    "images": {"sidecar": "r/sidecar:1", "operator": "r/operator:1"},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"relaese": "x"}, "relaese", id="a misspelt field is named"),
        pytest.param({"injection": {"mode": "maybe"}}, "injection.mode", id="an unknown mode"),
        pytest.param({"injection": {"gpuResources": ["["]}}, "gpuResources", id="a broken pattern"),
        pytest.param({"injection": {"gpuResources": []}}, "at least one", id="no pattern"),
        pytest.param({"injection": {"quotaHeadroom": 0}}, "quotaHeadroom", id="below its bound"),
        pytest.param({"images": {"sidecar": "a"}}, "operator", id="a missing image"),
        pytest.param({"report": {"intervalSeconds": 0}}, "intervalSeconds", id="no interval"),
        pytest.param({"breaker": {"coolDownSeconds": 60, "maxCoolDownSeconds": 1}}, "below", id="bounds crossed"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings.decode(json.dumps({**NEEDED, **changes}).encode())


def test_no_json() -> None:
    with pytest.raises(SettingsError):
        settings.decode(b"release: x")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.json"):
        settings.load(tmp_path / "absent.json")


def test_a_faulty_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text("{}")
    with pytest.raises(SettingsError, match=r"settings\.json: .*release"):
        settings.load(file)


def test_defaults() -> None:
    held = settings.decode(json.dumps(NEEDED).encode())
    assert json.loads(msgspec.json.encode(held)) == {
        **NEEDED,
        "images": {**NEEDED["images"], "pullPolicy": "IfNotPresent"},
        "injection": {
            "mode": "optOut",
            "gpuResources": [".*/gpu$"],
            "visibility": "auto",
            "runtimeClassName": "nvidia",
            "excludedNamespaces": [],
            "sidecarResources": {
                "guaranteed": {"cpu": "50m", "memory": "64Mi"},
                "burstableLimits": {"cpu": "200m", "memory": "128Mi"},
            },
            "quotaHeadroom": 100,
            "shareProcessNamespace": False,
        },
        "report": {"intervalSeconds": 15.0, "sampleIntervalSeconds": 1.0},
        "controller": {
            "leaseSeconds": 15.0,
            "retentionSeconds": 86400.0,
            "notReportingSeconds": 60.0,
            "statusMinIntervalSeconds": 10.0,
            "statusWritesPerSecond": 20.0,
            "eventsPerSecond": 5.0,
            "eventsBurst": 50,
        },
        "diagnosis": {"oomRisk": {}, "imbalance": {}, "thresholds": {}},
        "breaker": {"coolDownSeconds": 60.0, "maxCoolDownSeconds": 1800.0},
    }


def test_names_of_our_objects() -> None:
    held = settings.decode(json.dumps(NEEDED).encode())
    assert held.certificates_secret == "gpumonitor-certificates"
    assert held.authority_secret == "gpumonitor-certificates-ca"
    assert held.controller_server_name == "gpumonitor-controller.gpumonitor-system.svc"
    assert held.breaker_config_map == "gpumonitor-breaker"

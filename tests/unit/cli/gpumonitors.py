# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""GPUMonitors for the tests, as the operator writes them."""

import json
from pathlib import Path
from typing import Any

import yaml

GIB = 2**30


def monitor(name: str = "grpo-8b", namespace: str = "team-a", **status: Any) -> dict[str, Any]:
    """One of a running RayJob with two findings; `status` changes it, None takes a field away."""
    known: dict[str, Any] = {
        "observedGeneration": 1,
        "phase": "Running",
        "stage": "update_actor",
        "role": "actor",
        "step": 42,
        "secondsPerStep": 96.5,
        "health": "OOMRisk+1",
        "workload": {"startTime": "2026-11-30T10:00:00Z", "rayCluster": "grpo-8b-x"},
        "launch": {
            "program": "verl.trainer.main_ppo",
            "overrides": ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576", "trainer.logger=['console']"],
            "verlVersion": "0.5.0",
            "source": "spec",
        },
        "gpus": {"requested": 16, "reported": 16, "text": "16/16"},
        "utilization": {"mean": 0.71, "text": "71%"},
        "memory": {"peakRatio": 0.97, "peakBytes": 77 * GIB, "totalBytes": 80 * GIB, "text": "97%"},
        "totals": {"gpuSeconds": 57600.0, "busySeconds": 40320.0, "energyJoules": 2.3e7},
        "dataQuality": {
            "source": "nvml",
            "ownership": "ray-agent",
            "podsMonitored": 2,
            "podsUnmonitored": 1,
            "stages": {"source": "ray-state", "resolutionSeconds": 1.0},
            "diagnosis": {"gpus": 16, "steps": 40},
            "gapsSeconds": 12.0,
            "lostStarts": 1,
        },
        "stageTable": ["STAGE         ROLE", "update_actor  actor"],
        "stages": [
            {
                "stage": "update_actor",
                "role": "actor",
                "share": 0.6,
                "seconds": 34560.0,
                "secondsPerStep": 58.0,
                "utilization": 0.95,
                "memoryPeakBytes": 77 * GIB,
                "memoryPeakRatio": 0.9625,
                "powerWatts": 655.0,
            },
            {"stage": "gen", "role": "rollout", "share": 0.4, "seconds": 23040.0, "utilization": 0.35},
        ],
        "worstGpus": [
            {
                "pod": "w-1",
                "node": "node-b",
                "uuid": "GPU-3",
                "index": 3,
                "model": "NVIDIA H100",
                "state": "ok",
                "utilization": 0.98,
                "memoryUsedBytes": 70 * GIB,
                "memoryPeakBytes": 77 * GIB,
                "memoryTotalBytes": 80 * GIB,
                "temperatureCelsius": 71.0,
                "powerWatts": 690.0,
                "note": "OOMRisk",
            },
            {"pod": "w-0", "uuid": "GPU-9", "index": 1, "state": "lost", "note": "GPU_IS_LOST"},
        ],
        "unmonitoredPods": [{"name": "w-2", "reason": "OptedOut", "message": "its label says so"}],
        "findings": [
            {
                "reason": "OOMRisk",
                "severity": "warning",
                "since": "2026-11-30T10:40:00Z",
                "stage": "update_actor",
                "role": "actor",
                "pods": ["w-1"],
                "gpus": ["GPU-3"],
                "message": "GPU 3 of pod w-1 reached 76.9 of 79.6 GiB in update_actor",
            },
            {"reason": "LowUtilization", "severity": "info", "stage": "gen", "message": "gen wastes GPU time"},
        ],
        "recommendations": [
            {
                "reason": "OOMRisk",
                "parameter": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                "current": "24576",
                "suggested": "16384",
                "text": "Shorter micro batches need less memory",
                "evidence": "0.4 GiB a step over 12 steps",
                "price": "some time",
                "confidence": "high",
            },
            {"reason": "Throttled", "text": "Look at the cooling"},
        ],
        "conditions": [
            {
                "type": "TelemetryAvailable",
                "status": "True",
                "reason": "AllReporting",
                "message": "all",
                "lastTransitionTime": "2026-11-30T10:00:00Z",
            }
        ],
        "previousRun": {"phase": "Failed", "health": "OOMRisk"},
        **status,
    }
    return {
        "apiVersion": "gpumonitor.dev/v1alpha1",
        "kind": "GPUMonitor",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-30T10:00:00Z"},
        "spec": {"workloadRef": {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": name}},
        "status": {key: value for key, value in known.items() if value is not None},
    }


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    """A list, as kubectl prints one."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": list(items)}


def as_yaml(document: object) -> str:
    """As `kubectl get -o yaml` prints it."""
    return str(yaml.safe_dump(document))


def write(folder: Path, document: object, *, form: str = "yaml") -> Path:
    """Write it as `monitor.yaml` or `monitor.json`."""
    path = folder / f"monitor.{form}"
    path.write_text(as_yaml(document) if form == "yaml" else json.dumps(document, indent=4))
    return path

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""QoS class by another way than the product's: case by case, with decimals, from Kubernetes' documentation."""

from decimal import Decimal
from typing import Any

SUFFIXES = {"m": "0.001", "u": "0.000001", "n": "0.000000001", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"}
BINARY = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}


def number(quantity: str) -> Decimal:
    for suffix, factor in BINARY.items():
        if quantity.endswith(suffix):
            return Decimal(quantity[:-2]) * factor
    if quantity[-1:] in SUFFIXES:
        return Decimal(quantity[:-1]) * Decimal(SUFFIXES[quantity[-1]])
    return Decimal(quantity)


def qos(pod: dict[str, Any]) -> str:
    spec = pod["spec"]
    if spec.get("resources") is not None:
        parts = [spec["resources"]]
    else:
        every = [*spec.get("containers", []), *(spec.get("initContainers") or [])]
        parts = [container.get("resources") or {} for container in every]
    limits = [{k: number(v) for k, v in (part.get("limits") or {}).items()} for part in parts]
    requests = [
        {**limit, **{k: number(v) for k, v in (part.get("requests") or {}).items()}}
        for part, limit in zip(parts, limits, strict=True)
    ]
    used = [amounts[name] for amounts in (*limits, *requests) for name in ("cpu", "memory") if name in amounts]
    if not any(used):
        return "BestEffort"
    for name in ("cpu", "memory"):
        if not all(limit.get(name) for limit in limits):
            return "Burstable"
        if sum(limit[name] for limit in limits) != sum(request[name] for request in requests):
            return "Burstable"
    return "Guaranteed"

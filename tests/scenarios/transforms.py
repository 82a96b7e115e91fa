# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The same run, recorded otherwise: what a recorder, a network or a person may do to a record without changing it."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Lines = Sequence[bytes]
Record = dict[str, Any]


def doubled(lines: Lines, *, seed: int = 1) -> list[bytes]:
    """Write every tenth line twice."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible disturbance
    out = [lines[0]]
    for line in lines[1:]:
        out += [line, line] if rng.random() < 0.1 else [line]
    return out


def shuffled(lines: Lines, *, seconds: float = 1.9, seed: int = 2) -> list[bytes]:
    """Put lines out of order by up to so much."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible disturbance
    keyed = [(json.loads(line)["t"] + rng.uniform(0, seconds), place, line) for place, line in enumerate(lines[1:])]
    return [lines[0], *(line for _, _, line in sorted(keyed))]


def with_gaps(lines: Lines, *, every: float = 400.0, seconds: float = 20.0, first: float = 250.0) -> list[bytes]:
    """Leave out the samples of some stretches, as a recorder that was restarted does."""
    out = [lines[0]]
    for line in lines[1:]:
        record = json.loads(line)
        into = (record["t"] - first) % every
        if not (record["type"] in ("gpu", "host") and record["t"] > first and into < seconds):
            out.append(line)
    return out


def resampled(lines: Lines, *, seconds: float) -> list[bytes]:
    """Record GPUs each so many seconds: the highest memory is kept, the rest is the newest sample's."""
    out: list[bytes] = [lines[0]]
    peaks: dict[str, float] = {}
    given: dict[str, float] = {}
    processes: dict[str, Any] = {}
    for line in lines[1:]:
        record: Record = json.loads(line)
        if record["type"] != "gpu":
            out.append(line)
            continue
        uuid, t = record["uuid"], record["t"]
        if record.get("memory_peak_bytes") is not None:
            peaks[uuid] = max(peaks.get(uuid, 0), record["memory_peak_bytes"])
        if record.get("processes") is not None:
            processes[uuid] = record["processes"]
        if uuid in given and t - given[uuid] < seconds - 0.05:
            continue
        given[uuid] = t
        if record.get("memory_peak_bytes") is not None:
            record["memory_peak_bytes"] = peaks.pop(uuid)
        if uuid in processes:
            record["processes"] = processes.pop(uuid)
        out.append(json.dumps(record).encode())
    return out


def denser(lines: Lines) -> list[bytes]:
    """Record GPUs twice as often: between two samples lies one that found all as the earlier of them did."""
    out: list[bytes] = [lines[0]]
    last: dict[str, Record] = {}
    added: list[tuple[float, bytes]] = []
    for line in lines[1:]:
        record: Record = json.loads(line)
        if record["type"] == "gpu":
            before = last.get(record["uuid"])
            if before is not None and record["t"] - before["t"] < 12:
                middle = round((record["t"] + before["t"]) / 2, 3)
                copied = {
                    **before,
                    "t": middle,
                    "processes": None,
                    "memory_peak_bytes": before.get("memory_used_bytes"),
                }
                added.append((middle, json.dumps(copied).encode()))
            last[record["uuid"]] = record
    keyed = [(json.loads(line)["t"], 1, line) for line in lines[1:]] + [(t, 0, line) for t, line in added]
    return [*out, *(line for _, _, line in sorted(keyed, key=lambda item: item[:2]))]


def without_pods(lines: Lines, wanted: Callable[[Record], bool]) -> list[bytes]:
    """Leave out all lines of pods that are not wanted, and the pods from the header."""
    header: Record = json.loads(lines[0])
    pods = header["pods"]
    header["pods"] = [pod for pod in pods if wanted(pod)]
    gone = {pod["name"] for pod in pods} - {pod["name"] for pod in header["pods"]}
    out = [json.dumps(header).encode()]
    return out + [line for line in lines[1:] if json.loads(line).get("pod") not in gone]

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What Ray's metrics agent in the same pod says of the pod's GPUs and host memory.

Where the sidecar has no NVML, this stands in for it: a Ray job is visible on every cluster. It also names exactly the
GPUs of Ray's container, by UUID since some version; go by what is there. Limits of this source: new every 5 s, no
peaks, memory includes the driver's reserve, and a load that the GPU does not offer (MIG) is told as 0.

The text is up to some hundred KB, of which a few lines matter: it is read piece by piece.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from . import plausible
from .fetch import fetch
from .samples import GpuSample, HostSample, RayAgentSample

MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
_MAX_LINE_BYTES: Final = 8192
_PREFIX: Final = b"ray_node_"
_MIB: Final = 2**20
"""Ray's MB."""

_GPU_LINES: Final = {
    b"ray_node_gpus_available": "present",
    b"ray_node_gpus_utilization": "utilization",
    b"ray_node_gram_used": "memory_used",
    b"ray_node_gram_available": "memory_available",
    b"ray_node_gpu_power_milliwatts": "power",
    b"ray_node_gpu_temperature_celsius": "temperature",
}
_HOST_LINES: Final = {b"ray_node_mem_used": "used", b"ray_node_mem_total": "total"}


class AgentParser:
    """Takes the text in pieces of any size, and keeps what matters."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        self._gpus: dict[str, dict[str, float]] = {}
        self._index: dict[str, int] = {}
        self._model: dict[str, str] = {}
        self._host: dict[str, float] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece. Whatever is no line that is known is passed over; nothing raises."""
        *lines, rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.startswith(_PREFIX):
                self._take(line)
        self._skipping = self._skipping or len(rest) > _MAX_LINE_BYTES
        self._rest = b"" if self._skipping else rest

    def finish(self, *, taken_at: float) -> RayAgentSample:
        """Return what was said. An unfinished last line does not count."""
        samples = [self._sample(key, values, taken_at) for key, values in self._gpus.items()]
        samples.sort(key=lambda sample: (sample.index is None, sample.index or 0, sample.uuid))
        return RayAgentSample(
            gpus=tuple(sample for sample in samples if sample.uuid),
            unnamed_gpus={sample.index: sample for sample in samples if not sample.uuid and sample.index is not None},
            host=self._host_sample(taken_at),
        )

    def _take(self, line: bytes) -> None:
        name, brace, rest = line.partition(b"{")
        if not brace or (name not in _GPU_LINES and name not in _HOST_LINES):
            return
        labels, end = _labels(rest)
        value = _number(rest[end:])
        if value is None:
            return
        if name in _HOST_LINES:
            self._host[_HOST_LINES[name]] = value
        else:
            self._take_gpu(_GPU_LINES[name], labels, value)

    def _take_gpu(self, what: str, labels: dict[str, str], value: float) -> None:
        raw_index = labels.get("GpuIndex", "")
        index = plausible.gpu_count(int(raw_index)) if raw_index.isdecimal() and len(raw_index) < 6 else None
        key = plausible.text(labels.get("GpuUuid", "")) or (None if index is None else f"#{index}")
        if key is None or (key not in self._gpus and len(self._gpus) >= plausible.MAX_GPUS):
            return
        self._gpus.setdefault(key, {})[what] = value
        if index is not None:
            self._index[key] = index
        if (model := plausible.text(labels.get("GpuDeviceName", ""))) is not None:
            self._model[key] = model

    def _sample(self, key: str, values: dict[str, float], taken_at: float) -> GpuSample:
        used, available = _bytes(values.get("memory_used")), _bytes(values.get("memory_available"))
        total = None if used is None or available is None else plausible.memory_total(used + available)
        power, heat = values.get("power"), values.get("temperature")
        utilization = values.get("utilization")
        used = plausible.memory_part(used, total) if used is not None else None
        return GpuSample(
            uuid="" if key.startswith("#") else key,
            index=self._index.get(key),
            model=self._model.get(key),
            taken_at=taken_at,
            utilization=None if utilization is None else plausible.percent(utilization),
            memory_taken_at=None if used is None else taken_at,
            memory_used_bytes=used,
            memory_total_bytes=total,
            power_watts=None if power is None else plausible.power_watts(power),
            temperature_celsius=None if heat is None else plausible.temperature(heat),
        )

    def _host_sample(self, taken_at: float) -> HostSample | None:
        used, total = self._host.get("used"), self._host.get("total")
        limit = None if total is None else plausible.memory_total(int(total))
        known = None if used is None else plausible.memory_part(int(used), limit)
        if known is None:
            return None
        return HostSample(taken_at=taken_at, memory_used_bytes=known, memory_limit_bytes=limit, source="ray-agent")


def read_agent(
    url: str, *, limit_seconds: float = 2.0, token: str | None = None, clock: Callable[[], float] = time.monotonic
) -> RayAgentSample:
    """Ask Ray's agent. Raises FetchError when it does not answer, or not whole."""
    parser = AgentParser()
    fetch(url, parser.feed, limit_seconds=limit_seconds, max_bytes=MAX_ANSWER_BYTES, token=token, clock=clock)
    return parser.finish(taken_at=clock())


def named_gpus(sample: RayAgentSample, uuids: Sequence[str]) -> tuple[GpuSample, ...]:
    """Return the GPUs by UUID, where an older Ray tells indexes alone and `uuids` are known in the same order.

    `uuids`: of this pod, by index, as the head's node detail lists them. Another number of them than of GPUs names
    nobody.
    """
    if sample.gpus or not sample.unnamed_gpus:
        return sample.gpus
    if sorted(sample.unnamed_gpus) != list(range(len(uuids))):
        return ()
    return tuple(msgspec.structs.replace(sample.unnamed_gpus[index], uuid=uuid) for index, uuid in enumerate(uuids))


def _bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None or not 0 <= mebibytes <= 2**30 else int(mebibytes * _MIB)


def _number(text: bytes) -> float | None:
    """Return the value after the labels; None for what is no finite number. A time stamp may follow."""
    parts = text.split()
    try:
        value = float(parts[0]) if parts else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e300 else None


def _labels(text: bytes) -> tuple[dict[str, str], int]:
    """Return the labels of a line, after its opening brace, and where the closing one ends."""
    labels: dict[str, str] = {}
    at = 0
    while text[at : at + 1] not in (b"}", b""):
        equals = text.find(b'="', at)
        if equals < 0:
            return labels, len(text)
        name = text[at:equals].strip(b", ")
        value, at = _quoted(text, equals + 2)
        labels[name.decode("utf-8", "replace")] = value
        if text[at : at + 1] == b",":
            at += 1
    return labels, at + 1


def _quoted(text: bytes, begin: int) -> tuple[str, int]:
    """Return a label's value from after its opening quote, and where its closing one ends."""
    end = text.find(b'"', begin)
    while end > 0 and _escaped(text, end, begin):
        end = text.find(b'"', end + 1)
    if end < 0:
        return "", len(text)
    raw = text[begin:end]
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"\0").replace(b'\\"', b'"').replace(b"\\n", b"\n").replace(b"\0", b"\\")
    return raw.decode("utf-8", "replace"), end + 1


def _escaped(text: bytes, at: int, begin: int) -> bool:
    """Say whether an odd number of backslashes stands before this quote."""
    first = at
    while first > begin and text[first - 1 : first] == b"\\":
        first -= 1
    return (at - first) % 2 == 1

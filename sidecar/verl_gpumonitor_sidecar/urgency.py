# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Whether something happened that must be reported at once. Pure: what was, and the state, in; what is, out."""

from typing import Final

import msgspec

from verl_gpumonitor.model.vocabulary import GpuState

from .state import OwnGpu, PodState, gauges

NEARLY_FULL: Final = 0.95
"""Share of a GPU's memory from which an out-of-memory death is near."""
CALM_SECONDS: Final = 60.0
"""A GPU that was nearly full less long ago is no news: rollout engines fill it at each step."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the last look saw, by UUID."""

    nearly_full_at: dict[str, float] = {}
    not_ok: frozenset[str] = frozenset()
    xids: dict[str, int] = {}


def look(before: Known, state: PodState, now: float) -> tuple[Known, bool]:
    """Return what is known now, and whether it is news that must not wait.

    News are: memory nearly full for the first time in a while, a GPU that stopped answering, a new Xid.
    """
    full = {gpu.sample.uuid: now for gpu in state.gpus if _nearly_full(gpu, state, now)}
    not_ok = frozenset(gpu.sample.uuid for gpu in state.gpus if gpu.sample.state is not GpuState.OK)
    xids = {gpu.sample.uuid: sum(gpu.counters.xid_errors.values()) for gpu in state.gpus}
    known = Known(nearly_full_at={**before.nearly_full_at, **full}, not_ok=not_ok, xids=xids)
    news = (
        any(now - before.nearly_full_at.get(uuid, now - CALM_SECONDS) >= CALM_SECONDS for uuid in full)
        or bool(not_ok - before.not_ok)
        or any(count > before.xids.get(uuid, 0) for uuid, count in xids.items())
    )
    return known, news


def _nearly_full(gpu: OwnGpu, state: PodState, now: float) -> bool:
    sample = gauges(gpu.sample, state, now)
    if sample.memory_used_bytes is None or not sample.memory_total_bytes:
        return False
    return sample.memory_used_bytes + (sample.memory_reserved_bytes or 0) >= NEARLY_FULL * sample.memory_total_bytes

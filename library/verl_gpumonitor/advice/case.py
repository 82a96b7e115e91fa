# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""One finding of one job, as the advisors look at it: its figures, and the way to word a change. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from verl_gpumonitor.model.figures import GIB
from verl_gpumonitor.model.findings import Advice, Finding

from .config import Config
from .constraints import Weighed, pointless, refusals
from .context import Context

SAFE_SHARE: Final = 0.90
"""Of a GPU's memory: above it, fragmentation and the runtime's own buffers decide whether the next step fits."""
GROWTH_STEPS: Final = 3
"""Memory that still grows is given room for so many more steps."""
STATE_BYTES: Final = 16.0
"""Of one parameter in training: weights and gradients in fp32, two moments of Adam."""

_IMPLAUSIBLE: Final = 1e18
"""An exbibyte, or an age in seconds: what is above is no measurement. It also leaves out NaN and infinity."""

_LEAST_GPU: Final = 2.0**20
"""No GPU and no stage has less memory than that."""

Found = Iterator[Advice | None]
"""What an advisor yields: the best first; None where a change was weighed and refused."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A finding and its job."""

    finding: Finding
    context: Context

    @cached_property
    def config(self) -> Config:
        """The settings in effect."""
        return self.context.config

    @property
    def stage(self) -> str | None:
        """The stage the finding names; None where it names none, or one that nobody knows."""
        stage = self.finding.scope.stage
        return None if stage in ("unknown", "other", "") else stage

    def figure(self, *names: str) -> float | None:
        """Return the first of these figures of the evidence that is a number one can reckon with."""
        for name in names:
            value = self.finding.evidence.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _IMPLAUSIBLE:
                return float(value)
        return None

    # Sizes.

    @property
    def total_bytes(self) -> float | None:
        """Memory of the GPU, or of the job's smallest."""
        total = self.figure("memory_total_bytes")
        return total if total is not None and total >= _LEAST_GPU else self.context.memory_total_bytes

    @property
    def peak_bytes(self) -> float | None:
        """Highest memory seen in the stage."""
        peak = self.figure("peak_bytes", "memory_peak_bytes", "memory_used_bytes")
        if peak is not None:
            return peak
        steps = self.finding.evidence.get("step_peak_bytes") or self.finding.evidence.get("step_bytes")
        if isinstance(steps, list):
            return max((float(s) for s in steps if abs(s) < _IMPLAUSIBLE), default=None)
        total, headroom = self.total_bytes, self.figure("headroom_bytes")
        return total - headroom if total is not None and headroom is not None else None

    @property
    def missing_bytes(self) -> float | None:
        """What must be freed for the stage to be safe; None if it cannot be told.

        What the evidence says, which looks some steps ahead, else `peak + 3 steps of growth - 90% of the GPU`.
        """
        said = self.figure("missing_bytes")
        if said is not None and said > 0:
            return said
        total, peak = self.total_bytes, self.peak_bytes
        if not total or not peak:
            return None
        growth = max(self.figure("growth_bytes_per_step") or 0.0, 0.0)
        return max(0.0, peak + GROWTH_STEPS * growth - SAFE_SHARE * total) or None

    def kept_share(self, *, state_bytes: float = STATE_BYTES) -> float | None:
        """Return the share of a batch that still fits, 0..1; None if it cannot be told.

        What grows with the batch is the peak without what lies there anyway. That is at least the training state, as
        far as the model's size and the number of GPUs are known (else a quarter of the peak), and at most the least
        memory seen in the stage (else three quarters): allocators keep what one micro batch leaves to the next. The
        middle is taken. Peak 80 GB, least 60, 7e9 parameters on 8 GPUs (14 GB): 43 GB grow; to free 8.6 keeps 80%.
        """
        missing, peak = self.missing_bytes, self.peak_bytes
        if missing is None or peak is None or peak < _LEAST_GPU:
            return None
        state, least = self._state_bytes(state_bytes), self.figure("lowest_bytes", "floor_bytes")
        still = ((0.25 * peak if state is None else state) + (0.75 * peak if least is None else least)) / 2
        grows = min(max(peak - still, 0.2 * peak), 0.9 * peak)
        return max(0.0, 1.0 - missing / grows)

    def _state_bytes(self, of_one: float) -> float | None:
        parameters, gpus = self.config.parameters, self.config.gpus
        return of_one * parameters / gpus if parameters and gpus else None

    # Words.

    @property
    def need(self) -> str:
        """Say in words what has to be freed."""
        missing, peak, total = self.missing_bytes, self.peak_bytes, self.total_bytes
        stage = self.stage or "this stage"
        if missing is None:
            return f"{stage} comes near the end of the GPU's memory"
        where = f" (its peak is {peak / GIB:.1f} of {total / GIB:.1f} GiB)" if peak and total else ""
        return f"{missing / GIB:.1f} GiB have to be freed for {stage} to be safe{where}"

    @property
    def because(self) -> str:
        """What of the evidence leads to a change, where the lever has no better words for it."""
        return self.need if self.finding.reason in ("OOMRisk", "MemoryGrowth") else self.finding.message[:200]

    def change(
        self,
        key: str,
        value: str,
        *,
        text: str,
        reason: str = "",
        price: str = "",
        confidence: str = "medium",
        along: Mapping[str, str] | None = None,
    ) -> Advice | None:
        """Return advice to set a key, or None if verl would refuse or ignore that, or it is set so already.

        `along`: keys that have to change with it; they are named in the text.
        """
        config = self.config
        weighed = Weighed(
            before=config,
            changes={key: value, **(along or {})},
            open_reasons=self.context.open_reasons | {self.finding.reason},
            memory_total_bytes=self.context.memory_total_bytes or _whole(self.total_bytes),
        )
        if refusals(weighed):
            return None
        both = " and ".join(f"{config.spelled(k)}={v}" for k, v in (along or {}).items())
        return Advice(
            parameter=config.spelled(key),
            current=config.text(key),
            suggested=value,
            text=self._hedged(f"{text}; set {both} with it" if both else text, key),
            reason=reason or self.because,
            price=price,
            confidence=confidence if self.sure(key) else "low",
        )

    def condition(
        self, key: str, *, text: str, price: str = "", reason: str = "", confidence: str = "low"
    ) -> Advice | None:
        """Return advice about a key whose right value hangs on what cannot be seen; None if the key decides nothing."""
        config = self.config
        if pointless(config, key):
            return None
        return Advice(
            parameter=config.spelled(key),
            current=config.text(key),
            text=self._hedged(text, key),
            reason=reason or self.because,
            price=price,
            confidence=confidence if self.sure(key) else "low",
        )

    def sure(self, key: str) -> bool:
        """Whether the job's verl has the key for certain, and its settings can be seen."""
        return self.config.everywhere(key) and self.config.launch.known

    def _hedged(self, text: str, key: str) -> str:
        versions = self.config.versions
        if not self.config.everywhere(key):
            return f"{text} (the key as verl {versions.primary} calls it; which of {versions.text} runs is not known)"
        return text


def say(
    text: str, *, reason: str = "", price: str = "", confidence: str = "medium", parameter: str | None = None
) -> Advice:
    """Return advice that is no setting of verl: something to do, or a field of a Kubernetes object."""
    return Advice(parameter=parameter, text=text, reason=reason, price=price, confidence=confidence)


def doubtful(advice: Advice | None, condition: str) -> Advice | None:
    """Return the same advice under a condition that comes first, such as `If the rollout is uneven too: `."""
    if advice is None:
        return None
    return msgspec.structs.replace(advice, text=f"{condition}{advice.text}", confidence="low")


def round_down(value: float) -> int:
    """Return a token count as people write it: 22,938 is 22,528, 9,300 is 9,216, 1,100 is 1,024."""
    for least, multiple in ((16384, 1024), (4096, 512), (1024, 128)):
        if value >= least:
            return int(value // multiple) * multiple
    return int(value)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

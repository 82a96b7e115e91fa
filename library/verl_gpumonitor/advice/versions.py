# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Which release of verl a job runs: said by the job, or narrowed by what its command line and Ray show.

Names of keys changed between releases, and one that a release does not know ends the job at its start. So advice is
tied to a release; where that is not known, to the newest that fits all evidence, and says so.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from verl_gpumonitor.stages.releases import RELEASES, words_of

from .catalogue import EXAMINED, versions_of
from .settings import Launch

_NUMBERS: Final = re.compile(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")

_PREFIXES: Final[dict[str, tuple[str, str]]] = {
    "trainer.v1.": ("0.9.0", "0.9.1"),
    "critic.fsdp.": ("0.8.0", "0.9.1"),
    "critic.model.fsdp_config.": ("0.3.0.post1", "0.7.1"),
    "reward.": ("0.7.1", "0.9.1"),
    "ray_init.": ("0.3.0.post1", "0.5.0"),
    "ray_kwargs.": ("0.6.1", "0.9.1"),
    "transfer_queue.": ("0.6.1", "0.9.1"),
}
"""Beginnings of keys that only some releases take."""

_MODULES: Final[dict[str, tuple[str, str]]] = {
    "verl.trainer.main_ppo_sync": ("0.8.0", "0.8.0"),
    "verl.trainer.fsdp_sft_trainer": ("0.3.0.post1", "0.7.0"),
    "verl.trainer.sft_trainer": ("0.6.1", "0.9.1"),
    "verl.trainer.sft_trainer_ray": ("0.7.0", "0.9.1"),
    "verl.trainer.main_generation": ("0.3.0.post1", "0.7.0"),
    "verl.trainer.main_generation_server": ("0.6.1", "0.9.1"),
    "verl.experimental.fully_async_policy.fully_async_main": ("0.8.0", "0.9.1"),
    "verl.experimental.one_step_off_policy.main_ppo": ("0.8.0", "0.9.1"),
}


class VersionRange(msgspec.Struct, frozen=True, kw_only=True):
    """The examined releases that a job's verl can be, or lies between."""

    candidates: tuple[str, ...] = EXAMINED
    """Oldest first, never empty; all of them where nothing tells."""
    primary: str = EXAMINED[-1]
    """The one whose keys advice uses."""
    said: str | None = None
    """The version as the job says it; None if it was only narrowed."""

    @property
    def text(self) -> str:
        """Such as `0.8.0`, or `0.8.0 to 0.9.1`."""
        if self.said is not None:
            return self.said
        first, last = self.candidates[0], self.candidates[-1]
        return first if first == last else f"{first} to {last}"

    def since(self, version: str) -> bool:
        """Whether the release whose keys are used is this examined one or a later one."""
        return EXAMINED.index(self.primary) >= EXAMINED.index(version)


def guess(launch: Launch, ray_names: Iterable[str] = (), *, said: str | None = None) -> VersionRange:
    """Return the range of releases. `said`: the version itself, where something names it; the rest is then not asked.

    Evidence that contradicts all other is left out: a user's own class may have any name.
    """
    numbers = _NUMBERS.match(said) if said else None
    if said and numbers:
        return _around((int(numbers[1]), int(numbers[2]), int(numbers[3] or 0)), said.strip()[:64])
    candidates: tuple[str, ...] = EXAMINED
    for allowed in _evidence(launch, ray_names):
        candidates = tuple(v for v in candidates if v in allowed) or candidates
    return VersionRange(candidates=candidates, primary=candidates[-1])


def _around(numbers: tuple[int, int, int], said: str) -> VersionRange:
    """Return the examined release of these numbers, or its neighbours.

    Between two, the later one is nearer if it is of the same minor release: 0.6.0 is read as 0.6.1, 0.3.5 as 0.3.0.
    """
    ordered = [(_key(v), v) for v in EXAMINED]
    below = [v for key, v in ordered if key <= numbers]
    above = [v for key, v in ordered if key > numbers]
    if below and _key(below[-1]) == numbers:
        return VersionRange(candidates=(below[-1],), primary=below[-1], said=said)
    candidates = tuple(below[-1:] + above[:1])
    same_minor = [v for v in candidates if _key(v)[:2] == numbers[:2]]
    return VersionRange(candidates=candidates, primary=(same_minor or candidates)[0], said=said)


def _key(version: str) -> tuple[int, int, int]:
    numbers = _NUMBERS.match(version)
    assert numbers is not None  # noqa: S101  # Our own constants.
    return int(numbers[1]), int(numbers[2]), int(numbers[3] or 0)


def _evidence(launch: Launch, ray_names: Iterable[str]) -> Iterable[frozenset[str]]:
    """Yield sets of releases, the surest evidence first."""
    if launch.module in _MODULES:
        yield _span(*_MODULES[launch.module])
    words = {word for name in ray_names for word in words_of(name)}
    for word in sorted(words & RELEASES.keys()):
        yield _span(*RELEASES[word])
    for key in launch.overrides:
        if key in launch.added:
            continue
        takers = versions_of(key)
        if takers:
            yield takers
        for prefix, span in _PREFIXES.items():
            if key.startswith(prefix):
                yield _span(*span)


def _span(first: str, last: str) -> frozenset[str]:
    return frozenset(EXAMINED[EXAMINED.index(first) : EXAMINED.index(last) + 1])

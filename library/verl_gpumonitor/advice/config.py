# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The settings that a job runs with: what its command line says, else the default of its verl. Pure.

A value is unknown (None) where the command line is, where it hangs on a variable, and where a configuration of the
user's own may have changed the default. `null` is None too: a setting without a value decides nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from .catalogue import FSDP, MEGATRON, Entry, entry
from .settings import Launch
from .versions import VersionRange

A: Final = "actor_rollout_ref.actor"
R: Final = "actor_rollout_ref.rollout"
F: Final = "actor_rollout_ref.ref"
M: Final = "actor_rollout_ref.model"

_INTEGER: Final = re.compile(r"[+-]?\d{1,15}")
_DECIMAL: Final = re.compile(r"[+-]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?:[eE][+-]?\d{1,2})?")
_BILLIONS: Final = re.compile(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)[bB](?![A-Za-z0-9])")
_OWN_DEFAULTS: Final = frozenset({None, "ppo_trainer", "ppo_megatron_trainer"})
_PPO: Final = frozenset({"verl.trainer.main_ppo", "verl.trainer.main_ppo_sync"})
_MAX_FOLLOWED: Final = 4
_NULL: Final = frozenset({"null", "none", "~", ""})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one job under one release of verl. What follows from them is worked out once."""

    launch: Launch
    versions: VersionRange
    changes: Mapping[str, str] = field(default_factory=dict)
    """Values that are weighed in place of the present ones."""

    def changed(self, changes: Mapping[str, str]) -> "Config":
        """Return the settings as they would be with these values."""
        return replace(self, changes={**self.changes, **changes})

    # What there is.

    @cached_property
    def ppo(self) -> bool | None:
        """Whether it is verl's PPO trainer (GRPO and others are run by it); None if that is not known."""
        module = self.launch.module
        if module in _PPO or any(key.startswith("actor_rollout_ref.") for key in self.launch.overrides):
            return True
        return None if module is None or module.startswith(("verl.experimental.", "recipe.")) else False

    @cached_property
    def defaults_hold(self) -> bool:
        """Whether what the command line does not say has verl's default."""
        launch = self.launch
        return launch.module in _PPO and launch.config_path is None and launch.config_name in _OWN_DEFAULTS

    @cached_property
    def flavour(self) -> str:
        """`fsdp` or `megatron`: their keys differ."""
        launch = self.launch
        strategy = launch.overrides.get(f"{A}.strategy")
        if strategy is not None:
            return MEGATRON if strategy == MEGATRON else FSDP
        if launch.overrides.get("model_engine") == MEGATRON or "megatron" in (launch.config_name or ""):
            return MEGATRON
        return FSDP

    @cached_property
    def legacy_workers(self) -> bool:
        """Whether the old worker classes run, which read other keys than the engine workers."""
        disabled = self.launch.overrides.get("trainer.use_legacy_worker_impl") == "disable"
        return not self.versions.since("0.8.0") and not (disabled and self.versions.since("0.7.0"))

    @cached_property
    def v1(self) -> bool:
        """Whether the trainers of `trainer/ppo/v1` run, or their preview of 0.8.0.

        An older release may be named beside that module, by mistake: the release decides, as it does on the keys.
        """
        if self.launch.module == "verl.trainer.main_ppo_sync":
            return self.versions.since("0.8.0")
        return self.versions.since("0.9.0") and self.launch.overrides.get("trainer.use_v1", "true").lower() != "false"

    def entry(self, key: str) -> Entry | None:
        """Return what the release whose keys are used knows of a key; None if it has none of that name."""
        return entry(key, version=self.versions.primary, flavour=self.flavour)

    def everywhere(self, key: str) -> bool:
        """Whether all releases that it can be have the key, in the same form."""
        found = [entry(key, version=version, flavour=self.flavour) for version in self.versions.candidates]
        return (
            all(f is not None and f.plus == found[0].plus for f in found if found[0] is not None) and None not in found
        )

    def spelled(self, key: str) -> str:
        """Return the key as the command line must have it: with `+` where the release needs that."""
        found = self.entry(key)
        return f"+{key}" if found is not None and found.plus else key

    # Present values.

    def text(self, key: str) -> str | None:
        """Return the value in effect, as it is written; None if unknown or null."""
        if key not in self._texts:
            value = self._raw(key)
            self._texts[key] = None if value is None or value.lower() in _NULL else value
        return self._texts[key]

    @cached_property
    def _texts(self) -> dict[str, str | None]:
        return {}

    def given(self, key: str) -> bool:
        """Whether the command line says it, and not as null."""
        value = self.changes.get(key, self.launch.overrides.get(key))
        return value is not None and value.lower() not in _NULL

    def integer(self, key: str) -> int | None:
        """Return a whole number; None if unknown or something else."""
        text = self.text(key)
        return int(text) if text is not None and _INTEGER.fullmatch(text) else None

    def number(self, key: str) -> float | None:
        """Return a number; None if unknown or something else."""
        text = self.text(key)
        return float(text) if text is not None and _DECIMAL.fullmatch(text) else None

    def flag(self, key: str) -> bool | None:
        """Return a switch; None if unknown or something else."""
        return {"true": True, "false": False, "1": True, "0": False}.get((self.text(key) or "").lower())

    def _raw(self, key: str, followed: int = 0) -> str | None:
        given = self.changes.get(key, self.launch.overrides.get(key))
        if given is not None:
            return None if "$" in given or given == "***" else given
        if not self.defaults_hold or key in self.launch.deleted:
            return None
        found = self.entry(key)
        if found is None:
            return None
        if found.follows is not None and followed < _MAX_FOLLOWED:
            return self._raw(found.follows, followed + 1)
        return found.default

    # What follows from several of them.

    @cached_property
    def gpus(self) -> int | None:
        """GPUs of the trainer: `trainer.nnodes * trainer.n_gpus_per_node`."""
        nodes, each = self.integer("trainer.nnodes"), self.integer("trainer.n_gpus_per_node")
        return nodes * each if nodes and each and nodes > 0 and each > 0 else None

    @cached_property
    def longest(self) -> int | None:
        """Most tokens of one sequence: prompt and response."""
        prompt, response = self.integer("data.max_prompt_length"), self.integer("data.max_response_length")
        return prompt + response if prompt is not None and response is not None else None

    @cached_property
    def critic(self) -> bool | None:
        """Whether there is a critic; None if it cannot be known."""
        enabled = self.flag("critic.enable") if self.versions.since("0.6.1") else None
        if enabled is not None:
            return enabled
        estimator = self.text("algorithm.adv_estimator")
        return None if estimator is None else estimator == "gae"

    @cached_property
    def ref(self) -> bool | None:
        """Whether a reference model is computed; None if it cannot be known."""
        if not self.versions.since("0.4.1"):
            return True
        flags = self.flag(f"{A}.use_kl_loss"), self.flag("algorithm.use_kl_in_reward")
        return True if True in flags else None if None in flags else False

    @cached_property
    def reward_prefix(self) -> str:
        """Where the reward model's settings are."""
        return "reward.reward_model" if self.versions.since("0.7.1") else "reward_model"

    @cached_property
    def reward_model(self) -> bool | None:
        """Whether there is a reward model; None if it cannot be known."""
        old = self.flag("reward_model.enable")
        new = self.flag(f"{self.reward_prefix}.enable")
        ignored = self.versions.since("0.9.0")  # There the old keys are taken and do nothing.
        return True if new or (old and not ignored) else new

    def sequence_parallel(self, role: str) -> int | None:
        """Return over how many GPUs one sequence of a role (`actor`, `ref`, `critic`) is split; None if unknown.

        Releases with engine workers have an old and a new key for it, and the larger one counts.
        """
        known = [size for key in self._sequence_parallel_keys(role) if (size := self.integer(key)) is not None]
        return max(known, default=None)

    def sequence_parallel_key(self, role: str) -> str:
        """Return the key that decides it. For Megatron it is context parallelism that does so."""
        return self._sequence_parallel_keys(role)[0]

    def _sequence_parallel_keys(self, role: str) -> tuple[str, ...]:
        root = {"actor": A, "ref": F, "critic": "critic"}.get(role, "reward_model")
        if self.flavour == MEGATRON:
            return (f"{root}.megatron.context_parallel_size",)
        old, new = f"{root}.ulysses_sequence_parallel_size", f"{root}.fsdp_config.ulysses_sequence_parallel_size"
        if self.legacy_workers:
            return (old,)
        if role != "critic":
            return (new, old)
        if self.versions.since("0.8.0"):
            return ("critic.fsdp.ulysses_sequence_parallel_size",)
        return ("critic.model.fsdp_config.ulysses_sequence_parallel_size", old)

    @cached_property
    def parameters(self) -> float | None:
        """Weights of the actor's model, as its path says: 7e9 for `/models/Qwen2.5-7B`; None if it says nothing."""
        found = _BILLIONS.search((self.text(f"{M}.path") or "").rpartition("/")[2])
        return float(found[1]) * 1e9 if found and float(found[1]) > 0 else None

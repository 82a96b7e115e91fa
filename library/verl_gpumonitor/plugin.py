# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin of verl: marks verl's own timers and the states of its ranks, with no change to anybody's code.

verl imports this module by itself: from 0.9 on as an entry point of `verl.plugins`, from 0.6.1 on where
`VERL_USE_EXTERNAL_MODULES=verl_gpumonitor.plugin` names it; before, a program may import it. The import is the
installation, since that is all that verl does with a plugin. `GPUMONITOR_PLUGIN=off` leaves everything as it is.

What is touched, and why there:

- `codetiming.Timer.start` and `.stop`. In all versions every stage of the driver goes through a Timer that bears its
  name; the functions around it (`_timer`, `marked_timer`) moved, and are imported by name into the trainers, but the
  class is one object for all of them.
- `Tracking.__init__` and `.log`: the configuration tells whether all GPUs are one pool, and each step is logged under
  its number. Timers know neither. (The trainer does, but to look into its frame would keep its batches alive.)
- `DistProfiler.annotate`: in the workers, which run the stages that they compute themselves.

All of it runs inside training processes. Each wrapper calls what it wraps exactly once, with what it was given, and
hands on what comes back; a mark costs some microseconds, and whatever goes wrong in it is dropped.
"""

import functools
import importlib.abc
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from .model.marks import STEP, MarkScope
from .stages.sources.mark_sender import MarkSender

ENV_PLUGIN: Final = "GPUMONITOR_PLUGIN"
"""`off` leaves verl as it is."""

DRIVER_STAGES: Final[Mapping[str, str]] = {
    "gen": "gen",
    "gen_max": "gen",
    "reward": "reward",
    "old_log_prob": "old_log_prob",
    "ref": "ref",
    "values": "values",
    "adv": "adv",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "update_weights": "update_weights",
    "save_checkpoint": "save_checkpoint",
    "testing": "testing",
}
"""Timer of the driver -> stage. Others are within one of these, or have nothing to do with a GPU."""

RANK_STAGES: Final[Mapping[str, tuple[str, str]]] = {
    "actor_update": ("update_actor", "actor"),
    "update_actor": ("update_actor", "actor"),
    "ref_compute_log_prob": ("ref", "ref"),
    "compute_ref_log_prob": ("ref", "ref"),
    "critic_compute_values": ("values", "critic"),
    "compute_values": ("values", "critic"),
    "critic_update": ("update_critic", "critic"),
    "update_critic": ("update_critic", "critic"),
    "rollout_generate": ("gen", "rollout"),
    "generate_sequences": ("gen", "rollout"),
    "compute_rm_score": ("reward", "reward"),
}
"""State of a rank -> stage and role. `actor_compute_log_prob` is not among them: with LoRA it is the reference too."""

TRAIN_BATCH: Final = "train_batch"
"""A state that is part of `actor_update`; else the critic's, or, in a process without Ray, a step of SFT."""

_MARK: Final = "_gpumonitor_marks"
"""Attribute of a function of ours."""


class _Driver:
    """What is known of the job in the process that drives it."""

    def __init__(self) -> None:
        self.one_pool = False
        """Whether all GPUs are known to be one pool, so that the driver's stage is that of each of them."""
        self.logged: int | None = None
        """Number of the step that was logged last."""
        self.whole = MarkSender(scope=MarkScope.DRIVER)
        self.steps = MarkSender(scope=MarkScope.PART)
        """Where pools differ, the driver's stages say nothing of a GPU; its steps are steps all the same."""

    def begin(self, timer: str) -> tuple[MarkSender, int] | None:
        """Mark that a timer starts; None where that means nothing."""
        step = None if self.logged is None else self.logged + 1
        if timer == STEP:
            sender = self.whole if self.one_pool else self.steps
            return sender, sender.begin(STEP, step=step)
        stage = DRIVER_STAGES.get(timer)
        if stage is None or not self.one_pool:
            return None
        return self.whole, self.whole.begin(stage, step=step)

    def step_ended(self, step: int) -> None:
        self.logged = step
        (self.whole if self.one_pool else self.steps).point(STEP, step=step)


_driver = _Driver()
_ranks = MarkSender(scope=MarkScope.PART)
_timers: dict[int, tuple[MarkSender, int]] = {}
"""Span of each timer that runs, by its id: in the timer itself it would be pickled and copied with it."""
_inside: set[str] = set()
"""Stages of this rank that run. A rank does one thing after another."""


def install() -> None:
    """Touch what is there, and the rest when it is imported. Never raises; a second time nothing happens."""
    if os.environ.get(ENV_PLUGIN, "").strip().lower() in ("off", "0", "false", "no", "none"):
        return
    # A worker of Ray has timers of the same names as the driver's, within its states.
    worker = "WG_PREFIX" in os.environ
    patches: dict[str, Callable[[ModuleType], None]] = {"verl.utils.profiler.profile": _touch_profile}
    if not worker:
        patches |= {"codetiming._timer": _touch_timer, "verl.utils.tracking": _touch_tracking}
    with suppress(Exception):  # a job without marks is a job all the same
        for name in list(patches):
            if name in sys.modules:
                _guarded(patches.pop(name))(sys.modules[name])
        if patches and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder({name: _guarded(patch) for name, patch in patches.items()}))


def one_pool(config: object) -> bool:
    """Say whether a job's configuration puts everything on one pool of GPUs. False where it is not understood."""
    if not isinstance(config, Mapping) or not isinstance(config.get("actor_rollout_ref"), Mapping):
        return False
    apart = (
        _at(config, "actor_rollout_ref.hybrid_engine") is False,
        _at(config, "trainer.v1.trainer_mode") == "separate_async" and _at(config, "trainer.use_v1") is not False,
        bool(_at(config, "actor_rollout_ref.rollout.nnodes")),
        bool(_at(config, "reward_model.enable") and _at(config, "reward_model.enable_resource_pool")),
        bool(_at(config, "reward.reward_model.enable") and _at(config, "reward.reward_model.enable_resource_pool")),
        bool(_at(config, "distillation.enabled")),
    )
    return not any(apart)


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# --- what is touched -------------------------------------------------------------------------------------------


def _touch_timer(module: ModuleType) -> None:
    timer = module.Timer
    start, stop = timer.start, timer.stop
    if hasattr(start, _MARK):
        return

    @functools.wraps(start)
    def marked_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = start(self, *args, **kwargs)
        _timer_started(self)
        return result

    @functools.wraps(stop)
    def marked_stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stop(self, *args, **kwargs)
        finally:
            _timer_stopped(self)

    setattr(marked_start, _MARK, True)
    timer.start, timer.stop = marked_start, marked_stop


def _timer_started(timer: Any) -> None:
    with suppress(Exception):  # never the training's trouble
        if isinstance(timer.name, str) and (begun := _driver.begin(timer.name)) is not None:
            _timers[id(timer)] = begun


def _timer_stopped(timer: Any) -> None:
    with suppress(Exception):
        begun = _timers.pop(id(timer), None)
        if begun is not None:
            sender, span = begun
            sender.end(span)


def _touch_tracking(module: ModuleType) -> None:
    tracking = module.Tracking
    begin, log = tracking.__init__, tracking.log
    if hasattr(log, _MARK):
        return

    @functools.wraps(begin)
    def seen_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _job_seen(args, kwargs)

    @functools.wraps(log)
    def seen_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = log(self, *args, **kwargs)
        _step_logged(args, kwargs)
        return result

    setattr(seen_log, _MARK, True)
    tracking.__init__, tracking.log = seen_begin, seen_log


def _job_seen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        _driver.one_pool = one_pool(kwargs["config"] if "config" in kwargs else args[3])
    except Exception:  # noqa: BLE001 - not understood
        _driver.one_pool = False


def _step_logged(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    with suppress(Exception):
        _driver.step_ended(int(kwargs["step"] if "step" in kwargs else args[1]))


def _touch_profile(module: ModuleType) -> None:
    profiler = module.DistProfiler
    # A static method in some versions, one of the class in others: it stays what it was.
    method = inspect.getattr_static(profiler, "annotate")
    annotate = method.__func__
    if hasattr(annotate, _MARK):
        return

    @functools.wraps(annotate)
    def marking_annotate(*args: Any, **kwargs: Any) -> Any:
        decorate = annotate(*args, **kwargs)

        @functools.wraps(decorate)
        def decorator(function: Any) -> Any:
            return _marked(decorate(function), function, kwargs.get("role"))

        return decorator

    setattr(marking_annotate, _MARK, True)
    profiler.annotate = type(method)(marking_annotate)


def _marked(decorated: Any, function: Any, state: object) -> Any:
    """Return the decorated method with its marks; itself where it means nothing, or returns before it is done."""
    try:
        name = state if isinstance(state, str) else function.__name__
        if not (name == TRAIN_BATCH or name in RANK_STAGES) or inspect.iscoroutinefunction(function):
            return decorated

        @functools.wraps(decorated)
        def marked(*args: Any, **kwargs: Any) -> Any:
            begun = _rank_began(name)
            try:
                return decorated(*args, **kwargs)
            finally:
                _rank_ended(begun)
    except Exception:  # noqa: BLE001 - as verl made it
        return decorated
    return marked


def _rank_began(state: str) -> tuple[str, int] | None:
    try:
        if state != TRAIN_BATCH:
            stage, role = RANK_STAGES[state]
        elif "WG_PREFIX" not in os.environ:
            stage, role = TRAIN_BATCH, "trainer"
        elif "update_actor" in _inside or "update_critic" in _inside:
            return None
        else:
            stage, role = "update_critic", "critic"
        _inside.add(stage)
        return stage, _ranks.begin(stage, role=role)
    except Exception:  # noqa: BLE001
        return None


def _rank_ended(begun: tuple[str, int] | None) -> None:
    if begun is not None:
        stage, span = begun
        _inside.discard(stage)
        _ranks.end(span)


# --- modules that are not there yet ----------------------------------------------------------------------------


def _guarded(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def patch_or_leave(module: ModuleType) -> None:
        with suppress(Exception):  # another verl than we know
            patch(module)

    return patch_or_leave


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a few modules as everybody else does, and has each touched right after it ran, once."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the others find, with a loader of ours; None for all but a few modules."""
        patch = self._patches.get(fullname)
        if patch is None or fullname in self._looking:
            return None
        self._looking.add(fullname)  # another finder may ask all finders in turn
        try:
            finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
            found = (find(fullname, path, target) for find in finders if find is not None)
            spec: ModuleSpec | None = next((spec for spec in found if spec is not None), None)
        finally:
            self._looking.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, patch)
        return spec


class _Loader(importlib.abc.Loader):
    """Stands in for a module's loader until the module ran."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)


install()

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin in programs of verl's shape, each a process of its own, with the real codetiming."""

import os
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_gpumonitor.plugin import one_pool
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT
from verl_gpumonitor.stages.sources.marks import MarkReceiver

from . import shape

ONE_POOL = {"actor_rollout_ref": {"hybrid_engine": True}, "trainer": {"use_v1": True}}
STAGES = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"]
ROLES = ["rollout", "reward", "actor", "ref", "critic", "driver", "critic", "actor"]

Run = Callable[..., str]


@pytest.fixture
def receiver() -> Iterator[MarkReceiver]:
    receiver = MarkReceiver(0)
    yield receiver
    receiver.close()


@pytest.fixture
def run(tmp_path: Path, receiver: MarkReceiver) -> Run:
    """Run a program beside the package of verl's shape; return what it prints."""
    shape.write(tmp_path)

    def run(program: str, **environ: str) -> str:
        plain = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WG_PREFIX")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"ONE_POOL = {ONE_POOL}\n" + textwrap.dedent(program)],
            env={**plain, "PYTHONPATH": str(tmp_path), ENV_MARKS_PORT: str(receiver.port), **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        receiver.poll()
        return done.stdout.strip()

    return run


EXTERNAL = {"VERL_USE_EXTERNAL_MODULES": "verl_gpumonitor.plugin"}


def test_every_stage_and_step_of_the_driver_is_marked(run: Run, receiver: MarkReceiver) -> None:
    printed = run("from verl.trainer.ray_trainer import fit; print(fit(ONE_POOL, 2, first=41))", **EXTERNAL)
    assert printed == str((sorted([*STAGES, "step", "tool_calls"]), [40, 41, 42]))
    now = time.time()
    intervals = receiver.cluster_word(now).intervals
    assert [i.stage for i in intervals] == STAGES * 2
    assert [i.role for i in intervals] == ROLES * 2
    assert [i.step for i in intervals] == [41] * 8 + [42] * 8
    assert all(i.end is not None and i.end - i.begin >= 0.002 for i in intervals)
    assert [(span.step, span.end is not None) for span in receiver.steps(now)] == [(41, True), (42, True)]


def test_a_step_without_a_known_number_gets_it_at_its_end(run: Run, receiver: MarkReceiver) -> None:
    run("from verl.trainer.ray_trainer import fit; fit(ONE_POOL, 1, first=7, validate=False)", **EXTERNAL)
    now = time.time()
    assert [span.step for span in receiver.steps(now)] == [7]
    assert {i.step for i in receiver.word(now).intervals} == {7}


def test_a_program_may_import_it_late(run: Run, receiver: MarkReceiver) -> None:
    """Before 0.6.1 verl loads no plugin. Names that were imported already are marked all the same."""
    run(
        """
        import verl.utils.tracking
        from verl.trainer.ray_trainer import fit
        import verl_gpumonitor.plugin
        fit(ONE_POOL, 1)
        """
    )
    assert [i.stage for i in receiver.word(time.time()).intervals] == STAGES


def test_an_exception_goes_through_and_ends_what_it_leaves(run: Run, receiver: MarkReceiver) -> None:
    printed = run(
        """
        from verl.trainer.ray_trainer import fit
        try:
            fit(ONE_POOL, 1, fail_in="ref")
        except RuntimeError as error:
            print(error)
        """,
        **EXTERNAL,
    )
    assert printed == "ref"
    word = receiver.word(time.time())
    assert [i.stage for i in word.intervals] == ["gen", "reward", "old_log_prob", "ref"]
    assert all(i.end is not None for i in word.intervals)


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", "no"])
def test_off_leaves_everything_as_it_is(run: Run, receiver: MarkReceiver, word: str) -> None:
    printed = run(
        """
        import sys
        from verl.trainer.ray_trainer import fit
        fit(ONE_POOL, 1)
        import codetiming
        print(codetiming.Timer.start.__module__, [f for f in sys.meta_path if "gpumonitor" in str(f)])
        """,
        **EXTERNAL,
        GPUMONITOR_PLUGIN=word,
    )
    assert printed == "codetiming._timer []"
    assert receiver.taken == 0


@pytest.mark.parametrize(
    "config",
    [
        {"actor_rollout_ref": {"hybrid_engine": False}},
        {"actor_rollout_ref": {}, "trainer": {"v1": {"trainer_mode": "separate_async"}}},
        None,
    ],
    ids=["one step off, fully async", "separate async", "not known"],
)
def test_with_several_pools_the_driver_tells_steps_alone(run: Run, receiver: MarkReceiver, config: object) -> None:
    run(f"from verl.trainer.ray_trainer import fit; fit({config}, 2, first=3)", **EXTERNAL)
    now = time.time()
    assert [span.step for span in receiver.steps(now)] == [3, 4]
    assert receiver.words(now) == ()
    assert receiver.cluster_word(now).intervals == ()


WORKER = {"WG_PREFIX": "abc", "WG_BACKEND": "ray", "RANK": "13", "RAY_LOCAL_WORLD_SIZE": "8"}


def test_a_worker_marks_its_states_and_not_its_timers(run: Run, receiver: MarkReceiver) -> None:
    printed = run(
        """
        from verl.workers import Worker
        worker = Worker()
        print(worker.update_actor(2, scale=10)[0], worker.compute_log_prob(4), worker.train_batch(1))
        try:
            worker.compute_values(6)
        except ValueError as error:
            print(error)
        """,
        **EXTERNAL,
        **WORKER,
    )
    assert printed.split() == ["30", "4", "2", "6"]
    intervals = [interval for word in receiver.words(time.time()) for interval in word.intervals]
    assert [(i.stage, i.role, i.local_rank) for i in intervals] == [
        ("update_actor", "actor", 5),
        ("update_critic", "critic", 5),
        ("values", "critic", 5),
    ]
    assert all(i.end is not None for i in intervals)


def test_methods_look_as_they_did(run: Run) -> None:
    """Ray and verl look at a worker's methods: names, signatures, whether they are coroutines, pickles, sources."""
    printed = run(
        """
        import asyncio, inspect, pickle
        import verl.utils.profiler.profile as profile
        from verl.workers import Worker
        print(Worker.update_actor.__qualname__, inspect.signature(Worker.update_actor))
        print(asyncio.run(Worker().generate()))
        print(pickle.loads(pickle.dumps(Worker.update_actor)) is Worker.update_actor)
        print(type(profile.__loader__).__name__, type(profile.__spec__.loader).__name__)
        print("class DistProfiler" in inspect.getsource(profile))
        """,
        **EXTERNAL,
        **WORKER,
    )
    assert printed.splitlines() == [
        "Worker.update_actor (self, batch, *, scale=1)",
        "5",
        "True",
        "SourceFileLoader SourceFileLoader",
        "True",
    ]


@pytest.mark.parametrize("kind", ["classmethod", "staticmethod"])
def test_the_profilers_annotation_stays_what_it_was(run: Run, tmp_path: Path, kind: str) -> None:
    first = "cls, " if kind == "classmethod" else ""
    (tmp_path / "verl/utils/profiler/profile.py").write_text(
        f"class DistProfiler:\n    @{kind}\n    def annotate({first}message=None, **outer):\n"
        f"        print({'cls.__name__' if first else '0'}, message, outer)\n        return lambda function: function\n"
    )
    printed = run(
        """
        import inspect
        from verl.utils.profiler.profile import DistProfiler
        class Mine(DistProfiler): pass
        print(inspect.signature(DistProfiler.annotate), type(inspect.getattr_static(DistProfiler, "annotate")).__name__)
        Mine.annotate("a", role="actor_update")(len)
        """,
        **EXTERNAL,
        **WORKER,
    )
    name = "Mine" if kind == "classmethod" else "0"
    assert printed.splitlines() == [f"(message=None, **outer) {kind}", f"{name} a {{'role': 'actor_update'}}"]


def test_a_timer_that_runs_can_be_copied(run: Run) -> None:
    """Whoever pickles or copies an object that holds one: nothing of ours, such as a socket, hangs on it."""
    printed = run(
        """
        import copy, pickle
        import verl_gpumonitor.plugin
        from codetiming import Timer
        timer = Timer(name="step", logger=None)
        timer.start()
        copies = copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))
        print([name for name in vars(timer) if "gpumonitor" in name], [copied.stop() > 0 for copied in copies])
        timer.stop()
        """
    )
    assert printed == "[] [True, True]"


def test_a_rank_of_sft_marks_its_training_steps(run: Run, receiver: MarkReceiver) -> None:
    run("from verl.workers import Worker; Worker().train_batch(1)", **EXTERNAL, RANK="1", LOCAL_RANK="1")
    intervals = [interval for word in receiver.words(time.time()) for interval in word.intervals]
    assert [(i.stage, i.role, i.local_rank) for i in intervals] == [("train_batch", "trainer", 1)]


def test_whatever_goes_wrong_in_a_mark_stays_there(run: Run) -> None:
    printed = run(
        """
        import verl_gpumonitor.plugin as plugin

        class Broken:
            def __getattr__(self, name):
                raise OSError(name)

        plugin._driver = plugin._ranks = plugin._inside = Broken()
        from verl.trainer.ray_trainer import fit
        from verl.workers import Worker
        print(len(fit(ONE_POOL, 1)[0]), Worker().update_actor(1)[0])
        """,
        **EXTERNAL,
    )
    assert printed == "10 2"


def test_another_verl_than_we_know_runs_as_ever(run: Run, tmp_path: Path, receiver: MarkReceiver) -> None:
    (tmp_path / "verl/utils/tracking.py").write_text("class Tracker: pass\n")
    (tmp_path / "verl/utils/profiler/profile.py").write_text("class DistProfiler: annotate = None\n")
    printed = run(
        """
        import verl.utils.profiler, verl.utils.tracking
        with verl.utils.profiler.marked_timer("gen", {}):
            print("ran")
        """,
        **EXTERNAL,
    )
    assert printed == "ran"
    assert receiver.word(time.time()).intervals == ()


def test_a_module_that_breaks_breaks_as_it_did(run: Run, tmp_path: Path) -> None:
    (tmp_path / "verl/utils/tracking.py").write_text("import nothing_of_that_name\n")
    printed = run(
        """
        import verl
        for _ in range(2):
            try:
                import verl.utils.tracking
            except ModuleNotFoundError as error:
                print(error.name)
        """,
        **EXTERNAL,
    )
    assert printed.split() == ["nothing_of_that_name"] * 2


def test_without_codetiming_nothing_happens(run: Run) -> None:
    program = """
        import sys
        sys.modules["codetiming"] = None
        import verl_gpumonitor.plugin
        print("imported")
        """
    assert run(program) == "imported"


def config_with(path: str, value: object) -> dict[str, Any]:
    """Return a configuration of one pool with one key more."""
    config: dict[str, Any] = {"actor_rollout_ref": {"hybrid_engine": True, "rollout": {"nnodes": 0}}}
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(config_with("trainer.v1.trainer_mode", "sync"), True, id="sync"),
        pytest.param(config_with("trainer.v1.trainer_mode", "colocate_async"), True, id="colocated"),
        pytest.param(config_with("trainer.v1.trainer_mode", "separate_async"), False, id="separate"),
        pytest.param(config_with("actor_rollout_ref.hybrid_engine", False), False, id="no hybrid engine"),
        pytest.param(config_with("actor_rollout_ref.rollout.nnodes", 2), False, id="rollout on nodes of its own"),
        pytest.param(config_with("reward_model.enable_resource_pool", True), True, id="a pool for no reward model"),
        pytest.param(config_with("distillation.enabled", True), False, id="a teacher"),
        pytest.param(
            {"actor_rollout_ref": {}, "reward_model": {"enable": True, "enable_resource_pool": True}},
            False,
            id="a pool for the reward model",
        ),
        pytest.param(
            {"actor_rollout_ref": {}, "reward": {"reward_model": {"enable": True, "enable_resource_pool": True}}},
            False,
            id="the same, as newer versions write it",
        ),
        pytest.param({}, False, id="nothing known"),
        pytest.param("text", False, id="no configuration at all"),
    ],
)
def test_whether_all_gpus_are_one_pool(config: object, expected: bool) -> None:
    assert one_pool(config) is expected


def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"gpumonitor": "verl_gpumonitor.plugin"}

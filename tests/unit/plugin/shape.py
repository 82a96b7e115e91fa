# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A package that calls as verl calls: where timers, tracking and annotations are, and how they are imported."""

from pathlib import Path
from textwrap import dedent

FILES = {
    "__init__.py": """
        import importlib, os
        for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
            importlib.import_module(name)
    """,
    "utils/__init__.py": "",
    "utils/tracking.py": """
        class Tracking:
            def __init__(self, project_name, experiment_name, default_backend="console", config=None):
                self.lines = []

            def log(self, data, step, backend=None):
                self.lines.append((step, data))
                return "logged"
    """,
    "utils/profiler/__init__.py": """
        from .performance import marked_timer, simple_timer
        from .profile import DistProfiler
    """,
    "utils/profiler/performance.py": """
        from contextlib import contextmanager
        from codetiming import Timer

        def _timer(name, timing_raw):
            with Timer(name=name, logger=None) as timer:
                yield
            timing_raw[name] = timing_raw.get(name, 0) + timer.last

        @contextmanager
        def simple_timer(name, timing_raw):
            yield from _timer(name, timing_raw)

        @contextmanager
        def marked_timer(name, timing_raw, color=None, domain=None, category=None):
            yield from _timer(name, timing_raw)
    """,
    "utils/profiler/profile.py": """
        import functools

        class DistProfiler:
            @classmethod
            def annotate(cls, message=None, color=None, domain=None, category=None, **outer):
                def decorator(func):
                    @functools.wraps(func)
                    def wrapper(instance, *args, **kwargs):
                        return func(instance, *args, **kwargs)
                    return wrapper
                return decorator
    """,
    "trainer/__init__.py": "",
    "trainer/ray_trainer.py": """
        import time
        from verl.utils.profiler import marked_timer, simple_timer

        STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")

        def fit(config, steps, first=1, validate=True, fail_in=None):
            from verl.utils.tracking import Tracking

            logger = Tracking("p", "e", default_backend=["console"], config=config)
            if validate:
                logger.log(data={"val": 1}, step=first - 1)
            for step in range(first, first + steps):
                timing = {}
                with marked_timer("step", timing):
                    for stage in STAGES:
                        with marked_timer(stage, timing, color="red"):
                            with simple_timer("tool_calls", timing):
                                time.sleep(0.002)
                            if stage == fail_in:
                                raise RuntimeError(stage)
                assert logger.log(data=timing, step=step) == "logged"
            return sorted(timing), [line[0] for line in logger.lines]
    """,
    "workers.py": """
        from codetiming import Timer
        from verl.utils.profiler import DistProfiler

        class Worker:
            @DistProfiler.annotate(color="red", role="actor_update")
            def update_actor(self, batch, *, scale=1):
                with Timer(name="update_critic", logger=None):  # older workers name their own timers so
                    return [self.train_batch(batch) * scale, Timer]

            @DistProfiler.annotate(color="red", role="train_batch")
            def train_batch(self, batch):
                return batch + 1

            @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
            def compute_log_prob(self, batch):
                return batch

            @DistProfiler.annotate(color="cyan")
            def compute_values(self, batch):
                raise ValueError(batch)

            @DistProfiler.annotate(role="rollout_generate")
            async def generate(self):
                return 5
    """,
}


def write(root: Path) -> None:
    """Write the package `verl` under a folder."""
    for name, text in FILES.items():
        path = root / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Scenarios of our own: public reports and normal cases that the recorded ones lack, with what must be found."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from verl_gpumonitor.diagnosis.health import REASONS

from .score import Expectation, Must, Scenario
from .simulate import ENTRYPOINT, GIB, Job, Load, Pod

Built = tuple[Job, list[Must], set[str]]
"""The job, what must be found, and reasons that may be found as well."""


def _alone(job: Job, *must: Must, neutral: set[str] | None = None) -> Built:
    return job, list(must), neutral or set()


# Healthy


def async_pools() -> Built:
    """A fully asynchronous trainer and its rollout pool wait for each other in turn (verl `separate_async`)."""
    job = Job("async-pools", seed=11, pods=1, gpus=4, group="trainers")
    rollouts = job.add_pod("rollouts", 4)
    job.start()
    begin = job.clock
    for step in range(9):
        job.pause(25 if step % 2 else 40, 12)
        job.stage("old_log_prob", 12, Load(memory=28, spike=5))
        job.stage("update_actor", 40, Load(power=0.85, memory=45, spike=5))
        job.stage("update_weights", 5, Load(busy=0.4, power=0.2, memory=30))
        job.step(step)
    end, job.clock = job.clock, begin
    while job.clock < end - 30:
        length = min(job.rng.uniform(50, 80), end - job.clock)
        job.stage("gen", length, Load(busy=0.92, power=0.5, memory=72, working=0.8), pods=[rollouts])
        job.pause(4, 72, pods=[rollouts])
    job.clock = end
    job.finish()
    return _alone(job)


def idle_teacher_pool() -> Built:
    """A teacher's pool works for a few seconds of each step, and waits for the rest by design."""
    job = Job("teacher-pool", seed=12)
    teacher = job.add_pod("teachers", 4)
    job.start()
    for step in range(8):
        begin = job.clock
        job.usual_step(step)
        for gpu in teacher.gpus:
            gpu.spans = [s for s in gpu.spans if s.end <= begin]
        job.task(teacher, "vLLMHttpServer.generate", begin + 60, begin + 70, pid=2100)
        end, job.clock = job.clock, begin
        job.stage("teacher", 60, Load(busy=0, power=0.13, memory=70), pods=[teacher])
        job.stage("teacher", 10, Load(busy=0.9, power=0.6, memory=70), pods=[teacher])
        job.stage("teacher", end - job.clock, Load(busy=0, power=0.13, memory=70), pods=[teacher])
    job.finish()
    return _alone(job)


def long_tail() -> Built:
    """For half of each rollout only the two GPUs with the longest answers work, others each time."""
    job = Job("long-tail", seed=13)
    job.start()
    short = Load(busy=0.92, power=0.5, working=0.45, memory=56)
    long = Load(busy=0.95, power=0.42, memory=56)
    for step in range(8):
        pair = job.rng.randrange(4) * 2
        job.usual_step(step, gen=short, gen_seconds=150, odd=None)
        gen = [span for gpu in job.workers[0].gpus for span in gpu.spans if span.load == short]
        for gpu in job.workers[0].gpus[pair : pair + 2]:
            gpu.spans = [
                type(s)(begin=s.begin, end=s.end, load=long) if s.load == short and s.end == gen[-1].end else s
                for s in gpu.spans
            ]
    job.finish()
    return _alone(job)


def power_capped() -> Built:
    """All GPUs are at their power limit in every update and say so (`sw_power_cap`), as they do."""
    job = Job("power-capped", seed=14, gpus=4)
    job.start()
    for step in range(6):
        job.usual_step(step, actor=Load(busy=0.99, power=0.99, memory=45, throttled=("sw_power_cap",), temperature=70))
    job.finish()
    return _alone(job)


def late_pod() -> Built:
    """The second worker's pod waits for a node and comes four minutes later; the job starts with it."""
    job = Job("late-pod", seed=15, pods=2, gpus=4)
    late = job.workers[1]
    late.begin = 240.0
    job.lines.append({"type": "pod", "t": 1.0, "pod": late.name, "phase": "Pending", "container": None})
    job.pause(250, 0.01)
    job.start()
    for step in range(5):
        job.usual_step(step)
    job.finish()
    return _alone(job)


def restarted() -> Built:
    """The worker's container is restarted once (a node that was drained), and the job goes on from a checkpoint."""
    job = Job("restarted", seed=16, gpus=4)
    job.start()
    for step in range(3):
        job.usual_step(step)
    worker = job.workers[0]
    job.lines.append(
        {"type": "pod", "t": job.clock + 1, "pod": worker.name, "phase": "Running", "container": "ray-worker",
         "reason": "Error", "exit_code": 1, "restart_count": 1}
    )  # fmt: skip
    job.pause(3, 15)
    job.pause(40, 0.01)
    job.start()
    for step in range(3, 7):
        job.usual_step(step)
    job.finish()
    return _alone(job)


def long_validation() -> Built:
    """Every third step validates for ten minutes: generation as usual, only longer."""
    job = Job("validation", seed=17, gpus=4)
    job.start()
    for step in range(7):
        job.usual_step(step)
        if step % 3 == 2:
            job.stage("gen", 600, Load(busy=0.85, power=0.45, memory=56))
            job.pause(5, 10)
    job.finish()
    return _alone(job)


def slow_checkpoints() -> Built:
    """Every third step saves for twelve minutes to slow storage, with idle GPUs and growing page cache."""
    job = Job("slow-save", seed=18, gpus=4)
    job.workers[0].host = lambda t: min(780.0, 150 + t * 0.5)
    job.workers[0].rss = lambda _: 140.0
    job.start()
    for step in range(7):
        job.usual_step(step, save_seconds=720 if step % 3 == 2 else 0)
    job.finish()
    return _alone(job)


def sft_full() -> Built:
    """SFT by torchrun: 95% of memory in an allocator that caches, short pauses for evaluation and saving."""
    job = Job("sft-full", seed=19, kind="PyTorchJob", gpus=8, verl=None,
              entrypoint="torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer")  # fmt: skip
    job.pause(90, 0.01)
    job.stage("train", 60, Load(busy=0.1, power=0.2, memory=2, memory_end=40), alone=True)
    for _ in range(6):
        job.stage("train", 280, Load(busy=0.96, power=0.88, memory=75.5, spike=0.8), alone=True)
        job.pause(70, 74)
    job.finish()
    return _alone(job)


def cached_host() -> Built:
    """Reading a large data set fills the pod's working set with file cache up to 96%; its processes hold a third."""
    job = Job("page-cache", seed=20, gpus=4)
    job.workers[0].host = lambda t: min(768.0, 200 + t * 1.1)
    job.workers[0].rss = lambda _: 240.0
    job.start()
    for step in range(7):
        job.usual_step(step)
    job.finish()
    return _alone(job)


def object_store() -> Built:
    """Ray's object store fills its part of a large /dev/shm and then spills: 80% and flat."""
    job = Job("plasma", seed=21, gpus=4)
    job.workers[0].shm = (200.0, lambda t: min(162.0, 20 + t * 0.4))
    job.start()
    for step in range(6):
        job.usual_step(step)
    job.finish()
    return _alone(job)


def fills_up() -> Built:
    """Memory of the update rises in the first five steps, as caches fill, and stays."""
    job = Job("fills-up", seed=22)
    job.start()
    for step in range(13):
        top = 58 + 9 * min(step, 5) / 5
        job.usual_step(step, actor=Load(power=0.86, memory=50, memory_end=top, spike=2))
    job.finish()
    return _alone(job)


def noisy_peaks() -> Built:
    """Peaks of the update vary by 4% from step to step, between 82 and 90%, as batches do."""
    job = Job("noisy-peaks", seed=23)
    job.start()
    for step in range(14):
        job.usual_step(step, actor=Load(power=0.86, memory=52, memory_end=job.rng.uniform(65.5, 70.5), spike=1.5))
    job.finish()
    return _alone(job)


def tool_calls() -> Built:
    """A rollout with tools: GPUs work for two fifths of the time, in turns, and wait for the tools between."""
    job = Job("tool-calls", seed=24, gpus=4)
    job.start()
    for step in range(6):
        job.usual_step(step, gen=Load(busy=0.85, power=0.42, working=0.5, scattered=True, memory=56), gen_seconds=200)
    job.finish()
    return _alone(job)


def reward_gpus() -> Built:
    """Two of eight GPUs of each pod serve a reward model: other work, other memory, and seldom."""
    job = Job("reward-gpus", seed=25, gpus=8)
    worker = job.workers[0]
    own, reward = worker.gpus[:6], worker.gpus[6:]
    for gpu in own:
        gpu.processes = _one_process(1000 + gpu.index, "ray::WorkerDict", 12.0)
    for gpu in reward:
        gpu.processes = _one_process(3000 + gpu.index, "VLLM::EngineCore", 60.0)
    worker.gpus = own
    job.start()
    for step in range(7):
        job.usual_step(step)
    worker.gpus = own + reward
    end, job.clock = job.clock, 0.0
    served = Pod(worker.name, worker.group, worker.role, reward, 2)
    job.stage("reward", 100, Load(busy=0, power=0.13, memory=0.1), pods=[served])
    while job.clock < end:
        job.stage("reward", 30, Load(busy=0.4, power=0.3, memory=61), pods=[served])
        job.stage("reward", 60, Load(busy=0.0, power=0.13, memory=61), pods=[served])
    job.clock = end
    job.finish()
    return _alone(job)


def _one_process(pid: int, title: str, gib: float) -> Callable[[float], list[dict[str, Any]]]:
    return lambda _: [{"pid": pid, "title": title, "memory_used_bytes": int(gib * GIB)}]


def _engine_and_worker(index: int, *, awake: Callable[[float], float]) -> Callable[[float], list[dict[str, Any]]]:
    def listed(t: float) -> list[dict[str, Any]]:
        return [
            {"pid": 1000 + index, "title": "ray::WorkerDict", "memory_used_bytes": int(12 * GIB)},
            {"pid": 2500 + index, "title": "VLLM::Worker_TP0", "memory_used_bytes": int(awake(t) * GIB)},
        ]

    return listed


def old_titles() -> Built:
    """An older verl, known by process titles alone: the workers generate themselves, and nobody tells a task."""
    job = Job("old-titles", seed=26, gpus=4, titles=True, verl="0.5.0")
    job.start()
    for step in range(6):
        job.usual_step(step)
    job.finish()
    return _alone(job)


# Faults


def reward_copy() -> Built:
    """A custom reward function loads its own model on GPU 0 of the pod: 20 GiB that the others do not have."""
    job = Job("reward-copy", seed=31)
    gpu = job.workers[0].gpus[0]
    job.start()
    gpu.held_gib = 0.0
    for step in range(7):
        job.usual_step(step)
    begin = next(span.end for span in gpu.spans if span.load.memory_end == 12.0)
    gpu.spans = [
        s if s.end <= begin else type(s)(begin=s.begin, end=s.end, load=_with_more(s.load, 20.0)) for s in gpu.spans
    ]
    job.finish()
    return _alone(job, Must(reason="Imbalance", metric="memory", gpus=[gpu.uuid]), neutral={"OOMRisk"})


def _with_more(load: Load, gib: float) -> Load:
    values = {name: getattr(load, name) for name in load.__dataclass_fields__}
    end = values.pop("memory_end")
    values["memory"] += gib
    return Load(**values, memory_end=None if end is None else end + gib)


def starved_sft() -> Built:
    """The data loader of an SFT job keeps the GPUs waiting: three seconds of work in twelve."""
    job = Job("starved-sft", seed=32, kind="PyTorchJob", gpus=4, verl=None, entrypoint=None)
    job.pause(60, 0.01)
    job.stage("train", 300, Load(busy=0.95, power=0.85, memory=60), alone=True)
    job.stage("train", 1500, Load(busy=0.95, power=0.8, working=0.22, scattered=True, memory=60), alone=True)
    job.finish()
    return _alone(job, Must(reason="LowUtilization", by=1400))


def slow_rewards() -> Built:
    """The reward function runs on one CPU for two minutes of each step, between stages."""
    job = Job("slow-rewards", seed=33, gpus=4)
    job.start()
    for step in range(6):
        job.usual_step(step, pause=150)
    job.finish()
    return _alone(job, Must(reason="LowUtilization"))


def weights_stuck() -> Built:
    """The broadcast of the weights hangs: all GPUs spin at 100% and low power in update_weights for ever."""
    job = Job("weights-stuck", seed=34, gpus=8)
    job.start()
    for step in range(4):
        job.usual_step(step)
    job.stage("gen", 70, Load(busy=0.9, power=0.5, memory=56))
    job.pause(6, 10)
    job.stage("old_log_prob", 14, Load(memory=28))
    job.stage("update_actor", 42, Load(power=0.86, memory=48))
    onset = job.clock
    job.stage("update_weights", 1500, Load(busy=1.0, power=0.24, memory=42), dies=True)
    return _alone(job, Must(reason="Hang", stage="update_weights", by=onset + 900))


def deadlock() -> Built:
    """All ranks stand still in old_log_prob (a deadlock on the host): 0% everywhere, nothing ends."""
    job = Job("deadlock", seed=35, gpus=4, limit_watts=400)
    job.start()
    for step in range(4):
        job.usual_step(step)
    job.stage("gen", 70, Load(busy=0.9, power=0.5, memory=56))
    job.pause(6, 10)
    onset = job.clock
    job.stage("old_log_prob", 1200, Load(busy=0.0, power=0.18, memory=28), dies=True)
    return _alone(job, Must(reason="Hang", stage="old_log_prob", by=onset + 600))


def sft_spins() -> Built:
    """An SFT job without stages: one node's rank is gone from the collective, the rest spin."""
    job = Job("sft-spins", seed=36, kind="PyTorchJob", gpus=8, verl=None, entrypoint=None)
    job.pause(60, 0.01)
    job.stage("train", 900, Load(busy=0.97, power=0.85, memory=60), alone=True)
    spin, still = Load(busy=1.0, power=0.25, memory=60), Load(busy=0.0, power=0.15, memory=60)
    job.stage("train", 1500, spin, odd={5: still}, alone=True)
    return _alone(job, Must(reason="Hang", gpus=[job.workers[0].gpus[5].uuid], by=1900))


def driver_grows() -> Built:
    """The driver on the head keeps each step's batch: host memory rises until the kernel kills it."""
    job = Job("driver-grows", seed=37, gpus=4)
    job.head.host = lambda t: 12 + 0.055 * t
    job.start()
    while job.clock < 940:
        job.usual_step(int(job.clock))
    job.lines.append(
        {"type": "pod", "t": job.clock, "pod": job.head.name, "phase": "Failed", "container": "ray-head",
         "reason": "OOMKilled", "exit_code": 137, "restart_count": 0}
    )  # fmt: skip
    job.finish("Failed", "The head was killed.")
    return _alone(job, Must(reason="HostMemoryRisk", by=job.clock - 60), neutral={"Hang"})


def killed_at_once() -> Built:
    """A checkpoint gathers the optimizer on one rank: host memory jumps and the pod is OOMKilled within seconds."""
    job = Job("killed-at-once", seed=38, gpus=4)
    job.start()
    for step in range(3):
        job.usual_step(step)
    t = job.clock
    job.lines.append(
        {"type": "pod", "t": t + 3, "pod": job.workers[0].name, "phase": "Failed", "container": "ray-worker",
         "reason": "OOMKilled", "exit_code": 137, "restart_count": 0}
    )  # fmt: skip
    job.pause(20, 0.01)
    job.finish("Failed", "A worker died.")
    return _alone(job, Must(reason="HostMemoryRisk", by=t + 10), neutral={"Hang"})


def row_not_remapped() -> Built:
    """Xid 48 and 64 on one GPU: a row that cannot be remapped; 45 follows as the driver clears."""
    job = Job("row-remap", seed=39, gpus=8)
    job.start()
    for step in range(3):
        job.usual_step(step)
    gpu, pod = job.workers[0].gpus[2], job.workers[0]
    for after, code in ((1, 48), (1.5, 64), (4, 45)):
        job.lines.append({"type": "xid", "t": job.clock + after, "pod": pod.name, "uuid": gpu.uuid, "code": code})
    at = job.clock
    job.pause(10, 12)
    job.finish("Failed", "CUDA error: uncorrectable ECC error encountered")
    return _alone(job, Must(reason="GPUFault", gpus=[gpu.uuid], by=at + 10))


def row_remapped() -> Built:
    """Xid 63: a row was remapped, as it should be; the job goes on."""
    job = Job("row-remapped", seed=40, gpus=4)
    job.start()
    for step in range(5):
        if step == 2:
            job.lines.append(
                {
                    "type": "xid",
                    "t": job.clock,
                    "pod": job.workers[0].name,
                    "uuid": job.workers[0].gpus[1].uuid,
                    "code": 63,
                }
            )
        job.usual_step(step)
    job.finish()
    return _alone(job)


def power_brake() -> Built:
    """A rack's power brake holds all GPUs of one of two pods down in every stage."""
    job = Job("power-brake", seed=41, pods=2, gpus=4)
    job.start()
    braked = Load(power=0.45, memory=46, spike=4, throttled=("hw_slowdown", "hw_power_brake_slowdown"))
    for step in range(6):
        job.usual_step(step, odd=dict.fromkeys(range(4, 8), braked))
    job.finish()
    held = [gpu.uuid for gpu in job.workers[1].gpus]
    return _alone(job, Must(reason="Throttled", gpus=held), neutral={"Imbalance"})


def resume_spikes() -> Built:
    """At each resume of the rollout memory spikes, by 0.5 GiB more each step, to the end (vllm-project/vllm#15254)."""
    job = Job("resume-spikes", seed=42)
    job.start()
    for step in range(12):
        job.usual_step(step)
        window = Load(busy=0.4, power=0.2, memory=50, memory_end=73.0 + 0.5 * step, spike=0.2)
        job.stage("update_weights", 6, window)
        job.pause(2, 42)
    job.finish()
    return _alone(job, Must(reason="OOMRisk", stage="update_weights"), neutral={"MemoryGrowth"})


def slow_rank() -> Built:
    """One node's disk or CPU makes its first rank take 25 s for what the others do in 14, in each old_log_prob."""
    job = Job("slow-rank", seed=43, gpus=8)
    job.start()
    for step in range(6):
        job.usual_step(step, slow={3: 13.0})
    job.finish()
    return _alone(
        job, Must(reason="Imbalance", metric="time", stage="old_log_prob", gpus=[job.workers[0].gpus[3].uuid])
    )


def stranger() -> Built:
    """Somebody's notebook runs a model on GPU 4 of the node (seen through a shared process namespace)."""
    job = Job("stranger", seed=44, gpus=8)
    for gpu in job.workers[0].gpus:
        own = _engine_and_worker(gpu.index, awake=lambda _: 2.0)
        gpu.processes = own
        if gpu.index == 4:
            note = {
                "pid": 777,
                "title": "/opt/conda/bin/python /home/ada/notebook/serve.py",
                "memory_used_bytes": 6 * GIB,
            }
            gpu.processes = lambda t, own=own, note=note: [*own(t), note]  # type: ignore[misc]
    job.start()
    for step in range(5):
        job.usual_step(step)
    job.finish()
    return _alone(job, Must(reason="ForeignProcess", gpus=[job.workers[0].gpus[4].uuid]), neutral={"Imbalance"})


def left_by_restart() -> Built:
    """A container is restarted and its engine lives on: 30 GiB on each of its GPUs before it begins anew."""
    job = Job("left-behind", seed=45, gpus=4)
    job.start()
    for step in range(3):
        job.usual_step(step)
    worker = job.workers[0]
    job.lines.append(
        {"type": "pod", "t": job.clock + 1, "pod": worker.name, "phase": "Running", "container": "ray-worker",
         "reason": "Error", "exit_code": 1, "restart_count": 1}
    )  # fmt: skip
    job.pause(1.5, 15)
    job.pause(60, 30)
    again = job.clock
    job.stage("init", 90, Load(busy=0.02, power=0.13, memory=30, memory_end=42))
    job.sync()
    for step in range(3, 6):
        job.usual_step(step, extra_gib=10)
    job.finish()
    held = [gpu.uuid for gpu in worker.gpus]
    return _alone(job, Must(reason="LeftoverMemory", gpus=held, by=again + 30), neutral={"OOMRisk"})


def one_gpu_silent() -> Built:
    """One GPU's lines stop while its pod goes on: a call about it hangs."""
    job = Job("one-silent", seed=46, gpus=8)
    job.start()
    for step in range(6):
        job.usual_step(step)
    gpu = job.workers[0].gpus[6]
    gpu.silent = (400.0, 1e9)
    job.finish()
    return _alone(job, Must(reason="TelemetryPartial", by=600))


def never_heard() -> Built:
    """A pod runs, was not injected, and nothing ever comes from it."""
    job = Job("never-heard", seed=47, pods=2, gpus=4)
    job.workers[1].silent = (0.0, 1e9)
    job.start()
    for step in range(6):
        job.usual_step(step)
    job.finish()
    return _alone(job, Must(reason="TelemetryUnavailable", by=400), neutral={"TelemetryPartial"})


def fewer_gpus() -> Built:
    """A pod asked for eight GPUs and only seven are seen."""
    job = Job("fewer-gpus", seed=48, gpus=7)
    job.workers[0].requested = 8
    job.start()
    for step in range(4):
        job.usual_step(step)
    job.finish()
    return _alone(job, Must(reason="TelemetryPartial", by=300))


def sft_rises() -> Built:
    """SFT on samples sorted by length: memory rises window by window to the end."""
    job = Job("sft-rises", seed=49, kind="PyTorchJob", gpus=4, verl=None, entrypoint=None)
    job.pause(40, 0.01)
    job.stage("train", 200, Load(busy=0.95, power=0.85, memory=55), alone=True)
    job.stage("train", 2400, Load(busy=0.95, power=0.85, memory=55, memory_end=79.9, spike=0.3), alone=True)
    job.finish("Failed", "CUDA out of memory")
    return _alone(job, Must(reason="OOMRisk", by=2500), neutral={"MemoryGrowth"})


def longer_answers() -> Built:
    """Answers grow longer with training: the update needs 1 GiB more each step, far from the end yet."""
    job = Job("longer-answers", seed=50)
    job.start()
    for step in range(14):
        job.usual_step(step, actor=Load(power=0.86, memory=32, memory_end=38 + 1.0 * step, spike=1))
    job.finish()
    return _alone(job, Must(reason="MemoryGrowth", stage="update_actor"), neutral={"OOMRisk"})


def titles_rise() -> Built:
    """The same older verl with answers that grow: the peaks of update_actor rise to the end."""
    job = Job("titles-rise", seed=52, gpus=4, titles=True, verl="0.5.0")
    job.start()
    for step in range(12):
        top = min(79.0, 62 + 1.5 * step)
        job.usual_step(step, actor=Load(power=0.86, memory=48, memory_end=top, spike=0.5))
    job.finish("Failed", "CUDA out of memory")
    return _alone(job, Must(reason="OOMRisk", stage="update_actor", by=job.clock - 200), neutral={"MemoryGrowth"})


def slow_node() -> Built:
    """All ranks of one of two nodes take much longer for old_log_prob: a node whose CPUs are taken."""
    job = Job("slow-node", seed=53, pods=2, gpus=2)
    job.start()
    for step in range(6):
        job.usual_step(step, slow=dict.fromkeys((2, 3), 14.0))
    job.finish()
    named = [gpu.uuid for gpu in job.workers[1].gpus]
    return _alone(job, Must(reason="Imbalance", metric="time", stage="old_log_prob", gpus=named))


def sglang_sleeps_badly() -> Built:
    """SGLang releases its cache and keeps the weights and graphs: 24 of 44 GiB while training runs."""
    job = Job("sglang-keeps", seed=51, gpus=4, entrypoint=ENTRYPOINT.replace("vllm", "sglang"))
    spans: list[tuple[float, float]] = []

    def listed(t: float, index: int) -> list[dict[str, Any]]:
        held = 44.0 if any(begin <= t < end for begin, end in spans) else 24.0
        return [
            {"pid": 1000 + index, "title": "ray::WorkerDict", "memory_used_bytes": 12 * GIB},
            {"pid": 2500 + index, "title": f"sglang::scheduler_TP{index}", "memory_used_bytes": int(held * GIB)},
        ]

    for gpu in job.workers[0].gpus:
        gpu.processes = lambda t, index=gpu.index: listed(t, index)  # type: ignore[misc]
    job.start()
    for step in range(7):
        begin = job.clock
        job.usual_step(step, extra_gib=12)
        spans.append((begin, begin + 68))
    job.finish()
    return _alone(job, Must(reason="RolloutMemoryNotReleased"), neutral={"OOMRisk"})


CASES: Final[tuple[Callable[[], Built], ...]] = (
    async_pools, idle_teacher_pool, long_tail, power_capped, late_pod, restarted, long_validation, slow_checkpoints,
    sft_full, cached_host, object_store, fills_up, noisy_peaks, tool_calls, reward_gpus, row_remapped, old_titles,
    reward_copy, starved_sft, slow_rewards, weights_stuck, deadlock, sft_spins, driver_grows, killed_at_once,
    row_not_remapped, power_brake, resume_spikes, slow_rank, stranger, left_by_restart, one_gpu_silent, never_heard,
    fewer_gpus, sft_rises, longer_answers, titles_rise, slow_node, sglang_sleeps_badly,
)  # fmt: skip


def build(case: Callable[[], Built]) -> Scenario:
    """Simulate one case. What is neither asked for nor allowed must not be found."""
    job, must, neutral = case()
    allowed = {m.reason for m in must} | neutral
    must_not = sorted(set(REASONS) - allowed)
    return Scenario(name=case.__name__, lines=job.record(), expectation=Expectation(must=must, must_not=must_not))


def own() -> Iterator[Scenario]:
    """Simulate all cases."""
    return (build(case) for case in CASES)

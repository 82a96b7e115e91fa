# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A small simulator of verl jobs: stages with load, power and memory on GPUs in, lines of a trace out. Deterministic.

A job is laid out as spans on GPUs; sampling then reads them off, with noise as real GPUs have it. Nothing here knows a
rule or a threshold.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
TASKS = {
    "init": "WorkerDict.actor_rollout_ref_init_model",
    "old_log_prob": "WorkerDict.actor_rollout_ref_compute_log_prob",
    "ref": "WorkerDict.actor_rollout_ref_compute_ref_log_prob",
    "values": "WorkerDict.critic_infer_batch",
    "update_critic": "WorkerDict.critic_train_mini_batch",
    "update_actor": "WorkerDict.actor_rollout_ref_update_actor",
    "update_weights": "WorkerDict.actor_rollout_ref_update_weights",
    "save_checkpoint": "WorkerDict.actor_rollout_ref_save_checkpoint",
}
GENERATE = "WorkerDict.actor_rollout_generate_sequences"
ENTRYPOINT = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256"
    " data.max_prompt_length=1024 data.max_response_length=4096 actor_rollout_ref.model.path=/models/Qwen3-8B"
    " actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"
    " actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=vllm"
    " actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    " trainer.n_gpus_per_node=8 trainer.nnodes=1"
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a GPU does in a span."""

    busy: float = 0.95
    """Utilisation while it works."""
    working: float = 1.0
    """Share of the span in which it works: the beginning of it; the rest it stands still."""
    scattered: bool = False
    """Whether that share is spread over the whole span."""
    power: float = 0.8
    """Of the limit, while it works."""
    memory: float = 20.0
    """GiB in use."""
    memory_end: float | None = None
    """GiB at the end, if it rises."""
    spike: float = 0.0
    """GiB that the peak is above, once or twice a span, for a second."""
    throttled: tuple[str, ...] = ()
    temperature: float = 58.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """A load from here to there."""

    begin: float
    end: float
    load: Load


@dataclass
class Gpu:
    """One GPU and what it does."""

    uuid: str
    index: int
    spans: list[Span] = field(default_factory=list)
    lost_at: float = float("inf")
    silent: tuple[float, float] = (0.0, 0.0)
    held_gib: float = 0.0
    """Held by somebody else, all the time."""
    no_utilization: bool = False
    processes: Callable[[float], list[dict[str, Any]] | None] = lambda _: None


@dataclass
class Pod:
    """One pod and its GPUs."""

    name: str
    group: str
    role: str
    gpus: list[Gpu]
    requested: int
    host_limit_gib: float = 800.0
    host: Callable[[float], float] = lambda _: 120.0
    """GiB of host memory in use."""
    rss: Callable[[float], float | None] = lambda _: None
    shm: tuple[float, Callable[[float], float]] = (64.0, lambda _: 2.0)
    """Size of /dev/shm and its use, GiB."""
    begin: float = 0.0
    silent: tuple[float, float] = (0.0, 0.0)


class Job:
    """A workload that is being laid out; `clock` is where the next stage begins."""

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        pods: int = 1,
        gpus: int = 8,
        group: str = "gpu-workers",
        total_gib: float = 80.0,
        limit_watts: float = 700.0,
        interval: float = 2.0,
        stretch: float = 1.0,
        titles: bool = False,
        entrypoint: str | None = ENTRYPOINT,
        kind: str = "RayJob",
        verl: str | None = "0.9.0",
    ) -> None:
        self.name, self.interval, self.entrypoint, self.kind, self.verl = name, interval, entrypoint, kind, verl
        self.total_gib, self.limit_watts = total_gib, limit_watts
        self.titles = titles
        """Whether process titles tell the stages, and no tasks: an older verl, whose workers generate themselves."""
        self.stretch = stretch
        """All stages take so much longer."""
        self.scale = total_gib / 80.0
        """Memory is laid out for 80 GiB, and grows and shrinks with the GPU."""
        self.rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.lines: list[dict[str, Any]] = []
        self.clock = 0.0
        self.head = Pod(f"{name}-head", "headgroup", "head", [], 0, host_limit_gib=64.0, host=lambda _: 12.0)
        self.pods: list[Pod] = [self.head] if kind == "RayJob" else []
        self.workers = [self.add_pod(group, gpus) for _ in range(pods)]
        self.lines.append({"type": "job", "t": 0.0, "phase": "Pending", "message": None})
        self.lines.append({"type": "job", "t": 2.0, "phase": "Running", "message": None})
        self.ended = False

    def add_pod(self, group: str, gpus: int, *, begin: float = 0.0, requested: int | None = None) -> Pod:
        """Add a pod with GPUs."""
        number = len(self.pods)
        name = f"{self.name}-{group}-{number}"
        cards = [Gpu(f"GPU-{number:02d}{index:02d}-{self.name}", index) for index in range(gpus)]
        role = "worker" if self.kind == "RayJob" or number else "master"
        pod = Pod(name, group, role, cards, gpus if requested is None else requested, begin=begin)
        self.pods.append(pod)
        return pod

    # Laying out

    def task(
        self, pod: Pod, name: str, begin: float, end: float | None, *, pid: int = 1, rank: int | None = None
    ) -> None:
        """Write a task's begin and, unless it never ends, its end; of titles, only workers have any."""
        if self.titles:
            if rank is not None:
                self._title(pod, f"ray::{name}", begin, pid)
                if end is not None:
                    self._title(pod, "ray::WorkerDict", end, pid)
            return
        common = {"type": "task", "pod": pod.name, "pid": pid, "local_rank": rank, "name": name}
        self.lines.append({**common, "t": begin, "state": "begin"})
        if end is not None:
            self.lines.append({**common, "t": end, "state": "end"})

    def _title(self, pod: Pod, title: str, t: float, pid: int) -> None:
        self.lines.append({"type": "title", "t": t, "pod": pod.name, "pid": pid, "title": title, "parent_pid": 50})

    def stage(
        self,
        stage: str,
        seconds: float,
        load: Load,
        *,
        odd: dict[int, Load] | None = None,
        slow: dict[int, float] | None = None,
        pods: Sequence[Pod] | None = None,
        dies: bool = False,
        alone: bool = False,
    ) -> None:
        """Run a stage on all GPUs of some pods, each with its own noise, and go on behind it.

        `odd`: GPU's place over all pods -> its own load; `slow`: rank -> how much longer its task takes; `dies`: the
        tasks never end; `alone`: no task is written, so that nobody says what runs.
        """
        begin, end = self.clock, self.clock + seconds * self.stretch
        place = 0
        for pod in self.workers if pods is None else pods:
            for gpu in pod.gpus:
                gpu.spans.append(Span(begin=begin, end=end, load=(odd or {}).get(place, load)))
                name = GENERATE if stage == "gen" and self.titles else TASKS.get(stage)
                if name is not None and not alone:
                    jitter = self.rng.uniform(0, 0.2)
                    own = end - self.rng.uniform(0, 0.2) + (slow or {}).get(place, 0.0)
                    self.task(pod, name, begin + jitter, None if dies else own, pid=1000 + gpu.index, rank=gpu.index)
                place += 1
            if stage == "gen" and not alone:
                self.task(pod, "vLLMHttpServer.generate", begin + 0.3, None if dies else end - 0.3, pid=2000)
        if stage == "gen" and not alone:
            for helper in range(4):
                helper_end = None if dies else end - 0.1
                self.task(self.head, "AgentLoopWorkerTQ.generate_sequences", begin, helper_end, pid=300 + helper)
        self.clock = end + max((slow or {}).values(), default=0.0)

    def pause(self, seconds: float, memory: float = 10.0, *, pods: Sequence[Pod] | None = None) -> None:
        """Let nothing run for a while."""
        self.stage("-", seconds, Load(busy=0.0, power=0.13, memory=memory), pods=pods)

    def step(self, number: int, at: float | None = None) -> None:
        """Say that a step is done."""
        self.lines.append({"type": "step", "t": self.clock if at is None else at, "step": number})

    def start(self, *, seconds: float = 110.0, memory: float = 12.0) -> None:
        """Load the models."""
        self.pause(20.0, 0.01)
        self.stage("init", seconds, Load(busy=0.02, power=0.13, memory=0.5, memory_end=memory))
        self.pause(8.0, memory)
        self.sync()

    def sync(self, *, spike: float = 0.0, memory: float = 42.0) -> None:
        """Give the rollout the new weights."""
        self.stage("update_weights", 7.0, Load(busy=0.35, power=0.17, memory=memory, spike=spike))
        self.pause(1.2, memory)

    def usual_step(
        self,
        number: int,
        *,
        gen: Load | None = None,
        gen_seconds: float = 70.0,
        log_prob: Load | None = None,
        actor: Load | None = None,
        odd: dict[int, Load] | None = None,
        slow: dict[int, float] | None = None,
        pause: float = 6.0,
        spike: float = 0.0,
        extra_gib: float = 0.0,
        save_seconds: float = 0.0,
    ) -> None:
        """Run one colocated GRPO step; `extra_gib` lies on top of every stage."""
        rng = self.rng
        more = extra_gib + rng.uniform(-0.2, 0.2)
        rollout = gen or Load(busy=0.9, power=0.5, memory=56 + more)
        self.stage("gen", gen_seconds * rng.uniform(0.95, 1.05), rollout, odd=odd)
        self.task_of_sleep()
        self.pause(pause, 10 + extra_gib)
        forward = log_prob or Load(memory=28 + more, spike=6)
        self.stage("old_log_prob", 14 * rng.uniform(0.95, 1.05), forward, odd=odd, slow=slow)
        self.pause(0.8, 20 + extra_gib)
        self.stage("ref", 12 * rng.uniform(0.95, 1.05), Load(memory=30 + more, spike=4), odd=odd)
        self.pause(0.8, 20 + extra_gib)
        update = actor or Load(power=0.86, memory=44 + more, memory_end=50 + more, spike=6)
        self.stage("update_actor", 42 * rng.uniform(0.95, 1.05), update, odd=odd)
        if save_seconds:
            self.stage("save_checkpoint", save_seconds, Load(busy=0.0, power=0.13, memory=30 + extra_gib))
        self.pause(1.5, 30 + extra_gib)
        self.sync(spike=spike, memory=42 + extra_gib)
        self.step(number)

    def task_of_sleep(self) -> None:
        """Let the engines sleep."""
        for pod in self.workers:
            self.task(pod, "vLLMHttpServer.sleep", self.clock + 0.2, self.clock + 1.0, pid=2000)

    def finish(self, phase: str = "Succeeded", message: str | None = None) -> None:
        """End the job, and record a little longer."""
        self.lines.append({"type": "job", "t": self.clock + 2.0, "phase": phase, "message": message})
        self.pause(20.0, 0.01)
        self.ended = True

    # Recording

    def record(self) -> list[bytes]:
        """Return the record's lines, the header first."""
        for pod in self.pods:
            if pod.begin < self.clock:
                self.lines.append(self._pod_line(pod, pod.begin))
            for gpu in pod.gpus:
                self.lines += self._samples(pod, gpu)
            self.lines += self._host(pod)
        ordered = sorted(enumerate(self.lines), key=lambda pair: (pair[1]["t"], pair[0]))
        lines = [{**line, "t": round(line["t"], 2)} for _, line in ordered]
        return [json.dumps(item).encode() for item in (self._header(), *lines)]

    def _header(self) -> dict[str, Any]:
        api = "ray.io/v1" if self.kind == "RayJob" else "kubeflow.org/v1"
        return {
            "type": "header",
            "format": "gpumonitor-trace/1",
            "workload": {"apiVersion": api, "kind": self.kind, "namespace": "rl", "name": self.name},
            "entrypoint": self.entrypoint,
            "frameworks": {"verl": self.verl, "ray": None, "torch": None},
            "pods": [self._pod(pod) for pod in self.pods],
        }

    def _pod(self, pod: Pod) -> dict[str, Any]:
        return {
            "name": pod.name,
            "node": f"node-{pod.name[-2:]}",
            "node_role": pod.role,
            "group": pod.group,
            "gpus_requested": pod.requested,
            "memory_limit_bytes": int(pod.host_limit_gib * GIB),
            "gpus": [
                {
                    "uuid": gpu.uuid,
                    "index": gpu.index,
                    "model": "NVIDIA H100 80GB HBM3",
                    "memory_total_bytes": int(self.total_gib * GIB),
                    "power_limit_watts": self.limit_watts,
                }
                for gpu in pod.gpus
            ],
        }

    def _pod_line(self, pod: Pod, t: float) -> dict[str, Any]:
        container = "ray-head" if pod is self.head else "ray-worker"
        return {"type": "pod", "t": t, "pod": pod.name, "phase": "Running", "container": container, "restart_count": 0}

    def _times(self, begin: float, interval: float) -> Iterable[float]:
        t = begin + self.rng.uniform(0, interval)
        while t < self.clock:
            yield t
            t += interval

    def _samples(self, pod: Pod, gpu: Gpu) -> list[dict[str, Any]]:
        samples = []
        place = 0
        carried = 0.0
        for t in self._times(pod.begin, self.interval):
            while place < len(gpu.spans) and gpu.spans[place].end <= t:
                carried = max(carried, gpu.spans[place].load.memory_end or gpu.spans[place].load.memory)
                place += 1
            if t >= gpu.lost_at or gpu.silent[0] <= t < gpu.silent[1] or pod.silent[0] <= t < pod.silent[1]:
                continue
            span = gpu.spans[place] if place < len(gpu.spans) and gpu.spans[place].begin <= t else None
            samples.append(self._sample(pod, gpu, t, span, carried))
            carried = 0.0
        return samples

    def _sample(self, pod: Pod, gpu: Gpu, t: float, span: Span | None, carried: float) -> dict[str, Any]:
        rng = self.rng
        load = Load(busy=0.0, power=0.13, memory=0.01) if span is None else span.load
        into = 0.0 if span is None else (t - span.begin) / (span.end - span.begin)
        works = load.busy > 0 and (rng.random() < load.working if load.scattered else into <= load.working)
        used = load.memory + into * ((load.memory_end or load.memory) - load.memory)
        used = max(0.01, self.scale * used * rng.uniform(0.998, 1.002)) + gpu.held_gib
        spiked = self.scale * load.spike * rng.uniform(0.6, 1.0) if load.spike and rng.random() < 0.5 else 0.0
        before = self.scale * carried + gpu.held_gib if carried else 0.0
        peak = min(self.total_gib * 0.9999, max(used + spiked, before))
        utilization = min(1.0, max(0.0, rng.gauss(load.busy, 0.02))) if works else 0.0
        power = (load.power if works else 0.13) * self.limit_watts * rng.uniform(0.97, 1.03)
        return {
            "type": "gpu",
            "t": t,
            "pod": pod.name,
            "uuid": gpu.uuid,
            "utilization": None if gpu.no_utilization else round(utilization, 2),
            "memory_used_bytes": int(min(used, self.total_gib * 0.9999) * GIB),
            "memory_peak_bytes": int(peak * GIB),
            "power_watts": round(power),
            "temperature_celsius": round(load.temperature),
            "throttled": list(load.throttled) if works else [],
            "processes": gpu.processes(t) if rng.random() < 0.15 else None,
        }

    def _host(self, pod: Pod) -> list[dict[str, Any]]:
        lines = []
        for t in self._times(pod.begin, 10.0):
            if pod.silent[0] <= t < pod.silent[1]:
                continue
            rss = pod.rss(t)
            processes = None if rss is None else [{"pid": 1, "title": "ray::WorkerDict", "rss_bytes": int(rss * GIB)}]
            lines.append(
                {
                    "type": "host",
                    "t": t,
                    "pod": pod.name,
                    "memory_used_bytes": int(min(pod.host(t), pod.host_limit_gib) * GIB),
                    "memory_limit_bytes": int(pod.host_limit_gib * GIB),
                    "shm_used_bytes": int(min(pod.shm[1](t), pod.shm[0]) * GIB),
                    "shm_size_bytes": int(pod.shm[0] * GIB),
                    "processes": processes,
                }
            )
        return lines

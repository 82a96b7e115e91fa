# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Rescue: a pod that is held by our own container gets another image for it, so that the job starts.

A native sidecar that cannot be pulled, created or started holds every container after it, for ever. One that keeps
ending in a pod that has begun holds nothing, but its pod is not ready meanwhile: KubeRay waits for ever for a cluster
whose pods are not all ready, and a Service leaves the pod out. The image is all that may be changed in such a pod, and
it is enough. `decide` is pure and says which image; `Rescuer` looks at the pods, asks for the change and tells the
job's owner.

The ladder: our sidecar image; then, where its container cannot be created or run, our operator image (the same
program, without the variables that a GPU runtime acts on); then, and at once where an image cannot be pulled, the image
of the pod's own main container, under which the sidecar's command finds no program and sleeps. Where that cannot be
started either (an image of CUDA sets those variables itself), and our operator image was not tried, it is tried last.
After that nothing is left, and that is said.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.kube.errors import ConflictError, ForbiddenError, InvalidError, KubeError, NotFoundError
from verl_gpumonitor_operator.settings import Images

from .injected import RESCUED, Cause, cause_of, holds_for_ever, main_image
from .ports import ContainerPhase, Incidents, PodImagePatcher, PodRecord

log = logging.getLogger(__name__)

EVENT_RESCUED: Final = RESCUED
EVENT_STUCK: Final = "SidecarStuck"


def failure_of(pod: PodRecord) -> Cause | None:
    """Say why the injected container holds its pod; None for one that does not: it runs, or is still being pulled."""
    return waiting_cause_of(pod) if not has_begun(pod) else None


def waiting_cause_of(pod: PodRecord) -> Cause | None:
    """Say why the injected container waits for its next start, in a pod that it holds or that has begun."""
    if pod.injected is None or pod.sidecar_image is None or pod.deleting or pod.phase not in ("Pending", "Running"):
        return None
    if holds_for_ever(pod):
        return Cause.NOT_NATIVE
    if pod.sidecar is None or pod.sidecar.phase is not ContainerPhase.WAITING:
        return None
    return cause_of(pod)


def has_begun(pod: PodRecord) -> bool:
    """Whether the job's own containers were started: the injected one was up once, and holds nothing back."""
    return pod.phase == "Running"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An image that was given to a pod, or with which it was first seen."""

    image: str
    at: float
    """Unix seconds."""
    cause: Cause | None = None
    """Of the failure that led to it; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RescueAction:
    """What is to be done about a pod that our container holds."""

    cause: Cause
    reason: str
    """The kubelet's word."""
    message: str
    """The kubelet's sentence to it, on one line of at most 300 characters; may be empty."""
    from_image: str
    to_image: str | None
    """None: nothing is left to try; it is only said."""


@dataclass(frozen=True, kw_only=True)
class RescueTimes:
    """How long the kubelet may take to act on a change before what it says counts against the new image.

    It repeats its last word about the old image until the new one was pulled and started.
    """

    operator_image_seconds: float = 10.0
    main_image_seconds: float = 120.0
    """The main image may be large and still on its way; there is nothing to do after it, so there is no hurry. Nor is
    there one in a pod that has begun, where the operator image is given as long."""
    down_seconds: float = 45.0
    """How long a sidecar must wait at a stretch in a pod that has begun. The kubelet doubles its pauses, 10 s at first,
    so that it ended four times in a row: one that a user kills now and then is left alone."""


def decide(
    pod: PodRecord,
    images: Images,
    now: float,
    *,
    attempt: Attempt | None = None,
    tried: Collection[str] = (),
    down_since: float | None = None,
    times: RescueTimes | None = None,
) -> RescueAction | None:
    """Say what to do about this pod at `now` (Unix seconds); None: nothing, or not yet.

    `attempt`: our last change of its image, or, for a pod that was first seen with another image than the sidecar's,
    when that was; None: it has the image it was injected with. `tried`: images that it had before. `down_since`: when
    its sidecar began to wait without a break; for a pod that has begun. Example: an injected pod in `ImagePullBackOff`
    gets `pod.images[0]`; one in `RunContainerError` gets `images.operator`, and 10 s later, still failing,
    `pod.images[0]`.
    """
    times = times or RescueTimes()
    cause = waiting_cause_of(pod)
    current = pod.sidecar_image
    if cause is None or current is None:
        return None
    if has_begun(pod) and (down_since is None or now - down_since < times.down_seconds):
        return None
    if attempt is not None and now - attempt.at < _patience(pod, attempt, cause, times):
        return None
    reason, message = _words(pod)
    # The last one given is not spent while the pod is still seen with the image before it.
    spent = set(tried) - ({attempt.image} if attempt is not None else set())
    following = next((image for image in _following(pod, images, cause) if image not in spent), None)
    return RescueAction(cause=cause, reason=reason, message=message, from_image=current, to_image=following)


def _words(pod: PodRecord) -> tuple[str, str]:
    state = pod.sidecar
    message = " ".join((state.message or "").split()) if state else ""
    return (state.reason if state else None) or "unknown", message if len(message) <= 300 else message[:297] + "..."


def _patience(pod: PodRecord, attempt: Attempt, cause: Cause, times: RescueTimes) -> float:
    if has_begun(pod):
        return times.main_image_seconds
    # Another kind of failure than before is a word about the new image: it is there, and its time is over.
    same_word = attempt.cause is None or attempt.cause is cause
    return times.main_image_seconds if attempt.image == main_image(pod) and same_word else times.operator_image_seconds


def _following(pod: PodRecord, images: Images, cause: Cause) -> list[str]:
    """The images that may follow the one the pod has, best first."""
    if cause is Cause.NOT_NATIVE:
        # None of them ends.
        return []
    main, current = main_image(pod), pod.sidecar_image
    ladder = [images.operator] if cause is Cause.START else []
    return [image for image in [*ladder, main] if image != current] if main is not None else []


class RescueMetrics:
    """Counts what became of each rescue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rescues = Counter(
            "gpumonitor_rescues",
            "Pods that our container holds or keeps from being ready, by what became of the attempt to free them.",
            ["result"],
            registry=registry,
        )
        for result in ("patched", "gone", "forbidden", "conflict", "invalid", "failed", "nothing_left"):
            self._rescues.labels(result)

    def count(self, result: str) -> None:
        """Count one attempt."""
        self._rescues.labels(result).inc()


def result_of(error: KubeError) -> str:
    """Name a failed attempt for the counter."""
    kinds: tuple[tuple[type[KubeError], str], ...] = (
        (NotFoundError, "gone"),
        (ForbiddenError, "forbidden"),
        (ConflictError, "conflict"),
        (InvalidError, "invalid"),
    )
    return next((name for kind, name in kinds if isinstance(error, kind)), "failed")


class Rescuer:
    """Frees pods that our container holds. Is a `PodObserver`; `run` does the work until it is cancelled.

    To be run by the holder of the Lease alone. Level-based: after a restart, `pod_seen` is called for all pods, and
    those that are held are freed then.
    """

    def __init__(
        self,
        *,
        images: Images,
        patcher: PodImagePatcher,
        incidents: Incidents,
        metrics: RescueMetrics,
        times: RescueTimes | None = None,
        clock: Callable[[], float] = time.time,
        concurrent: int = 16,
        retry_seconds: float = 2.0,
        retry_first_refusal_seconds: float = 10.0,
        retry_refused_seconds: float = 60.0,
    ) -> None:
        self._images = images
        self._patcher = patcher
        self._incidents = incidents
        self._metrics = metrics
        self._times = times or RescueTimes()
        self._clock = clock
        self._concurrent = concurrent
        self._retry_seconds = retry_seconds
        self._retry_first_refusal_seconds = retry_first_refusal_seconds
        self._retry_refused_seconds = retry_refused_seconds
        self._held: dict[str, PodRecord] = {}
        self._down_since: dict[str, float] = {}
        """By pod uid, when its sidecar was first seen to wait, without a break."""
        self._attempts: dict[str, Attempt] = {}
        self._tried: dict[str, set[str]] = {}
        """By pod uid, the images that it had: three at most, since none is given twice."""
        self._not_before: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        """By pod uid, how often the API server refused to free it."""
        self._look = asyncio.Event()

    @property
    def held(self) -> int:
        """Pods that our container holds, or keeps from being ready, now."""
        return len(self._held)

    def pod_seen(self, pod: PodRecord) -> None:
        """Take note of a pod; it is looked at within a second if our container holds it."""
        if waiting_cause_of(pod) is None:
            self._let_go(pod)
            return
        self._down_since.setdefault(pod.uid, self._clock())
        image = pod.sidecar_image
        if image is not None and pod.uid not in self._attempts and image in (self._images.operator, main_image(pod)):
            # Changed before this process began: the kubelet may not have come to it yet.
            self._attempts[pod.uid] = Attempt(image=image, at=self._clock())
        self._held[pod.uid] = pod
        self._look.set()

    def pod_gone(self, pod: PodRecord) -> None:
        """Forget a pod."""
        self._held.pop(pod.uid, None)
        self._down_since.pop(pod.uid, None)
        self._not_before.pop(pod.uid, None)
        self._attempts.pop(pod.uid, None)
        self._tried.pop(pod.uid, None)
        self._refusals.pop(pod.uid, None)

    def _let_go(self, pod: PodRecord) -> None:
        if pod.uid not in self._held and pod.uid not in self._attempts:
            return
        self._held.pop(pod.uid, None)
        self._down_since.pop(pod.uid, None)
        # What was tried counts for as long as the pod lives: its sidecar may end again.
        if pod.deleting or not pod.live:
            self.pod_gone(pod)

    async def run(self) -> None:
        """Free pods until cancelled."""
        while True:
            await self.tick()
            # Attempts that wait for the kubelet fall due without anybody's event.
            self._look.clear()
            try:
                async with asyncio.timeout(1.0 if self._held else None):
                    await self._look.wait()
            except TimeoutError:
                continue
            # Gather the rest of a burst, such as the first list, before acting.
            await asyncio.sleep(0.1)

    async def tick(self) -> None:
        """Do once what is due."""
        now = self._clock()
        slots = asyncio.Semaphore(self._concurrent)

        async def act(pod: PodRecord, action: RescueAction) -> None:
            async with slots:
                await self._act(pod, action)

        due = [pod for pod in self._held.values() if self._not_before.get(pod.uid, 0.0) <= now]
        decided = [(pod, self._decide(pod, now)) for pod in due]
        await asyncio.gather(*(act(pod, action) for pod, action in decided if action is not None))

    def _decide(self, pod: PodRecord, now: float) -> RescueAction | None:
        return decide(
            pod,
            self._images,
            now,
            attempt=self._attempts.get(pod.uid),
            tried=self._tried.get(pod.uid, ()),
            down_since=self._down_since.get(pod.uid),
            times=self._times,
        )

    async def _act(self, pod: PodRecord, action: RescueAction) -> None:
        if action.to_image is None:
            self._give_up(pod, action)
            return
        try:
            await self._patcher.patch_sidecar_image(pod, action.to_image)
        except KubeError as error:
            self._failed(pod, error)
            return
        self._metrics.count("patched")
        self._attempts[pod.uid] = Attempt(image=action.to_image, at=self._clock(), cause=action.cause)
        self._tried.setdefault(pod.uid, set()).update((action.from_image, action.to_image))
        self._not_before.pop(pod.uid, None)
        self._refusals.pop(pod.uid, None)
        log.warning("pod freed from its sidecar", extra=_keys(pod, action) | {"image": action.to_image})
        self._incidents.report(
            pod, reason=EVENT_RESCUED, message=rescued_message(pod, action, self._images), severity=Severity.WARNING
        )

    def _failed(self, pod: PodRecord, error: KubeError) -> None:
        result = result_of(error)
        self._metrics.count(result)
        if result == "gone":
            self.pod_gone(pod)
            return
        refused = result in ("forbidden", "invalid")
        first = pod.uid not in self._not_before
        wait = self._refused(pod, error) if refused else self._retry_seconds
        self._not_before[pod.uid] = self._clock() + (error.retry_after_seconds or wait)
        if first:
            log.error(
                "pod cannot be freed from its sidecar", extra=_keys(pod) | {"reason": result, "error": str(error)}
            )

    def _refused(self, pod: PodRecord, error: KubeError) -> float:
        """Say it to the job's owner if it was no passing state. Returns the seconds until the next attempt."""
        refusals = self._refusals[pod.uid] = self._refusals.get(pod.uid, 0) + 1
        if refusals == 1:
            # While a release is being upgraded, its policy and its images may differ for a moment.
            return self._retry_first_refusal_seconds
        if refusals == 2:
            message = f"Pod {pod.name} {_plight(pod)}, and the API server does not let us free it: {error}"
            self._incidents.report(pod, reason=EVENT_STUCK, message=message, severity=Severity.CRITICAL)
        return self._retry_refused_seconds

    def _give_up(self, pod: PodRecord, action: RescueAction) -> None:
        # Said once: the next look is after days, which no held pod outlives unseen.
        self._not_before[pod.uid] = float("inf")
        self._metrics.count("nothing_left")
        log.error("no image is left to free a pod", extra=_keys(pod, action))
        why = f" ({action.reason}), even with the pod's own image"
        if action.cause is Cause.NOT_NATIVE:
            why = (
                ", which lost restartPolicy to a webhook or an API server that knows no native sidecars and never ends"
            )
        message = (
            f"Pod {pod.name} {_plight(pod)}{why}; delete the pod, and set the annotation "
            "gpumonitor.dev/inject=disabled in its template"
        )
        self._incidents.report(pod, reason=EVENT_STUCK, message=message, severity=Severity.CRITICAL)


def _plight(pod: PodRecord) -> str:
    if has_begun(pod):
        return "is not ready, because its container gpumonitor keeps ending"
    return "waits for its container gpumonitor"


def rescued_message(pod: PodRecord, action: RescueAction, images: Images) -> str:
    """Return one sentence that names the pod, the cause, what was done and what it means for the measurement."""
    started = "kept ending" if has_begun(pod) else "could not be started"
    what = "could not be pulled" if action.cause is Cause.PULL else started
    image = action.from_image if len(action.from_image) <= 200 else action.from_image[:197] + "..."
    if action.to_image == images.operator:
        means = "it now runs our image without GPU variables, so that GPUs are read through Ray where there is one"
    else:
        then = "the pod is ready again" if has_begun(pod) else "the job starts"
        means = f"it now runs the pod's own image and sleeps, so that {then} without being measured"
    node = f" on node {pod.node_name}" if pod.node_name else ""
    said = f": {action.message}" if action.message else ""
    return f"Sidecar of pod {pod.name}{node} {what}; {means}. Image {image}, {action.reason}{said}"


def _keys(pod: PodRecord, action: RescueAction | None = None) -> dict[str, object]:
    keys: dict[str, object] = {
        "object": {"kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        "node": pod.node_name,
    }
    return keys | ({"reason": action.reason, "cause": str(action.cause)} if action else {})

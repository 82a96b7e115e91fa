# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.unit.ingest.builders import IMAGES, MAIN_IMAGE, NOW, Clock, Told, pod_record, value_of, waiting_pod
from verl_gpumonitor.model.vocabulary import Severity
from verl_gpumonitor_operator.controller.injected import PULL_REASONS, START_REASONS, Cause, StandIn, stand_in_of
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodRecord
from verl_gpumonitor_operator.controller.rescue import (
    Attempt,
    RescueMetrics,
    Rescuer,
    RescueTimes,
    decide,
    failure_of,
)
from verl_gpumonitor_operator.kube.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    ServerFaultError,
)

RUNNING = ContainerState(phase=ContainerPhase.RUNNING, started_at=NOW)


@pytest.mark.parametrize("reason", sorted(PULL_REASONS))
def test_an_image_that_cannot_be_got_is_replaced_by_the_pods_own(reason: str) -> None:
    action = decide(waiting_pod(reason), IMAGES, NOW)
    assert action is not None
    assert (action.cause, action.to_image, action.reason) == (Cause.PULL, MAIN_IMAGE, reason)


@pytest.mark.parametrize("reason", sorted(START_REASONS))
def test_a_container_that_cannot_start_gets_the_image_without_variables(reason: str) -> None:
    action = decide(waiting_pod(reason), IMAGES, NOW)
    assert action is not None
    assert (action.cause, action.to_image) == (Cause.START, IMAGES.operator)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(pod_record(), id="its sidecar runs"),
        pytest.param(waiting_pod("ContainerCreating"), id="its sidecar is being pulled, however slowly"),
        pytest.param(waiting_pod("PodInitializing"), id="its sidecar waits for an init container before it"),
        pytest.param(waiting_pod(None), id="nobody says why it waits"),
        pytest.param(waiting_pod("SomethingNew"), id="a word that nobody knows"),
        pytest.param(waiting_pod("ImagePullBackOff", injected=None), id="the sidecar is not ours"),
        pytest.param(waiting_pod("ImagePullBackOff", sidecar_image=None), id="it has no container of our name"),
        pytest.param(waiting_pod("ImagePullBackOff", phase="Running"), id="it has begun: nothing is held"),
        pytest.param(waiting_pod("ImagePullBackOff", deleting=True), id="it is being deleted"),
        pytest.param(pod_record(phase="Pending", sidecar=None), id="the kubelet has said nothing yet"),
        pytest.param(
            pod_record(phase="Pending", sidecar=ContainerState(phase=ContainerPhase.TERMINATED, exit_code=1)),
            id="its sidecar ended and was not seen to wait",
        ),
    ],
)
def test_a_pod_that_is_not_held_is_left_alone(pod: PodRecord) -> None:
    assert failure_of(pod) is None
    assert decide(pod, IMAGES, NOW) is None


@pytest.mark.parametrize(
    ("pod", "attempt", "to_image"),
    [
        pytest.param(
            waiting_pod("RunContainerError", sidecar_image=IMAGES.operator),
            Attempt(image=IMAGES.operator, at=NOW - 9.9),
            "wait",
            id="the operator image is given 10 s",
        ),
        pytest.param(
            waiting_pod("RunContainerError", sidecar_image=IMAGES.operator),
            Attempt(image=IMAGES.operator, at=NOW - 10),
            MAIN_IMAGE,
            id="then the pod's own image follows",
        ),
        pytest.param(
            waiting_pod("ErrImagePull", sidecar_image=IMAGES.operator),
            Attempt(image=IMAGES.operator, at=NOW - 10),
            MAIN_IMAGE,
            id="as it does when the operator image cannot be pulled",
        ),
        pytest.param(
            waiting_pod("RunContainerError"),
            Attempt(image=IMAGES.operator, at=NOW - 3),
            "wait",
            id="a watch that lags is waited for",
        ),
        pytest.param(
            waiting_pod("ImagePullBackOff", sidecar_image=MAIN_IMAGE),
            Attempt(image=MAIN_IMAGE, at=NOW - 119),
            "wait",
            id="the main image may be long on its way",
        ),
        pytest.param(
            waiting_pod("ImagePullBackOff", sidecar_image=MAIN_IMAGE),
            Attempt(image=MAIN_IMAGE, at=NOW - 120),
            None,
            id="after it nothing is left",
        ),
        pytest.param(
            waiting_pod("ErrImagePull", sidecar_image="reg.example/sidecar:old"),
            None,
            MAIN_IMAGE,
            id="a sidecar of an older release is freed, too",
        ),
        pytest.param(waiting_pod("ErrImagePull", images=()), None, None, id="a pod whose images are not known"),
    ],
)
def test_the_ladder(pod: PodRecord, attempt: Attempt | None, to_image: str | None) -> None:
    action = decide(pod, IMAGES, NOW, attempt=attempt)
    if to_image == "wait":
        assert action is None
    else:
        assert action is not None
        assert action.to_image == to_image


def test_one_image_for_both_leads_straight_to_the_main_image() -> None:
    both = replace(waiting_pod("RunContainerError"), sidecar_image=IMAGES.operator)
    action = decide(both, IMAGES, NOW)
    assert action is not None
    assert action.to_image == MAIN_IMAGE


@given(
    reasons=st.lists(st.sampled_from(sorted(PULL_REASONS | START_REASONS)), min_size=5, max_size=5),
    delays=st.lists(st.floats(min_value=0, max_value=300), min_size=5, max_size=5),
)
def test_the_ladder_only_goes_down_and_ends(reasons: list[str], delays: list[float]) -> None:
    image, now, attempt = IMAGES.sidecar, NOW, None
    given_images: list[str] = []
    for reason, delay in zip(reasons, delays, strict=True):
        now += delay
        action = decide(waiting_pod(reason, sidecar_image=image), IMAGES, now, attempt=attempt, tried=given_images)
        if action is not None and action.to_image is not None:
            image = action.to_image
            attempt = Attempt(image=image, at=now, cause=action.cause)
            given_images.append(image)
    both = [IMAGES.operator, MAIN_IMAGE]
    assert given_images in (both[:1], both, both[1:], both[::-1])


def test_which_image_stands_in_for_the_sidecars() -> None:
    assert stand_in_of(pod_record(), IMAGES) is None
    assert stand_in_of(pod_record(sidecar_image="reg.example/sidecar:old"), IMAGES) is None
    assert stand_in_of(pod_record(injected=None, sidecar_image=MAIN_IMAGE), IMAGES) is None
    assert stand_in_of(pod_record(sidecar_image=IMAGES.operator), IMAGES) is StandIn.OPERATOR
    assert stand_in_of(pod_record(sidecar_image=MAIN_IMAGE), IMAGES) is StandIn.MAIN
    one_for_both = msgspec.structs.replace(IMAGES, operator=IMAGES.sidecar)
    assert stand_in_of(pod_record(), one_for_both) is None


@dataclass
class Patcher:
    """Takes patches, or fails."""

    given: list[tuple[str, str]] = field(default_factory=list)
    failure: KubeError | None = None
    running: int = 0
    most: int = 0

    async def patch_sidecar_image(self, pod: PodRecord, image: str) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if self.failure is not None:
            raise self.failure
        self.given.append((pod.uid, image))


class Rig:
    def __init__(self) -> None:
        self.patcher, self.told, self.clock, self.registry = Patcher(), Told(), Clock(), CollectorRegistry()
        self.rescuer = Rescuer(
            images=IMAGES,
            patcher=self.patcher,
            incidents=self.told,
            metrics=RescueMetrics(self.registry),
            clock=self.clock,
            times=RescueTimes(),
        )

    async def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        await self.rescuer.tick()

    def counted(self, result: str) -> float | None:
        return value_of(self.registry, "gpumonitor_rescues_total", result=result)


async def test_a_held_pod_is_freed_once_and_its_owner_told() -> None:
    rig = Rig()
    held = waiting_pod("ImagePullBackOff", message="no such\nhost " + "x" * 2000)
    rig.rescuer.pod_seen(held)
    await rig.tick()
    rig.rescuer.pod_seen(held)
    rig.rescuer.pod_seen(replace(held, sidecar_image=MAIN_IMAGE))
    await rig.tick(1.0)
    assert rig.patcher.given == [("uid-0", MAIN_IMAGE)]
    [(pod, reason, severity, message)] = rig.told.events
    assert (pod, reason, severity) == ("job-worker-0", "SidecarRescued", Severity.WARNING)
    assert "job-worker-0" in message and "ImagePullBackOff" in message and "node-1" in message
    assert "no such host xxx" in message and len(message) < 1024
    rig.rescuer.pod_seen(pod_record(sidecar_image=MAIN_IMAGE))
    assert rig.rescuer.held == 0
    assert rig.counted("patched") == 1


async def test_a_pod_that_goes_on_failing_goes_down_the_ladder_and_that_is_said() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError"))
    await rig.tick()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=IMAGES.operator))
    await rig.tick(10.0)
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=MAIN_IMAGE))
    await rig.tick(119.0)
    assert rig.patcher.given == [("uid-0", IMAGES.operator), ("uid-0", MAIN_IMAGE)]
    for _ in range(3):
        await rig.tick(500.0)
    assert [event[1] for event in rig.told.events] == ["SidecarRescued", "SidecarRescued", "SidecarStuck"]
    assert len(rig.patcher.given) == 2
    assert rig.counted("nothing_left") == 1


async def test_a_main_image_that_cannot_start_leads_to_the_operator_image_not_tried_yet() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(waiting_pod("ImagePullBackOff"))
    await rig.tick()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=MAIN_IMAGE))
    await rig.tick(9.0)
    assert rig.patcher.given == [("uid-0", MAIN_IMAGE)]
    await rig.tick(1.0)
    assert rig.patcher.given == [("uid-0", MAIN_IMAGE), ("uid-0", IMAGES.operator)]
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=IMAGES.operator))
    for _ in range(3):
        await rig.tick(500.0)
    assert len(rig.patcher.given) == 2, "no image is given twice"
    assert [event[1] for event in rig.told.events] == ["SidecarRescued", "SidecarRescued", "SidecarStuck"]


async def test_after_a_restart_a_main_image_that_cannot_start_leads_once_to_the_operator_image() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=MAIN_IMAGE))
    await rig.tick(120.0)
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=IMAGES.operator))
    for _ in range(3):
        await rig.tick(500.0)
    assert rig.patcher.given == [("uid-0", IMAGES.operator)]
    assert rig.counted("nothing_left") == 1


async def test_a_change_that_is_not_seen_for_long_is_made_again() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError"))
    await rig.tick()
    await rig.tick(10.0)
    assert rig.patcher.given == [("uid-0", IMAGES.operator)] * 2


async def test_after_a_restart_a_changed_pod_is_given_its_time() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(waiting_pod("RunContainerError", sidecar_image=IMAGES.operator))
    await rig.tick(5.0)
    assert rig.patcher.given == []
    await rig.tick(5.0)
    assert rig.patcher.given == [("uid-0", MAIN_IMAGE)]


@pytest.mark.parametrize(
    ("failure", "result", "tries", "events"),
    [
        pytest.param(NotFoundError("gone", status=404), "gone", 1, 0, id="a pod that is gone is forgotten"),
        pytest.param(ConflictError("other", status=409), "conflict", 5, 0, id="a conflict is tried again soon"),
        pytest.param(ServerFaultError("down", status=500), "failed", 5, 0, id="so is a failing API server"),
        pytest.param(ForbiddenError("policy", status=403), "forbidden", 1, 0, id="a refusal may pass: tried later"),
        pytest.param(InvalidError("invalid", status=422), "invalid", 1, 0, id="so may an invalid change"),
    ],
)
async def test_a_failed_attempt(failure: KubeError, result: str, tries: int, events: int) -> None:
    rig = Rig()
    rig.patcher.failure = failure
    held = waiting_pod("ImagePullBackOff")
    rig.rescuer.pod_seen(held)
    await rig.tick()
    for _ in range(8):
        await rig.tick(1.0)
    assert rig.counted(result) == tries
    assert len(rig.told.events) == events
    rig.patcher.failure = None
    rig.rescuer.pod_seen(held)
    await rig.tick(60.0)
    assert rig.patcher.given == [("uid-0", MAIN_IMAGE)]


@pytest.mark.parametrize("failure", [ForbiddenError("policy", status=403), InvalidError("invalid", status=422)])
async def test_a_refusal_that_stays_is_said_once_and_tried_rarely(failure: KubeError) -> None:
    rig = Rig()
    rig.patcher.failure = failure
    rig.rescuer.pod_seen(waiting_pod("ImagePullBackOff"))
    await rig.tick()
    await rig.tick(9.9)
    assert rig.told.events == []
    await rig.tick(0.1)
    [(_, reason, severity, _)] = rig.told.events
    assert (reason, severity) == ("SidecarStuck", Severity.CRITICAL)
    for _ in range(119):
        await rig.tick(1.0)
    result = "forbidden" if isinstance(failure, ForbiddenError) else "invalid"
    assert rig.counted(result) == 3
    assert len(rig.told.events) == 1


async def test_a_thousand_held_pods_are_freed_a_few_at_a_time() -> None:
    rig = Rig()
    for number in range(1000):
        rig.rescuer.pod_seen(waiting_pod("ErrImagePull", uid=f"uid-{number}"))
    await rig.tick()
    assert len(rig.patcher.given) == 1000
    assert rig.patcher.most <= 16


async def test_pods_that_go_leave_nothing_behind() -> None:
    rig = Rig()
    pods = [waiting_pod("ErrImagePull", uid=f"uid-{number}") for number in range(100)]
    for pod in pods:
        rig.rescuer.pod_seen(pod)
    await rig.tick()
    for pod in pods:
        rig.rescuer.pod_gone(pod)
    kept = {name: held for name, held in vars(rig.rescuer).items() if isinstance(held, dict)}
    assert kept == {"_held": {}, "_down_since": {}, "_attempts": {}, "_tried": {}, "_not_before": {}, "_refusals": {}}


async def test_a_sidecar_that_is_no_sidecar_any_more_holds_its_pod_and_that_is_said_at_once() -> None:
    """A webhook with old types, or a feature gate, took its `restartPolicy`; under no image would it end."""
    rig = Rig()
    held = pod_record(phase="Pending", native=False)
    assert failure_of(held) is Cause.NOT_NATIVE
    rig.rescuer.pod_seen(held)
    for _ in range(3):
        await rig.tick(60.0)
    assert rig.patcher.given == []
    [(_, reason, severity, message)] = rig.told.events
    assert (reason, severity) == ("SidecarStuck", Severity.CRITICAL)
    assert "restartPolicy" in message and "delete the pod" in message
    rig.rescuer.pod_gone(held)
    assert rig.rescuer.held == 0


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(pod_record(phase="Pending"), id="it is one, and the job's image is being pulled"),
        pytest.param(pod_record(phase="Running", native=False), id="it has begun all the same"),
        pytest.param(pod_record(phase="Pending", native=False, injected=None), id="it is not ours"),
        pytest.param(pod_record(phase="Pending", native=False, deleting=True), id="it is being deleted"),
    ],
)
def test_other_pods_whose_sidecar_runs_are_not_held(pod: PodRecord) -> None:
    assert failure_of(pod) is None


def ending(reason: str = "CrashLoopBackOff", **changes: Any) -> PodRecord:
    """A pod that has begun, and that is not ready because its sidecar waits for its next start."""
    return waiting_pod(reason, **({"phase": "Running"} | changes))


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "ImagePullBackOff", "RunContainerError"])
async def test_a_sidecar_that_keeps_ending_makes_no_pod_unready_for_ever(reason: str) -> None:
    """KubeRay waits for pods that are not ready, and a Service leaves them out."""
    rig = Rig()
    rig.rescuer.pod_seen(ending(reason))
    await rig.tick(44.9)
    assert rig.patcher.given == []
    await rig.tick(0.1)
    [(_, image)] = rig.patcher.given
    assert image == (MAIN_IMAGE if reason in PULL_REASONS else IMAGES.operator)
    [(_, event, severity, message)] = rig.told.events
    assert (event, severity) == ("SidecarRescued", Severity.WARNING)
    assert reason in message and "starts" not in message


async def test_a_sidecar_that_ends_now_and_then_is_left_alone() -> None:
    rig = Rig()
    for _ in range(100):
        rig.rescuer.pod_seen(ending())
        await rig.tick(40.0)
        rig.rescuer.pod_seen(pod_record())
        await rig.tick(5.0)
    assert rig.patcher.given == []
    assert rig.rescuer.held == 0


async def test_with_each_image_that_keeps_ending_the_next_follows_and_none_comes_back() -> None:
    rig = Rig()
    for image in (IMAGES.sidecar, IMAGES.operator, MAIN_IMAGE, MAIN_IMAGE):
        rig.rescuer.pod_seen(pod_record(sidecar_image=image))
        await rig.tick(600.0)
        rig.rescuer.pod_seen(ending(sidecar_image=image))
        for _ in range(130):
            await rig.tick(1.0)
    assert list(dict.fromkeys(image for _, image in rig.patcher.given)) == [IMAGES.operator, MAIN_IMAGE]
    assert rig.told.events[-1][1] == "SidecarStuck"
    assert "is not ready" in rig.told.events[-1][3]
    rig.rescuer.pod_seen(pod_record(phase="Succeeded"))
    assert not any(held for held in vars(rig.rescuer).values() if isinstance(held, dict)), "it ended"


async def test_the_operator_image_is_given_the_time_of_a_pull_in_a_pod_that_has_begun() -> None:
    rig = Rig()
    rig.rescuer.pod_seen(ending())
    await rig.tick(45.0)
    rig.rescuer.pod_seen(ending(sidecar_image=IMAGES.operator))
    await rig.tick(119.0)
    assert len(rig.patcher.given) == 1
    await rig.tick(1.0)
    assert rig.patcher.given[1:] == [("uid-0", MAIN_IMAGE)]


async def test_the_loop_frees_a_pod_well_within_ten_seconds() -> None:
    rig = Rig()
    task = asyncio.create_task(rig.rescuer.run())
    await asyncio.sleep(0)
    rig.rescuer.pod_seen(waiting_pod("ImagePullBackOff"))
    async with asyncio.timeout(2.0):
        while not rig.patcher.given:  # noqa: ASYNC110 - what is waited for is the loop's own doing
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

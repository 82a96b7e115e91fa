# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""How well a pod is seen, and what is said of the whole job."""

from dataclasses import replace

import pytest

from tests.unit.controller.builders import gpu, owner_of, pod, report
from verl_gpumonitor.model.kubernetes import RAY_CLUSTER
from verl_gpumonitor.model.vocabulary import GpuState, UnavailableReason
from verl_gpumonitor_operator.controller.injected import PULL_REASONS, START_REASONS
from verl_gpumonitor_operator.controller.jobs import JobKind
from verl_gpumonitor_operator.controller.ports import ContainerPhase, ContainerState, PodRecord
from verl_gpumonitor_operator.controller.telemetry import (
    MONITORED,
    WAITING,
    Patience,
    PodSummary,
    Seen,
    Telemetry,
    Verdict,
    availability,
    is_starting,
    judge,
)
from verl_gpumonitor_operator.settings import Images

PATIENCE = Patience(fresh_seconds=45.0, silence_seconds=60.0)
OWNER = owner_of(JobKind.PYTORCH_JOB, "sft")
POD = pod("m", OWNER)
NOW = 10_000.0
IMAGES = Images(sidecar="gpumonitor/sidecar:1", operator="gpumonitor/operator:1")


def state(phase: ContainerPhase, reason: str | None = None, **more: object) -> ContainerState:
    return ContainerState(phase=phase, reason=reason, **more)  # type: ignore[arg-type]


def telemetry(age: float, unavailable: UnavailableReason | None = None) -> Telemetry:
    return Telemetry.of(report("m", unavailable=unavailable), NOW - age)


@pytest.mark.parametrize(
    ("record", "heard", "seen", "reason"),
    [
        pytest.param(POD, telemetry(5.0), Seen.MONITORED, None, id="a fresh report"),
        pytest.param(POD, telemetry(59.0), Seen.MONITORED, None, id="a report below the silence"),
        pytest.param(POD, telemetry(61.0), Seen.UNMONITORED, "NotReporting", id="silence after reports"),
        pytest.param(
            POD,
            telemetry(5.0, UnavailableReason.NO_LIBRARY),
            Seen.UNMONITORED,
            "NoLibrary",
            id="the sidecar sees nothing",
        ),
        pytest.param(
            replace(POD, gpus_requested=0),
            telemetry(5.0, UnavailableReason.NO_LIBRARY),
            Seen.MONITORED,
            None,
            id="a CPU-only head need not see GPUs",
        ),
        pytest.param(replace(POD, phase="Succeeded"), None, Seen.DONE, None, id="it succeeded"),
        pytest.param(replace(POD, phase="Failed"), telemetry(500.0), Seen.DONE, None, id="it failed"),
        pytest.param(replace(POD, deleting=True), telemetry(500.0), Seen.DONE, None, id="it is being deleted"),
        pytest.param(replace(POD, deleting=True), telemetry(5.0), Seen.MONITORED, None, id="its last report"),
        pytest.param(replace(POD, injected=None), None, Seen.UNMONITORED, "NotInjected", id="the webhook was away"),
        pytest.param(
            replace(POD, injected=None, skip_reason="QuotaTooSmall: The quota has no room."),
            None,
            Seen.UNMONITORED,
            "QuotaTooSmall",
            id="the webhook said why it did not inject",
        ),
        pytest.param(
            replace(POD, injected=None, skip_reason="who knows"),
            None,
            Seen.UNMONITORED,
            "NotInjected",
            id="an odd reason",
        ),
        pytest.param(
            replace(POD, phase="Pending", sidecar=None), None, Seen.WAITING, None, id="it is not scheduled yet"
        ),
        pytest.param(
            replace(POD, sidecar=state(ContainerPhase.WAITING, "PodInitializing")),
            None,
            Seen.WAITING,
            None,
            id="it starts",
        ),
        pytest.param(
            replace(POD, sidecar=state(ContainerPhase.WAITING, "ImagePullBackOff")),
            None,
            Seen.UNMONITORED,
            "ImagePullBackOff",
            id="the image cannot be pulled",
        ),
        pytest.param(
            replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=NOW - 59)),
            None,
            Seen.WAITING,
            None,
            id="young",
        ),
        pytest.param(
            replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=NOW - 61)),
            None,
            Seen.UNMONITORED,
            "NotReporting",
            id="it never reported",
        ),
        pytest.param(
            replace(POD, sidecar=state(ContainerPhase.TERMINATED, exit_code=1)),
            None,
            Seen.UNMONITORED,
            "NotReporting",
            id="the sidecar ended",
        ),
    ],
)
def test_judge(record: PodRecord, heard: Telemetry | None, seen: Seen, reason: str | None) -> None:
    verdict = judge(record, heard, now=NOW, listening_since=0.0, patience=PATIENCE, images=IMAGES)
    assert (verdict.seen, verdict.reason) == (seen, reason)
    assert (verdict.message is not None) == (seen is Seen.UNMONITORED)


def test_silence_before_the_controller_listened_is_its_own() -> None:
    old = replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=0.0))
    assert judge(old, None, now=NOW, listening_since=NOW - 30, patience=PATIENCE, images=IMAGES) == WAITING
    assert (
        judge(old, None, now=NOW, listening_since=NOW - 61, patience=PATIENCE, images=IMAGES).reason == "NotReporting"
    )


RUNNING = state(ContainerPhase.RUNNING, started_at=NOW - 5)
WITH_OPERATOR_IMAGE = replace(POD, sidecar_image=IMAGES.operator, sidecar=RUNNING)
WITH_OWN_IMAGE = replace(POD, sidecar_image="user/verl:1", sidecar=RUNNING)


@pytest.mark.parametrize(
    ("record", "heard", "reason", "words"),
    [
        pytest.param(
            WITH_OPERATOR_IMAGE,
            telemetry(5.0, UnavailableReason.NO_LIBRARY),
            "SidecarRescued",
            "could not be started",
            id="our operator image gets no driver",
        ),
        pytest.param(
            WITH_OPERATOR_IMAGE,
            telemetry(5.0, UnavailableReason.NO_DEVICE_ACCESS),
            "SidecarRescued",
            "could not be started",
            id="our operator image gets no devices",
        ),
        pytest.param(
            WITH_OPERATOR_IMAGE,
            telemetry(5.0, UnavailableReason.OWNERSHIP_UNKNOWN),
            "OwnershipUnknown",
            "says OwnershipUnknown",
            id="our operator image reads, and something else is amiss",
        ),
        pytest.param(WITH_OPERATOR_IMAGE, telemetry(5.0), None, "", id="our operator image sees by Ray"),
        pytest.param(
            WITH_OWN_IMAGE, None, "SidecarRescued", "could not be pulled, or", id="the pod's own image, at once"
        ),
        pytest.param(
            replace(WITH_OWN_IMAGE, gpus_requested=0),
            None,
            "SidecarRescued",
            "Nothing is measured",
            id="the pod's own image on a head without GPUs",
        ),
        pytest.param(
            replace(WITH_OWN_IMAGE, sidecar=state(ContainerPhase.WAITING, "PodInitializing")),
            None,
            None,
            "",
            id="the pod's own image is still being pulled",
        ),
        pytest.param(
            replace(WITH_OWN_IMAGE, sidecar=state(ContainerPhase.WAITING, "CrashLoopBackOff")),
            None,
            "CrashLoopBackOff",
            "cannot start",
            id="even the pod's own image fails",
        ),
        pytest.param(WITH_OWN_IMAGE, telemetry(5.0), None, "", id="the pod's own image carries our program"),
    ],
)
def test_a_rescued_pod_says_what_happened(
    record: PodRecord, heard: Telemetry | None, reason: str | None, words: str
) -> None:
    verdict = judge(record, heard, now=NOW, listening_since=0.0, patience=PATIENCE, images=IMAGES)
    assert verdict.reason == reason
    assert words in (verdict.message or "")
    assert (reason == "SidecarRescued") == ("Event SidecarRescued" in (verdict.message or ""))


@pytest.mark.parametrize("phase", [ContainerPhase.WAITING, ContainerPhase.TERMINATED])
@pytest.mark.parametrize("word", sorted(PULL_REASONS | START_REASONS))
def test_each_word_for_a_failure_is_said_at_once(word: str, phase: ContainerPhase) -> None:
    failing = replace(POD, phase="Pending", sidecar=state(phase, word, message="It says so."))
    verdict = judge(failing, None, now=NOW, listening_since=NOW, patience=PATIENCE, images=IMAGES)
    assert verdict == Verdict(seen=Seen.UNMONITORED, reason=word, message="The sidecar cannot start: It says so.")


RAY_POD = replace(POD, labels={RAY_CLUSTER: "c"})
PULLING = state(ContainerPhase.WAITING, "ContainerCreating")


def since(seconds: float) -> ContainerState:
    return state(ContainerPhase.RUNNING, started_at=NOW - seconds)


UNOWNED, BARE = UnavailableReason.OWNERSHIP_UNKNOWN, UnavailableReason.NO_LIBRARY


@pytest.mark.parametrize(
    ("record", "says", "pending", "expected"),
    [
        pytest.param(replace(RAY_POD, main=PULLING), UNOWNED, True, "has not started", id="its image is being pulled"),
        pytest.param(
            replace(RAY_POD, main=PULLING), BARE, False, "has not started", id="pulled, and Ray alone can see"
        ),
        pytest.param(
            replace(POD, main=PULLING), UNOWNED, True, "has not started", id="an image of torchrun's is pulled"
        ),
        pytest.param(
            replace(POD, main=PULLING), BARE, True, None, id="without Ray a missing driver is missing at once"
        ),
        pytest.param(replace(RAY_POD, main=since(63)), UNOWNED, False, "Ray has not", id="Ray starts"),
        pytest.param(replace(RAY_POD, main=since(63)), BARE, False, "Ray has not", id="Ray starts, and alone can see"),
        pytest.param(replace(RAY_POD, main=since(179)), UNOWNED, False, "Ray has not", id="Ray starts on a slow disk"),
        pytest.param(replace(RAY_POD, main=since(181)), UNOWNED, False, None, id="it runs, and Ray names nobody"),
        pytest.param(replace(RAY_POD, main=since(599)), UNOWNED, True, "Ray has not", id="it installs before its Ray"),
        pytest.param(replace(RAY_POD, main=since(601)), UNOWNED, True, None, id="it installs for ever"),
        pytest.param(replace(POD, main=since(5)), UNOWNED, False, None, id="without Ray nobody will say"),
        pytest.param(RAY_POD, UNOWNED, False, None, id="the kubelet says nothing of the container"),
        pytest.param(
            replace(RAY_POD, main=since(5)), UnavailableReason.NVML_ERROR, False, None, id="Ray ends no error of NVML"
        ),
    ],
)
def test_what_ray_will_say_is_waited_for(
    record: PodRecord, says: UnavailableReason, pending: bool, expected: str | None
) -> None:
    verdict = judge(
        record, telemetry(5.0, says), now=NOW, listening_since=0.0, patience=PATIENCE, images=IMAGES, pending=pending
    )
    assert verdict.seen is (Seen.UNMONITORED if expected is None else Seen.WAITING)
    found = availability([summary("m", verdict)])
    assert found.status == ("False" if expected is None else "Unknown")
    assert expected is None or expected in found.message


def test_a_text_about_silence_does_not_change_by_itself() -> None:
    old = replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=0.0))
    verdicts = {
        judge(old, None, now=NOW + later, listening_since=0.0, patience=PATIENCE, images=IMAGES)
        for later in range(0, 600, 7)
    }
    assert len(verdicts) == 1


def summary(
    name: str,
    verdict: Verdict,
    *,
    requested: int = 4,
    reported: int = 4,
    faulty: int = 0,
    state: GpuState = GpuState.LOST,
    starting: bool = False,
) -> PodSummary:
    lost = tuple(gpu(f"GPU-{number}", state=state, error="GPU_IS_LOST") for number in range(faulty))
    return PodSummary(
        name=name,
        gpus_requested=requested,
        gpus_reported=reported,
        faulty=lost,
        verdict=verdict,
        starting=starting,
    )


def missing(reason: str) -> Verdict:
    return Verdict(seen=Seen.UNMONITORED, reason=reason, message=f"Because of {reason}.")


DONE = Verdict(seen=Seen.DONE)


@pytest.mark.parametrize(
    ("pods", "status", "reason", "words"),
    [
        pytest.param([], "Unknown", "NoReportYet", "No pod", id="no pods"),
        pytest.param([summary("a", WAITING)], "Unknown", "NoReportYet", "No pod", id="pods that start"),
        pytest.param(
            [summary("a", MONITORED), summary("b", MONITORED)], "True", "AllReporting", "8 GPUs", id="all well"
        ),
        pytest.param(
            [summary("a", MONITORED), summary("b", DONE)], "True", "AllReporting", "by 1 pod.", id="done pods"
        ),
        pytest.param(
            [summary("head", missing("NotReporting"), requested=0), summary("a", MONITORED)],
            "True",
            "AllReporting",
            "by 1 pod.",
            id="a head without GPUs does not count",
        ),
        pytest.param(
            [
                summary("a", missing("NoLibrary")),
                summary("b", missing("NoLibrary")),
                summary("c", missing("NotReporting")),
            ],
            "False",
            "NoLibrary",
            "2 of 3 pods",
            id="nothing is seen, for the commonest reason",
        ),
        pytest.param(
            [summary("a", MONITORED), summary("b", missing("NotInjected"))],
            "True",
            "Partial",
            "NotInjected",
            id="one unseen",
        ),
        pytest.param(
            [summary("a", MONITORED, reported=3, faulty=1)],
            "True",
            "Partial",
            "GPU-0 of pod a is lost",
            id="a lost GPU",
        ),
        pytest.param([summary("a", MONITORED, reported=3)], "True", "Partial", "3 of 4", id="a GPU that is not there"),
        pytest.param(
            [summary("a", MONITORED), summary("b", missing("OwnershipUnknown"), starting=True)],
            "True",
            "AllReporting",
            "by 1 pod.",
            id="a second pod that starts",
        ),
        pytest.param(
            [summary("a", MONITORED), summary("b", MONITORED, reported=0, starting=True)],
            "True",
            "AllReporting",
            "2 pods",
            id="a second pod that has not seen its GPUs yet",
        ),
        pytest.param(
            [summary("a", missing("NoLibrary"), starting=True)],
            "False",
            "NoLibrary",
            "1 of 1",
            id="the first pod starts",
        ),
        pytest.param(
            [summary("a", MONITORED), summary("b", MONITORED, reported=3, faulty=1, starting=True)],
            "True",
            "Partial",
            "is lost",
            id="a lost GPU of a pod that starts",
        ),
    ],
)
def test_availability(pods: list[PodSummary], status: str, reason: str, words: str) -> None:
    found = availability(pods)
    assert (found.status, found.reason) == (status, reason)
    assert words in found.message


@pytest.mark.parametrize(
    ("pods", "partial"),
    [
        pytest.param([summary("a", MONITORED, reported=3, faulty=1)], False, id="a broken GPU is another finding"),
        pytest.param([summary("a", MONITORED, reported=2, faulty=1)], True, id="one broken and one not seen"),
        pytest.param(
            [summary("a", MONITORED, reported=3, faulty=1), summary("b", missing("NotInjected"))],
            True,
            id="one broken and a pod that is not seen",
        ),
        pytest.param([summary("a", MONITORED)], False, id="all well"),
    ],
)
def test_what_is_broken_is_not_merely_unseen(pods: list[PodSummary], partial: bool) -> None:
    assert availability(pods).partial is partial


@pytest.mark.parametrize(
    ("record", "starting"),
    [
        pytest.param(replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=NOW - 29)), True, id="29 s old"),
        pytest.param(replace(POD, sidecar=state(ContainerPhase.RUNNING, started_at=NOW - 31)), False, id="31 s old"),
        pytest.param(replace(POD, sidecar=None), False, id="without a sidecar nothing comes yet"),
    ],
)
def test_what_is_starting(record: PodRecord, starting: bool) -> None:
    assert is_starting(record, NOW) is starting

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The injected container as its pod shows it: why it cannot start, and whether it was given another image. Pure.

One place for the kubelet's words, so that what is rescued and what is called unmonitored never differ.
"""

from enum import StrEnum
from typing import Final

from verl_gpumonitor_operator.settings import Images

from .ports import ContainerPhase, PodRecord

PULL_REASONS: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
"""The kubelet's words for an image that it cannot get (pkg/kubelet/images/types.go). A slow pull has none of them."""

START_REASONS: Final = frozenset(
    {
        "CreateContainerError",
        "CreateContainerConfigError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
        "RunContainerError",
        "StartError",
        "ContainerCannotRun",
        "CrashLoopBackOff",
    }
)
"""The kubelet's words for a container that it cannot create, start or keep (pkg/kubelet/container/sync_result.go).

A crash loop is among them: in a pod that has not begun, a sidecar that ends at each start holds the job just as one
that never starts.
"""

RESCUED: Final = "SidecarRescued"
"""Reason of the Event that tells of a rescue, and of a pod that cannot be seen because of one."""


class Cause(StrEnum):
    """What is wrong with the container."""

    PULL = "pull"
    START = "start"
    NOT_NATIVE = "not-native"
    """It runs, as an ordinary init container, and its pod waits for its end."""


def holds_for_ever(pod: PodRecord) -> bool:
    """Whether the injected container lost its `restartPolicy` on the way into the pod, and holds it while it runs.

    So it is with a webhook that was built with types from before 1.28 and writes pods back without what it does not
    know, and with an API server whose feature gate SidecarContainers is off.
    """
    is_there = pod.injected is not None and pod.sidecar is not None and pod.phase == "Pending" and not pod.deleting
    return is_there and not pod.native and pod.sidecar is not None and pod.sidecar.phase is ContainerPhase.RUNNING


def cause_of(pod: PodRecord) -> Cause | None:
    """Say why the injected container does not run; None: it runs, is still being pulled, or ended in another way."""
    state = pod.sidecar
    if state is None or state.phase is ContainerPhase.RUNNING:
        return None
    if state.reason in PULL_REASONS:
        return Cause.PULL
    return Cause.START if state.reason in START_REASONS else None


def main_image(pod: PodRecord) -> str | None:
    """Image of the pod's first own container; None if it has none."""
    return pod.images[0] if pod.images else None


class StandIn(StrEnum):
    """The image that a rescue gave to the container."""

    OPERATOR = "operator"
    """Ours, without the variables that a GPU runtime acts on."""
    MAIN = "main"
    """The pod's own: the container sleeps."""


def stand_in_of(pod: PodRecord, images: Images) -> StandIn | None:
    """Say which image stands in for the sidecar's own; None: none does, as far as these settings can tell.

    The webhook gives each container `images.sidecar`, so that another one of these came by a rescue. One that an
    earlier release injected has images that are not in the settings any more.
    """
    if pod.injected is None or pod.sidecar_image is None or pod.sidecar_image == images.sidecar:
        return None
    if pod.sidecar_image == images.operator:
        return StandIn.OPERATOR
    return StandIn.MAIN if pod.sidecar_image == main_image(pod) else None

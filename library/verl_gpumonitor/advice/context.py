# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What advice may know beside the finding itself. Values only: whoever asks has gathered them."""

from collections.abc import Iterable

import msgspec

from .config import Config
from .settings import Launch, parse_launch
from .versions import VersionRange, guess


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a finding is about. What is unknown is None; advice is then conditional, or silent."""

    launch: Launch = Launch()
    versions: VersionRange = VersionRange()
    kind: str | None = None
    """Of the workload, such as `RayJob`: where in its object a pod's fields are."""
    gpus: int | None = None
    """GPUs of all pods of the job."""
    gpus_per_pod: int | None = None
    """GPUs of one pod, where all have as many."""
    memory_total_bytes: int | None = None
    """Of its smallest GPU."""
    host_headroom_bytes: int | None = None
    """Host memory that the fullest pod can still take."""
    gpu_headroom_bytes: int | None = None
    """GPU memory that was never used so far, on the fullest GPU."""
    open_reasons: frozenset[str] = frozenset()
    """Reasons of the findings that hold now, this one or not."""

    @property
    def config(self) -> Config:
        """The settings in effect."""
        return Config(launch=self.launch, versions=self.versions)


def context_of(
    command_line: str | None,
    *,
    verl: str | None = None,
    ray_names: Iterable[str] = (),
    kind: str | None = None,
    gpus: int | None = None,
    gpus_per_pod: int | None = None,
    memory_total_bytes: int | None = None,
    host_headroom_bytes: int | None = None,
    gpu_headroom_bytes: int | None = None,
    open_reasons: Iterable[str] = (),
) -> Context:
    """Return the context of a job from the driver's command line and what else is known of it.

    `verl`: its version, if something names it; `ray_names`: names of Ray's classes and tasks, which narrow it.
    """
    launch = parse_launch(command_line)
    return Context(
        launch=launch,
        versions=guess(launch, ray_names, said=verl),
        kind=kind,
        gpus=gpus,
        gpus_per_pod=gpus_per_pod,
        memory_total_bytes=memory_total_bytes,
        host_headroom_bytes=host_headroom_bytes,
        gpu_headroom_bytes=gpu_headroom_bytes,
        open_reasons=frozenset(open_reasons),
    )

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""What the chart tells both operator processes: one JSON file, read once at start, checked, then handed down.

The field names are those of the chart's values, in camel case. A field that nobody knows is an error, because a
misspelt setting that is silently ignored is worse than a process that says so at its start.
Names of our own Kubernetes objects are derived here from `release`, so that no two parts can spell them differently.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
SidecarMemory = Annotated[str, Meta(pattern=r"^((3[2-9]|[4-9][0-9]|[1-9][0-9]{2,4})Mi|[1-9][0-9]{0,2}Gi)$")]
"""At least 32Mi: a sidecar that cannot start with less would hold each pod until it is rescued."""
Label = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ImageRef = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^\S+$")]


ALWAYS_EXCLUDED_NAMESPACES: Final = frozenset(("kube-system", "kube-public", "kube-node-lease"))
"""Never injected and never watched, besides our own namespace and those that the settings name."""


class SettingsError(ValueError):
    """The settings cannot be used; the text names the file, the field and what is wrong with it."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Common form of all sections."""


class PullPolicy(StrEnum):
    """Kubernetes' `imagePullPolicy`."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class Images(_Section, frozen=True):
    """Full references of our images, by digest where the release was made by us."""

    sidecar: ImageRef
    operator: ImageRef
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT


class InjectionMode(StrEnum):
    """Which pods are meant when nobody says anything."""

    OPT_OUT = "optOut"
    """All GPU pods of the known jobs, except where `gpumonitor.dev/inject: disabled` is set."""
    OPT_IN = "optIn"
    """Only where `gpumonitor.dev/inject: enabled` is set on the namespace or the pod."""


class Visibility(StrEnum):
    """How the sidecar gets to see GPUs, beyond the variables that its image carries."""

    AUTO = "auto"
    """Nothing of the pod is changed; the image's variables do what the cluster allows."""
    RUNTIME_CLASS = "runtimeClass"
    """`spec.runtimeClassName` is set where it is empty and the RuntimeClass exists."""
    NONE = "none"
    """The sidecar is not to look for GPUs; for the pod it is the same as `auto`."""


class ContainerResources(_Section, frozen=True):
    """CPU and memory of the sidecar, as Kubernetes quantities."""

    cpu: Quantity
    memory: SidecarMemory


class SidecarResources(_Section, frozen=True):
    """What the sidecar may use, by QoS class of the pod. A BestEffort pod's sidecar gets no resources at all."""

    guaranteed: ContainerResources = ContainerResources(cpu="50m", memory="64Mi")
    """Requests and limits alike; never a whole CPU, which would take an exclusive core."""
    burstable_limits: ContainerResources = ContainerResources(cpu="200m", memory="128Mi")
    """Limits; the requests are explicitly 0."""


class Injection(_Section, frozen=True):
    """Which pods get a sidecar, and what it may cost them."""

    mode: InjectionMode = InjectionMode.OPT_OUT
    gpu_resources: tuple[str, ...] = (r".*/gpu$",)
    """Regular expressions; a resource whose whole name matches one counts as GPUs."""
    visibility: Visibility = Visibility.AUTO
    runtime_class_name: Label = "nvidia"
    """Used with `visibility: runtimeClass` alone."""
    excluded_namespaces: tuple[str, ...] = ()
    """Besides kube-system, kube-public, kube-node-lease and our own, which are always excluded."""
    sidecar_resources: SidecarResources = SidecarResources()
    quota_headroom: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """A ResourceQuota must have room for this many sidecars before one is added under it."""
    share_process_namespace: bool = False
    """Set `shareProcessNamespace` on injected pods that say nothing about it. Changes who is PID 1: off by default."""


class ReportSettings(_Section, frozen=True):
    """Pace of the sidecars."""

    interval_seconds: Annotated[float, Meta(ge=1, le=600)] = 15.0
    sample_interval_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0


class ControllerSettings(_Section, frozen=True):
    """Pace and limits of the controller."""

    lease_seconds: Annotated[float, Meta(ge=5, le=300)] = 15.0
    """Duration of the Lease; another replica takes over after it."""
    retention_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 86_400.0
    """How long a GPUMonitor outlives its job."""
    not_reporting_seconds: Annotated[float, Meta(ge=5, le=86_400)] = 60.0
    """Silence after which an injected pod counts as unmonitored."""
    status_min_interval_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Shortest time between two status writes of one GPUMonitor."""
    status_writes_per_second: Annotated[float, Meta(gt=0, le=1000)] = 20.0
    events_per_second: Annotated[float, Meta(gt=0, le=1000)] = 5.0
    events_burst: Annotated[int, Meta(ge=1, le=10_000)] = 50


class Diagnosis(_Section, frozen=True):
    """Limits of the findings. The library owns their types; whoever diagnoses converts these sections to them."""

    oom_risk: dict[str, float | int] = {}
    imbalance: dict[str, float | int] = {}
    thresholds: dict[str, dict[str, float | int]] = {}
    """Of the stage-aware rules, by group; `oomRisk` and `imbalance` above are those of the simple ones."""


class BreakerSettings(_Section, frozen=True):
    """When injection resumes after our own image failed."""

    cool_down_seconds: Seconds = 60.0
    max_cool_down_seconds: Seconds = 1800.0
    """The cool-down doubles with each failure in a row, up to this."""


class Settings(_Section, frozen=True):
    """All settings of the operator."""

    release: Label
    """Full name of the release; names of all our objects derive from it."""
    namespace: Label
    """Where the operator itself runs."""
    images: Images
    injection: Injection = Injection()
    report: ReportSettings = ReportSettings()
    controller: ControllerSettings = ControllerSettings()
    diagnosis: Diagnosis = Diagnosis()
    breaker: BreakerSettings = BreakerSettings()

    @property
    def controller_name(self) -> str:
        """Name of the controller's Deployment, Service, ServiceAccount and Lease."""
        return f"{self.release}-controller"

    @property
    def webhook_name(self) -> str:
        """Name of the webhook's Deployment, Service and ServiceAccount."""
        return f"{self.release}-webhook"

    @property
    def certificates_secret(self) -> str:
        """Secret with what is served: the leaf with its key, and the bundle to trust (see `certs`)."""
        return f"{self.release}-certificates"

    @property
    def authority_secret(self) -> str:
        """Secret with the CA's keys, for the controller alone (see `certs`)."""
        return f"{self.release}-certificates-ca"

    @property
    def breaker_config_map(self) -> str:
        """ConfigMap that holds the state of the circuit breaker."""
        return f"{self.release}-breaker"

    @property
    def webhook_configuration(self) -> str:
        """MutatingWebhookConfiguration, owned by the chart; the controller patches its caBundle alone."""
        return self.release

    @property
    def controller_server_name(self) -> str:
        """DNS name in the certificate by which sidecars check the controller."""
        return f"{self.controller_name}.{self.namespace}.svc"


def _check(settings: Settings) -> None:
    for pattern in settings.injection.gpu_resources:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(f"injection.gpuResources: {pattern!r} is no regular expression: {error}") from error
    if not settings.injection.gpu_resources:
        raise SettingsError("injection.gpuResources: at least one pattern is needed")
    if settings.breaker.max_cool_down_seconds < settings.breaker.cool_down_seconds:
        raise SettingsError("breaker.maxCoolDownSeconds is below breaker.coolDownSeconds")


def decode(document: bytes) -> Settings:
    """Decode and check the settings. Raises SettingsError, whose text names the field and the bound."""
    try:
        settings = msgspec.json.decode(document, type=Settings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(str(error)) from error
    _check(settings)
    return settings


def load(path: Path) -> Settings:
    """Read the settings file. Raises SettingsError, whose text names the file as well."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error

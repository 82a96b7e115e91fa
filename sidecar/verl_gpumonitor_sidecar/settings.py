# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The sidecar's settings: read once from the environment that the admission wrote, checked, handed down.

Broken settings end nothing: a sidecar that exits is restarted, and seen as the job's trouble. `main` says what is
wrong and waits.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from verl_gpumonitor.model import wiring

_RAY_METRICS_URL: Final = "http://127.0.0.1:8080/metrics"
_RAY_DASHBOARD_URL: Final = "http://127.0.0.1:8265"
_PEM: Final = "-----BEGIN CERTIFICATE-----"

ENV_TOKEN_FILE: Final = "GPUMON_REPORT_TOKEN_FILE"  # noqa: S105 - a name, not a secret
"""Where the token lies when it is not where the admission mounts it: for a sidecar that runs outside a pod."""

ENV_MARKS_PORT: Final = "GPUMON_MARKS_PORT"
"""Another port for marks than the one that programs know: for several sidecars on one machine. `0`: none."""

Port = Annotated[int, Meta(ge=0, le=65535)]


class SettingsError(ValueError):
    """The environment is not what the sidecar needs. `problems`: one sentence each, naming the variable."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where reports go."""

    host: str
    """IP address, or a name where an installation prefers one."""
    port: int
    path: str


class ReportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How reports reach the controller."""

    address: Address
    server_name: str
    """Name that the controller's certificate must carry."""
    ca_pem: str
    """CA certificates to trust, PEM."""
    token_file: str = wiring.TOKEN_FILE


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the sidecar is told from outside."""

    namespace: Annotated[str, Meta(min_length=1, max_length=253)]
    pod_name: Annotated[str, Meta(min_length=1, max_length=253)]
    pod_uid: Annotated[str, Meta(min_length=1, max_length=64)]
    gpus_requested: Annotated[int, Meta(ge=0, le=1024)]
    """Sum over the pod's containers."""
    pod_ip: str = ""
    node_name: str = ""
    ray_node_type: Literal["head", "worker", ""] = ""
    """Empty: no Ray node, so Ray is not asked."""
    shared_processes: bool = False
    """The pod shares its process namespace."""
    gpus_shared: bool = False
    """The requested GPUs are shares or slices of GPUs, so that their number says nothing of whose a whole one is."""
    shm_path: str = ""
    """Where the pod's own /dev/shm volume is mounted; empty: it has none."""
    report_interval_seconds: Annotated[float, Meta(ge=0.1, le=600)] = 15.0
    sample_interval_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    metrics_port: Port = wiring.METRICS_PORT
    """Port of /metrics and /healthz; 0 takes a free one."""
    ray_metrics_url: str = _RAY_METRICS_URL
    """Ray's metrics agent; empty: not asked."""
    ray_dashboard_url: str = _RAY_DASHBOARD_URL
    """Ray's dashboard, asked on the head alone; empty: not asked."""
    marks_port: Port = wiring.MARKS_PORT
    """UDP port of the marks, on localhost; 0: none are received."""
    report: ReportSettings | None = None
    """None: no reports, /metrics alone."""

    @property
    def own_marks_port(self) -> int | None:
        """Where marks are received; None where they are not.

        A pod with host network, which is told to take any metrics port, shares localhost with other pods' marks.
        """
        return self.marks_port if self.marks_port and self.metrics_port else None

    @property
    def ray_agent_url(self) -> str | None:
        """Where Ray's agent answers; None where it is not to be asked."""
        return self.ray_metrics_url if self.ray_node_type and self.ray_metrics_url else None

    @property
    def ray_head_url(self) -> str | None:
        """Where the dashboard answers; None but on a head."""
        return self.ray_dashboard_url if self.ray_node_type == "head" and self.ray_dashboard_url else None


_VARIABLES: Final = {
    "namespace": wiring.ENV_POD_NAMESPACE,
    "pod_name": wiring.ENV_POD_NAME,
    "pod_uid": wiring.ENV_POD_UID,
    "pod_ip": wiring.ENV_POD_IP,
    "node_name": wiring.ENV_NODE_NAME,
    "gpus_requested": wiring.ENV_GPUS_REQUESTED,
    "ray_node_type": wiring.ENV_RAY_NODE_TYPE,
    "shared_processes": wiring.ENV_SHARED_PROCESSES,
    "gpus_shared": wiring.ENV_GPUS_SHARED,
    "shm_path": wiring.ENV_SHM_PATH,
    "report_interval_seconds": wiring.ENV_REPORT_INTERVAL,
    "sample_interval_seconds": wiring.ENV_SAMPLE_INTERVAL,
    "metrics_port": wiring.ENV_METRICS_PORT,
    "marks_port": ENV_MARKS_PORT,
    "ray_metrics_url": wiring.ENV_RAY_METRICS_URL,
    "ray_dashboard_url": wiring.ENV_RAY_DASHBOARD_URL,
}
"""Field -> variable. An empty variable is an absent one, except for the URLs, where it means: do not ask."""

_EMPTY_HAS_MEANING: Final = frozenset({"ray_metrics_url", "ray_dashboard_url"})


def load(environ: Mapping[str, str]) -> Settings:
    """Build the settings. Raises SettingsError, which names every variable that is wrong, not the first alone."""
    problems: list[str] = []
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(Settings):
        variable = _VARIABLES.get(field.name)
        raw = environ.get(variable) if variable else None
        if variable is None or raw is None or (raw == "" and field.name not in _EMPTY_HAS_MEANING):
            if field.required:
                problems.append(f"{variable} is not set")
            continue
        try:
            values[field.name] = msgspec.convert(raw.strip(), field.type, strict=False)
        except msgspec.ValidationError as error:
            problems.append(f"{variable}={raw[:64]!r} is not usable: {error}")
    values["report"] = _report(environ, problems)
    if problems:
        raise SettingsError(problems)
    return msgspec.convert(values, Settings)


def metrics_port(environ: Mapping[str, str]) -> int:
    """Return the port alone, for a sidecar whose other settings are broken; the default when it is broken too."""
    try:
        return msgspec.convert(environ.get(wiring.ENV_METRICS_PORT), Port, strict=False)
    except msgspec.ValidationError:
        return wiring.METRICS_PORT


def parse_address(url: str) -> Address:
    """Split `https://10.0.0.1:8443/v1/report` (or `https://[fd00::1]/…`). Raises ValueError with a sentence."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    if scheme != "https" or not authority:
        raise ValueError("expected https://ADDRESS:PORT/PATH")
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host, port = authority, "443"
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"port {port!r} is none")
    return Address(host=host.strip("[]"), port=int(port), path=slash + path or "/")


def _report(environ: Mapping[str, str], problems: list[str]) -> ReportSettings | None:
    """Return the report settings, None without a URL; what is wrong goes to `problems`."""
    url = environ.get(wiring.ENV_REPORT_URL, "").strip()
    if not url:
        return None
    server_name = environ.get(wiring.ENV_REPORT_SERVER_NAME, "").strip()
    ca_pem = environ.get(wiring.ENV_REPORT_CA, "")
    if not server_name:
        problems.append(f"{wiring.ENV_REPORT_SERVER_NAME} is not set, but {wiring.ENV_REPORT_URL} is")
    if _PEM not in ca_pem:
        problems.append(f"{wiring.ENV_REPORT_CA} holds no PEM certificate")
    try:
        return ReportSettings(
            address=parse_address(url),
            server_name=server_name,
            ca_pem=ca_pem,
            token_file=environ.get(ENV_TOKEN_FILE) or wiring.TOKEN_FILE,
        )
    except ValueError as error:
        problems.append(f"{wiring.ENV_REPORT_URL}={url[:128]!r} is not usable: {error}")
        return None

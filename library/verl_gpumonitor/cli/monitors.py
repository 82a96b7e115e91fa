# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""A GPUMonitor as `kubectl get -o json` or `-o yaml` prints it, as typed values. Pure.

Only what is shown is taken, each field of it may be absent, and absent is unknown. Beyond its bounds an object is not
the operator's: it is refused as a whole.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from verl_gpumonitor.model.trace import TraceError
from verl_gpumonitor.model.vocabulary import Severity

KIND: Final = "GPUMonitor"
GROUP: Final = "gpumonitor.dev"
MAX_BYTES: Final = 16 * 1024 * 1024
"""One object is below 64 KiB; a list of very many fits."""

Text = Annotated[str, Meta(max_length=4096)]
_MAX_NAMED: Final = 8
_TOP_LEVEL: Final = (b"apiVersion:", b"kind:", b"items:", b"metadata:", b"spec:", b"status:", b"---")


class MonitorGiven(TraceError):  # noqa: N818 - to a command that wants a recorded run it is an error, to others not
    """What was opened is an object of Kubernetes and no recorded run."""

    def __init__(self, document: bytes) -> None:
        """Keep the document: what was read from a pipe cannot be read again."""
        super().__init__(
            "is a Kubernetes object, which has no time series: only `gpumon report` and `gpumon diagnose` read a"
            " GPUMonitor; `gpumon bundle` makes a recorded run of its job"
        )
        self.document = document


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class WorkloadRef(_Struct, frozen=True, kw_only=True):
    """The job."""

    api_version: str = ""
    kind: str = ""
    name: str = ""


class Spec(_Struct, frozen=True, kw_only=True):
    """What is monitored."""

    workload_ref: WorkloadRef = WorkloadRef()


class WorkloadSeen(_Struct, frozen=True, kw_only=True):
    """The job as it was last seen."""

    start_time: Text | None = None
    completion_time: Text | None = None
    message: Text | None = None
    ray_cluster: Text | None = None


class Launch(_Struct, frozen=True, kw_only=True):
    """How it was started, without secrets."""

    program: Text | None = None
    config_name: Text | None = None
    overrides: list[Text] = []
    overrides_left_out: int | None = None
    verl_version: Text | None = None
    verl_version_guess: Text | None = None

    @property
    def verl(self) -> str | None:
        """The release of verl, or those that it can be; None where nothing tells."""
        if self.verl_version:
            return f"verl {self.verl_version}"
        return f"verl {self.verl_version_guess} (guessed)" if self.verl_version_guess else None

    @property
    def command(self) -> str | None:
        """The command line, as far as it is told; None where it is not."""
        if not self.program and not self.overrides:
            return None
        program = self.program or "?"
        start = ["python3", program] if program.endswith(".py") else ["python3", "-m", program]
        config = ["--config-name", self.config_name] if self.config_name else []
        return " ".join([*start, *config, *(_quoted(word) for word in self.overrides)])


class Gpus(_Struct, frozen=True, kw_only=True):
    """How many."""

    requested: int | None = None
    reported: int | None = None
    text: Text | None = None


class Utilization(_Struct, frozen=True, kw_only=True):
    """Load."""

    mean: float | None = None


class Memory(_Struct, frozen=True, kw_only=True):
    """Memory of the GPU nearest to its limit."""

    peak_ratio: float | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None


class StageQuality(_Struct, frozen=True, kw_only=True):
    """Who tells stages."""

    source: Text | None = None
    resolution_seconds: float | None = None
    reason: Text | None = None
    message: Text | None = None


class NotJudged(_Struct, frozen=True, kw_only=True):
    """A finding that cannot be made of the job."""

    reason: Text = ""
    message: Text | None = None


class DiagnosisQuality(_Struct, frozen=True, kw_only=True):
    """How much the diagnosis follows."""

    gpus: int | None = None
    steps: int | None = None
    message: Text | None = None
    not_judged: list[NotJudged] = []


class DataQuality(_Struct, frozen=True, kw_only=True):
    """How far the numbers can be trusted."""

    source: Text | None = None
    ownership: Text | None = None
    stages: StageQuality = StageQuality()
    diagnosis: DiagnosisQuality = DiagnosisQuality()
    pods_monitored: int | None = None
    pods_unmonitored: int | None = None
    gaps_seconds: float | None = None
    lost_starts: int | None = None
    message: Text | None = None


class Totals(_Struct, frozen=True, kw_only=True):
    """Sums over the whole life."""

    gpu_seconds: float | None = None
    busy_seconds: float | None = None
    energy_joules: float | None = None


class WorstGpu(_Struct, frozen=True, kw_only=True):
    """A GPU that needs a look first."""

    pod: Text | None = None
    node: Text | None = None
    uuid: Text = ""
    index: int | None = None
    model: Text | None = None
    state: Text | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    note: Text | None = None


class Stage(_Struct, frozen=True, kw_only=True):
    """A row of the stage table."""

    stage: Text = "unknown"
    role: Text = "unknown"
    share: float | None = None
    seconds: float | None = None
    seconds_per_step: float | None = None
    utilization: float | None = None
    memory_peak_ratio: float | None = None
    power_watts: float | None = None


class UnmonitoredPod(_Struct, frozen=True, kw_only=True):
    """A pod without telemetry."""

    name: Text = ""
    reason: Text | None = None
    message: Text | None = None


class StatusFinding(_Struct, frozen=True, kw_only=True):
    """A problem that is open, or was at the job's end."""

    reason: Text = ""
    severity: Severity = Severity.WARNING
    since: Text | None = None
    stage: Text | None = None
    role: Text | None = None
    pods: list[Text] = []
    gpus: list[Text] = []
    message: Text = ""


class Recommendation(_Struct, frozen=True, kw_only=True):
    """Something to do."""

    reason: Text = ""
    parameter: Text | None = None
    current: Text | None = None
    suggested: Text | None = None
    text: Text = ""
    evidence: Text | None = None
    price: Text | None = None
    confidence: Text | None = None


class Condition(_Struct, frozen=True, kw_only=True):
    """One condition."""

    type: Text = ""
    status: Text = "Unknown"
    reason: Text = ""
    message: Text = ""


class PreviousRun(_Struct, frozen=True, kw_only=True):
    """The run of this name before."""

    phase: Text | None = None
    start_time: Text | None = None
    completion_time: Text | None = None
    utilization: float | None = None
    memory_peak_ratio: float | None = None
    health: Text | None = None


class Status(_Struct, frozen=True, kw_only=True):
    """What is known."""

    phase: Text | None = None
    stage: Text | None = None
    role: Text | None = None
    step: int | None = None
    seconds_per_step: float | None = None
    health: Text | None = None
    workload: WorkloadSeen = WorkloadSeen()
    launch: Launch = Launch()
    gpus: Gpus = Gpus()
    utilization: Utilization = Utilization()
    memory: Memory = Memory()
    data_quality: DataQuality = DataQuality()
    totals: Totals = Totals()
    worst_gpus: list[WorstGpu] = []
    stages: list[Stage] = []
    stage_table: list[Text] = []
    unmonitored_pods: list[UnmonitoredPod] = []
    findings: list[StatusFinding] = []
    recommendations: list[Recommendation] = []
    conditions: list[Condition] = []
    previous_run: PreviousRun | None = None


class Metadata(_Struct, frozen=True, kw_only=True):
    """Whose it is."""

    name: Text = ""
    namespace: Text = ""
    creation_timestamp: Text | None = None


class GPUMonitor(_Struct, frozen=True, kw_only=True):
    """One GPUMonitor."""

    metadata: Metadata = Metadata()
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def has_ended(self) -> bool:
        """Whether its job is over."""
        return self.status.phase in ("Succeeded", "Failed", "Stopped")


def is_object(first_line: bytes) -> bool:
    """Say whether a file that begins so is an object of Kubernetes; a trace and a log of GPUs begin otherwise."""
    line = first_line.strip()
    return line == b"{" or line.startswith(_TOP_LEVEL) or (line.startswith(b"{") and b'"apiVersion"' in line)


def parse(document: bytes, *, name: str | None = None) -> GPUMonitor:
    """Return the GPUMonitor in a document of JSON or YAML; of a list, the one of this name.

    `name`: `NAME` or `NAMESPACE/NAME`. Raises TraceError, whose text says what is there instead.
    """
    found = _objects(_decoded(document))
    if name is not None:
        chosen = [item for item in found if name in (_name(item), f"{_namespace(item)}/{_name(item)}")]
        if not chosen:
            raise TraceError(f"has no GPUMonitor {name!r}; there is {_named(found)}")
        found = chosen
    if len(found) > 1:
        raise TraceError(f"has {len(found)} GPUMonitors: {_named(found)}; choose one with --name")
    try:
        # Not strict: of YAML all values are texts here. Nested too deep is nobody's object.
        return msgspec.convert(_known(found[0]), GPUMonitor, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TraceError(f"is no GPUMonitor as the operator writes it: {error}") from error


def _decoded(document: bytes) -> Any:
    if len(document) > MAX_BYTES:
        raise TraceError(f"is larger than {MAX_BYTES} bytes, which no GPUMonitor is")
    try:
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if document.lstrip().startswith(b"{"):
            raise TraceError(f"is broken JSON: {error}") from error
    try:
        import yaml  # Of the extra [cli]; JSON is read without it.
    except ImportError as error:
        raise TraceError(
            "is YAML, and PyYAML is not installed: take `-o json`, or pip install 'verl-gpumonitor[cli]'"
        ) from error
    try:
        # Without the loader's dates: a time stays the text that it is in JSON.
        return yaml.load(document, Loader=yaml.BaseLoader)  # noqa: S506 - it makes texts, lists and mappings alone
    except (yaml.YAMLError, RecursionError) as error:
        raise TraceError(f"is broken YAML: {str(error).splitlines()[0]}") from error


def _known(value: Any) -> Any:
    """Return it without what is null or empty, which is as if it were absent; YAML's null is a text here."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if not _is_null(item)}
    return [_known(item) for item in value if not _is_null(item)] if isinstance(value, list) else value


def _is_null(value: Any) -> bool:
    return value is None or value in ("", "~", "null")


def _objects(document: Any) -> list[dict[str, Any]]:
    """Return the GPUMonitors in a document. Raises TraceError if there is none."""
    if not isinstance(document, dict):
        raise TraceError("is no object of Kubernetes: take `kubectl get gpumonitor NAME -o yaml`")
    kind = str(document.get("kind", ""))
    items = document.get("items")
    if isinstance(items, list) and kind in ("List", f"{KIND}List"):
        found = [item for item in items if isinstance(item, dict) and _is_ours(item)]
        if not found:
            raise TraceError("is a list without a GPUMonitor")
        return found
    if not _is_ours(document):
        raise TraceError(f"is a {kind or 'thing without a kind'}, and no GPUMonitor")
    return [document]


def _is_ours(item: dict[str, Any]) -> bool:
    return item.get("kind") == KIND and str(item.get("apiVersion", "")).startswith(f"{GROUP}/")


def _metadata(item: dict[str, Any]) -> dict[str, Any]:
    found = item.get("metadata")
    return found if isinstance(found, dict) else {}


def _name(item: dict[str, Any]) -> str:
    return str(_metadata(item).get("name", ""))


def _namespace(item: dict[str, Any]) -> str:
    return str(_metadata(item).get("namespace", ""))


def _named(found: list[dict[str, Any]]) -> str:
    names = [f"{_namespace(item)}/{_name(item)}" for item in found]
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([f"{more} more"] if more > 0 else [])])


def _quoted(word: str) -> str:
    """Return a word as a shell takes it: values with blanks or quotes are among Hydra's settings."""
    if word and all(sign.isalnum() or sign in "@%+=:,./-_~" for sign in word):
        return word
    if "'" in word and not any(sign in word for sign in '"$`\\!'):
        return f'"{word}"'
    return "'" + word.replace("'", "'\"'\"'") + "'"

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pages and the code say the same: metrics, reasons, fields; and every link leads somewhere."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.sidecar import test_exporter as sidecar_page
from verl_gpumonitor.diagnosis.health import REASONS, rank_of
from verl_gpumonitor.diagnosis.thresholds import Thresholds
from verl_gpumonitor.model.vocabulary import Ownership, Source, UnavailableReason
from verl_gpumonitor_operator.admission.metrics import Metrics as WebhookMetrics
from verl_gpumonitor_operator.admission.mutation import SILENT, SkipReason
from verl_gpumonitor_operator.controller import assessment, rescue
from verl_gpumonitor_operator.controller.breaker import BreakerMetrics
from verl_gpumonitor_operator.controller.certificates import CertificateState
from verl_gpumonitor_operator.controller.events import EventCounts
from verl_gpumonitor_operator.controller.ingest import IngestMetrics
from verl_gpumonitor_operator.controller.metrics import ControllerCollector, Parts
from verl_gpumonitor_operator.controller.reconciler import ReconcileTimes
from verl_gpumonitor_operator.controller.reportserver import ServerMetrics
from verl_gpumonitor_operator.controller.rescue import RescueMetrics
from verl_gpumonitor_operator.controller.sweep import SweepState
from verl_gpumonitor_operator.controller.tokens import TokenMetrics
from verl_gpumonitor_operator.controller.watch import WatchState
from verl_gpumonitor_operator.controller.writer import WriteCounts
from verl_gpumonitor_sidecar.exporter import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md")),
        *(ROOT / name for name in ("compose/README.md", "devcluster/README.md", "tests/fakenvml/README.md")),
    ]
)
CRD = ROOT / "crds" / "gpumonitor.dev_gpumonitors.yaml"
NAME = re.compile(r"(?<![a-z_])gpumonitor_[a-z0-9_]+")


class Series(NamedTuple):
    """A metric as a page describes it."""

    type: str
    labels: frozenset[str]


# Metrics


def described(families: Iterable[Metric]) -> dict[str, Series]:
    """Names as they are scraped, of our own families. A counter's carries `_total`, a histogram's is its stem."""
    found = {}
    for family in families:
        if family.name.startswith("gpumonitor_"):
            labels = getattr(family, "_labelnames", None) or {key for sample in family.samples for key in sample.labels}
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = Series(family.type, frozenset(labels) - {"le"})
    return found


def sidecar_metrics() -> dict[str, Series]:
    shown = sidecar_page.everything(sidecar_page.state(sidecar_page.FULL))

    def broken() -> Any:
        raise ValueError

    pages = (Page(lambda: shown, clock=lambda: sidecar_page.NOW, unix_clock=lambda: sidecar_page.UNIX), Page(broken))
    return described(family for page in pages for family in text_string_to_metric_families(page.text().decode()))


def controller_metrics() -> dict[str, Series]:
    registry = CollectorRegistry()
    for metrics in (IngestMetrics, ServerMetrics, TokenMetrics, RescueMetrics, BreakerMetrics):
        metrics(registry)
    parts = SimpleNamespace(
        reconciler=SimpleNamespace(entries=lambda: (), times=ReconcileTimes()),
        writer=SimpleNamespace(counts=WriteCounts(), waiting=0),
        recorder=SimpleNamespace(counts=EventCounts(), waiting=0),
        pods=(),
        lease=SimpleNamespace(leading=True),
        watch=WatchState(),
        sweep=SweepState(),
        certificates=CertificateState(),
        pod_failures=lambda: 0,
        ready=lambda: True,
    )
    return described([*registry.collect(), *ControllerCollector(cast(Parts, parts)).collect()])


def webhook_metrics() -> dict[str, Series]:
    metrics = WebhookMetrics()
    metrics.requests.labels("injected", "")
    metrics.certificate_loads.labels("loaded")
    instruments = (
        metrics.requests,
        metrics.seconds,
        metrics.certificate_loads,
        metrics.connections,
        metrics.connections_refused,
        metrics.paused,
    )
    return described(family for instrument in instruments for family in instrument.collect())


@cache
def in_code() -> Mapping[str, Mapping[str, Series]]:
    return {"Sidecar": sidecar_metrics(), "Controller": controller_metrics(), "Webhook": webhook_metrics()}


def section(text: str, heading: str) -> str:
    """The part of a page below a heading of the second rank."""
    _, _, rest = text.partition(f"\n## {heading}\n")
    return rest.split("\n## ", 1)[0]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of tables, without their frame."""
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def on_page(heading: str) -> dict[str, Series]:
    text = section((DOCS / "metrics.md").read_text(), heading)
    return {
        row[0].strip("`"): Series(row[1], frozenset(filter(None, row[2].split(", "))))
        for row in rows(text)
        if row[0].startswith("`gpumonitor_")
    }


@pytest.mark.parametrize("process", ["Sidecar", "Controller", "Webhook"])
def test_the_page_of_metrics_describes_what_is_served(process: str) -> None:
    assert on_page(process) == in_code()[process]


def scraped_names() -> set[str]:
    """All names that may stand in a query."""
    names: set[str] = set()
    for name, series in (item for found in in_code().values() for item in found.items()):
        stems = ("_bucket", "_sum", "_count") if series.type == "histogram" else ()
        names |= {name, *(name + stem for stem in stems)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_that_a_page_names_is_served(page: Path) -> None:
    assert set(NAME.findall(page.read_text())) <= scraped_names()


# Words that are public


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_runbook_knows_each_reason_for_missing_telemetry() -> None:
    reasons = {*UnavailableReason, *(set(SkipReason) - SILENT)}
    assert {reason.value for reason in reasons} <= quoted((DOCS / "runbook" / "telemetry.md").read_text())


def test_each_event_is_described() -> None:
    findings = set(REASONS)
    events = findings | {reason + assessment.RESOLVED for reason in findings}
    events |= {rescue.EVENT_RESCUED, rescue.EVENT_STUCK}
    text = section((DOCS / "gpumonitor.md").read_text(), "Events")
    assert {word for row in rows(text) for word in quoted(row[0])} == events


def test_each_condition_is_described() -> None:
    text = (DOCS / "gpumonitor.md").read_text().partition("\n### Conditions\n")[2].split("\n#", 1)[0]
    types = {word for row in rows(text) for word in quoted(row[0])} - {"True", "False", "Unknown"}
    assert types == {*(info.condition for info in REASONS.values()), "SpecAccepted"}


def test_findings_stand_in_the_order_of_their_rank() -> None:
    text = (DOCS / "gpumonitor.md").read_text().partition("\n### Findings\n")[2].split("\n#", 1)[0]
    found = {word: row[1] for row in rows(text) for word in re.findall(r"`([^`]+)`", row[0])}
    assert list(found) == sorted(REASONS, key=rank_of)
    assert all(REASONS[reason].severity.value in severities for reason, severities in found.items())


def test_each_group_of_thresholds_is_named() -> None:
    text = (DOCS / "gpumonitor.md").read_text().partition("\n### Thresholds\n")[2].split("\n#", 1)[0]
    groups = {field.encode_name for field in msgspec.structs.fields(Thresholds)}
    assert groups <= set(re.findall(r"`([A-Za-z]+)`", text))


def fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Names of all fields of a schema, at all depths."""
    for name, inner in schema.get("properties", {}).items():
        yield name
        yield from fields(inner)
        yield from fields(inner.get("items", {}))


def test_each_field_and_column_of_a_gpumonitor_is_described() -> None:
    version = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]
    text = (DOCS / "gpumonitor.md").read_text()
    said = {part for word in quoted(text) for part in re.split(r"[^A-Za-z]+", word)}
    top = version["schema"]["openAPIV3Schema"]["properties"]
    # Lists whose form is Kubernetes' own, or that nothing writes yet.
    left_out = {"stages", "recommendations", "conditions"}
    for part in ("spec", "status"):
        known = {name: inner for name, inner in top[part]["properties"].items() if name not in left_out}
        assert set(fields({"properties": known})) | (left_out if part == "status" else set()) <= said
    columns = {column["name"].upper() for column in version["additionalPrinterColumns"]} - {"AGE"}
    assert columns <= {name for row in rows(section(text, "Columns")) for name in row[0].split(", ")}


def test_sources_and_ownerships_are_described() -> None:
    said = quoted((DOCS / "gpumonitor.md").read_text())
    # A pod that asks for no GPU is not part of a job's ownership; marks come with the library in the training process.
    owners = set(Ownership) - {Ownership.NONE_REQUESTED, Ownership.MARKS}
    assert {*map(str, Source), *map(str, owners)} <= said


# Links


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Files and anchors that a page links to in this repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(target), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize(
    "file", ["templates/NOTES.txt", "templates/_names.tpl", "values.yaml"], ids=lambda file: str(file)
)
def test_paths_in_the_chart_exist(file: str) -> None:
    text = (ROOT / "charts" / "gpumonitor" / file).read_text()
    for path in re.findall(r"(?<![\w/.])(?:docs|crds|charts|examples)/[\w./-]*", text):
        assert (ROOT / path.rstrip(".")).exists(), path


def chart_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "charts" / "gpumonitor" / "values.yaml").read_text())
    return values


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_chart_values_that_a_page_names_exist(page: Path) -> None:
    values = chart_values()
    for word in quoted(page.read_text()):
        top, *inner = word.split(".")
        if top in values and inner and inner[-1] not in ("py", "yaml", "md") and re.fullmatch(r"[A-Za-z.]+", word):
            found: Any = values[top]
            for key in inner:
                assert isinstance(found, dict), word
                assert key in found, word
                found = found[key]


def test_every_page_is_reached_from_the_first() -> None:
    reached, waiting = set(), [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.is_relative_to(DOCS):
            reached.add(page)
            waiting += [target for target, _ in links(page)]
    assert reached == set(DOCS.rglob("*.md"))


def test_decisions_are_numbered_without_a_gap_and_listed_by_their_titles() -> None:
    pages = sorted(page for page in (DOCS / "decisions").glob("*.md") if page.name != "README.md")
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    index = (DOCS / "decisions" / "README.md").read_text()
    for page in pages:
        lines = page.read_text().splitlines()
        assert lines[0].startswith(f"# {page.name[:4]} ")
        assert f"[{page.name[:4]}]({page.name})" in index
        for part in ("Context", "Decision", "Consequences", "Ways rejected", "Evidence"):
            assert any(line.startswith(f"**{part}.**") for line in lines), f"{page.name}: {part}"


def test_files_that_decisions_name_as_evidence_exist() -> None:
    """Paths in back quotes that begin at one of our folders."""
    tops = ("library/", "sidecar/", "operator/", "charts/", "tests/", "containers/", "devcluster/")
    for page in (DOCS / "decisions").glob("*.md"):
        for path in quoted(page.read_text()):
            if path.startswith(tops):
                assert (ROOT / path).exists(), f"{page.name}: {path}"

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Every query of every dashboard has data on the simulated job, and names only what is there; so do all rules."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import simgpu
import yaml

from compose.dashboards import gpu, job, jobs
from compose.dashboards.panels import Board, Variable
from tests.contract.dashboards.scenery import LONELY, NAMESPACE, POD, RULES, WORKLOAD, Prometheus, scenery, wait_for
from tests.unit.test_docs import DOCS, in_code

BOARDS = {"jobs": jobs.BOARD, "job": job.BOARD, "gpu": gpu.BOARD}
DATA_WITHIN_SECONDS = 150.0
"""Counters by stage are settled some 20 s after their time; all waits longer where cores are busy."""

CHOICES = {
    "namespace": NAMESPACE,
    "workload": WORKLOAD,
    "pod": POD,
    "role": ".*",
    "uuid": simgpu.uuid_of(1),
    "__rate_interval": "30s",
    "__range": "5m",
}


class Asked(NamedTuple):
    """A query as Prometheus gets it."""

    place: str
    expr: str


def chosen(text: str, **others: str) -> str:
    """Put in what is chosen at the top of a dashboard. `others`: other choices than those of most tests."""
    for name, value in {**CHOICES, **others}.items():
        text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, text)
    assert "$" not in text, text
    return text


def panels(board: Board) -> Iterator[dict[str, Any]]:
    for panel in board.as_json()["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> Iterator[Asked]:
    for name, board in BOARDS.items():
        for panel in panels(board):
            for target in panel.get("targets", ()):
                yield Asked(f"{name}: {panel['title']} {target['refId']}", chosen(target["expr"]))


def annotations() -> Iterator[Asked]:
    for name, board in BOARDS.items():
        for annotation in board.annotations:
            yield Asked(f"{name}: annotation {annotation.name}", chosen(annotation.expr))


def rules() -> Iterator[Asked]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield Asked(rule.get("alert") or rule["record"], rule["expr"])


QUERIES = list(queries())
ALL = [*QUERIES, *annotations(), *rules()]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scenery(tmp_path_factory.mktemp("scenery")) as asked:
        yield asked


@pytest.fixture(scope="module")
def until() -> float:
    """The moment by which everything has data."""
    return time.monotonic() + DATA_WITHIN_SECONDS


# Whole lists in one test each: a worker that runs one of these tests has a Prometheus of its own to start.


def test_every_panel_has_data(prometheus: Prometheus, until: float) -> None:
    missing = QUERIES
    while missing and time.monotonic() < until:
        missing = [asked for asked in missing if not prometheus.query(asked.expr)]
        time.sleep(0.5)
    assert not missing


def test_the_annotations_are_there(prometheus: Prometheus) -> None:
    for asked in annotations():
        prometheus.query(asked.expr)


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Names of series, each with the labels that its matchers name."""
    for name, matchers in re.findall(r"\b((?:gpumonitor|DCGM)_\w+|ALERTS)\b(?:\{([^}]*)\})?", expr):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers))


def grouped(expr: str) -> set[str]:
    """Labels that the query keeps or joins by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return {label.strip() for one in lists for label in one.split(",") if label.strip()}


def documented(name: str) -> set[str]:
    """Labels of a series of ours. Prometheus drops those that are empty at the moment, as `reason` is on good days."""
    return {label for found in in_code().values() if name in found for label in found[name].labels}


def strangers(prometheus: Prometheus, expr: str) -> list[str]:
    """What a query names and Prometheus does not know."""
    found: list[str] = []
    known: set[str] = set()
    for name, labels in selectors(expr):
        there = {label for series in prometheus.series(name) for label in series}
        found += [name] if not there else sorted(f"{name}{{{label}}}" for label in labels - there - documented(name))
        known |= there | documented(name)
    return found + sorted(grouped(expr) - known)


def test_only_series_and_labels_that_exist_are_named(prometheus: Prometheus, until: float) -> None:
    wrong = {asked.place: [asked.expr] for asked in ALL}
    exprs = {asked.place: asked.expr for asked in ALL}
    while wrong and time.monotonic() < until:
        found = {place: strangers(prometheus, exprs[place]) for place in wrong}
        wrong = {place: names for place, names in found.items() if names}
        time.sleep(0.5)
    assert not wrong


def test_strangers_are_found(prometheus: Prometheus) -> None:
    assert strangers(prometheus, 'sum by (pods) (gpumonitor_gpu_up{nod="x"}) / gpumonitor_gpus') == [
        "gpumonitor_gpu_up{nod}",
        "gpumonitor_gpus",
        "pods",
    ]


def test_all_rules_are_evaluated_without_fault(prometheus: Prometheus, until: float) -> None:
    def evaluated() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_for(lambda: all(rule["health"] != "unknown" for rule in evaluated()), max(1.0, until - time.monotonic()))
    assert [rule["name"] for rule in evaluated() if rule["health"] != "ok"] == []


def test_recorded_series_have_data(prometheus: Prometheus, until: float) -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                wait_for(lambda name=rule["record"]: bool(prometheus.query(name)), max(1.0, until - time.monotonic()))


def test_alerts_of_the_scene_fire(prometheus: Prometheus, until: float) -> None:
    """The Xid's, and one of those for the controller's findings."""

    def firing() -> set[str]:
        return {labels["alertname"] for labels, _ in prometheus.query("ALERTS")}

    wait_for(lambda: "GPUHardwareXid" in firing(), max(1.0, until - time.monotonic()))
    wait_for(lambda: any(name.startswith("GPUMonitor") for name in firing()), max(1.0, until - time.monotonic()))


def offered(prometheus: Prometheus, variable: Variable, **others: str) -> set[str]:
    """Values of a variable, whose query is `label_values(SELECTOR, LABEL)`."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", chosen(variable.query, **others))
    assert found is not None, variable.query
    return {labels[found[2]] for labels in prometheus.series(found[1]) if found[2] in labels}


def test_the_choices_are_offered(prometheus: Prometheus, until: float) -> None:
    missing: set[str] = set()

    def are_offered() -> bool:
        missing.clear()
        for variable in (one for board in BOARDS.values() for one in board.variables):
            values, expected = offered(prometheus, variable), CHOICES[variable.name]
            if expected not in values and not (expected == ".*" and values):
                missing.add(f"{variable.name}: {values}")
        return not missing

    with contextlib.suppress(AssertionError):
        wait_for(are_offered, max(1.0, until - time.monotonic()))
    assert not missing


@pytest.mark.parametrize(
    ("namespace", "workload", "pods"),
    [
        pytest.param(NAMESPACE, WORKLOAD, {POD}, id="a job has the pods that the controller says"),
        pytest.param(".*", WORKLOAD, {POD}, id="in all namespaces too"),
        pytest.param(NAMESPACE, ".*", {POD, LONELY[NAMESPACE]}, id="All has pods of no job too"),
        pytest.param("host", ".*", {LONELY["host"]}, id="one host without controller has its own"),
        pytest.param("host", WORKLOAD, set(), id="and none of a job"),
    ],
)
def test_pods_of_one_job_are_told_by_the_controller(
    prometheus: Prometheus, until: float, namespace: str, workload: str, pods: set[str]
) -> None:
    (variable,) = [one for one in job.BOARD.variables if one.name == "pod"]
    (jobs_of_host,) = [one for one in job.BOARD.variables if one.name == "workload"]

    def asked() -> set[str]:
        return offered(prometheus, variable, namespace=namespace, workload=workload)

    wait_for(lambda: asked() == pods, max(1.0, until - time.monotonic()))
    assert offered(prometheus, jobs_of_host, namespace="host") == set()


def test_lists_of_pods_are_of_the_chosen_job(prometheus: Prometheus, until: float) -> None:
    """The dashboard "Jobs", with a stand-in for what its bars show."""
    expr = jobs.chosen("max by (namespace, pod) (gpumonitor_gpu_info)")

    def pods(workload: str) -> set[str]:
        return {labels["pod"] for labels, _ in prometheus.query(chosen(expr, namespace=".*", workload=workload))}

    wait_for(lambda: pods(WORKLOAD) == {POD}, max(1.0, until - time.monotonic()))
    wait_for(lambda: pods(".*") == {POD, *LONELY.values()}, max(1.0, until - time.monotonic()))


def test_queries_of_the_page_of_metrics_are_answered(prometheus: Prometheus, until: float) -> None:
    blocks = re.findall(r"```promql\n(.+?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        prometheus.query(block)
    joins = [block for block in blocks if "gpumonitor_workload_pod_info" in block and "group_left" in block]

    def jobs_of(block: str) -> set[str]:
        return {labels["workload"] for labels, _ in prometheus.query(block)}

    for block in joins:
        wait_for(lambda block=block: jobs_of(block) == {WORKLOAD, "borrower"}, max(1.0, until - time.monotonic()))


def test_the_stages_of_the_simulated_job_are_its_own(prometheus: Prometheus, until: float) -> None:
    def stages() -> set[str]:
        found = prometheus.query(f'gpumonitor_gpu_observed_seconds_total{{pod="{POD}"}} > 0')
        return {labels["stage"] for labels, _ in found}

    wanted = {"gen", "old_log_prob", "ref", "update_actor"}
    wait_for(lambda: wanted <= stages(), max(1.0, until - time.monotonic()))

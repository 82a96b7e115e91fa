# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Panels, rows and dashboards as values, and the JSON that Grafana reads (schema version 39, Grafana 11 and later)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

SCHEMA_VERSION: Final = 39
COLUMNS: Final = 24
"""Width of Grafana's grid."""
SOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}

GOOD, WARN, BAD, CALM = "#009e73", "#e69f00", "#d55e00", "#56b4e9"
"""Colours that colour-blind people tell apart too; a state is always written out besides."""

STAGES: Final = {
    "init": "#c9ccd1",
    "gen": "#56b4e9",
    "reward": "#c0a3e8",
    "old_log_prob": "#7fcdb0",
    "ref": "#009e73",
    "values": "#e5a3c6",
    "adv": "#a0a6ae",
    "update_critic": "#e69f00",
    "update_actor": "#d55e00",
    "update_weights": "#e3d94a",
    "save_checkpoint": "#8f7f6e",
    "testing": "#b9d3ea",
    "other": "#d7dade",
}
"""Stage -> colour, as in `gpumon report`, in the order of the numbers that stand for them in a state timeline."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query of a panel. `instant`: of the present alone; `table`: as rows with labels as columns."""

    expr: str
    legend: str = ""
    instant: bool = False
    table: bool = False

    def as_json(self, ref: str) -> Json:
        """Return Grafana's target."""
        return {
            "refId": ref,
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "legendFormat": self.legend or "__auto",
            "format": "table" if self.table else "time_series",
            "instant": self.instant or self.table,
            "range": not (self.instant or self.table),
        }


@dataclass(frozen=True, kw_only=True)
class Column:
    """How a query's value, or a label, is shown in a table."""

    title: str
    unit: str = ""
    gauge: bool = False
    """Show a bar from 0 to 1 behind the number."""
    thresholds: Sequence[tuple[float, str]] = ()

    def as_override(self) -> Json:
        """Return Grafana's override for this column."""
        properties: list[Json] = [{"id": "unit", "value": self.unit}] if self.unit else []
        if self.gauge:
            properties += [
                {"id": "custom.cellOptions", "value": {"type": "gauge", "mode": "basic"}},
                {"id": "min", "value": 0},
                {"id": "max", "value": 1},
            ]
        if self.thresholds:
            properties.append({"id": "thresholds", "value": thresholds(self.thresholds)})
        return {"matcher": {"id": "byName", "options": self.title}, "properties": properties}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `extra` is merged into its JSON: what only one kind of panel has."""

    kind: str
    title: str
    description: str
    queries: Sequence[Query] = ()
    width: int = 12
    height: int = 8
    unit: str = "short"
    bounds: tuple[float | None, float | None] = (None, None)
    """Lowest and highest value of the axis; None: as the values have it."""
    decimals: int | None = None
    thresholds: Sequence[tuple[float, str]] = ()
    """From which value on which colour; below the first it is calm."""
    mappings: Sequence[Json] = ()
    overrides: Sequence[Json] = ()
    custom: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, number: int, *, x: int, y: int) -> Json:
        """Return Grafana's panel at this place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [query.as_json(chr(ord("A") + index)) for index, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": list(self.overrides)},
            "options": dict(self.options),
            **self.extra,
        }

    def _defaults(self) -> Json:
        low, high = self.bounds
        chosen = {"min": low, "max": high, "decimals": self.decimals}
        return {
            "unit": self.unit,
            "color": {"mode": "thresholds" if self.thresholds else "palette-classic"},
            "thresholds": thresholds(self.thresholds),
            "mappings": list(self.mappings),
            "custom": dict(self.custom),
            **{name: value for name, value in chosen.items() if value is not None},
        }


def thresholds(steps: Sequence[tuple[float, str]]) -> Json:
    """Return colours by value. Below the first step it is calm."""
    return {
        "mode": "absolute",
        "steps": [{"color": CALM, "value": None}, *({"color": color, "value": value} for value, color in steps)],
    }


def stat(title: str, description: str, expr: str, *, name: str = "", **more: Any) -> Panel:
    """One large number of the present; with `name`, such as `{{stage}}`, what the series is called instead."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "name" if name else "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    }
    values: dict[str, Any] = {"width": 4, "height": 4, "options": options, **more}
    return Panel(
        kind="stat",
        title=title,
        description=description,
        queries=[Query(expr=expr, legend=name, instant=True)],
        **values,
    )


def lines(title: str, description: str, *queries: Query, stacked: bool = False, **more: Any) -> Panel:
    """Values over time."""
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        queries=queries,
        custom=custom,
        options=options,
        **more,
    )


def bars(title: str, description: str, query: Query, **more: Any) -> Panel:
    """One bar for each series of the present."""
    options = {
        "orientation": "horizontal",
        "displayMode": "basic",
        "showUnfilled": True,
        "valueMode": "color",
        "namePlacement": "left",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return Panel(kind="bargauge", title=title, description=description, queries=[query], options=options, **more)


def states(title: str, description: str, *queries: Query, **more: Any) -> Panel:
    """What held when: one line for each series."""
    return Panel(
        kind="state-timeline",
        title=title,
        description=description,
        queries=queries,
        custom={"fillOpacity": 80, "lineWidth": 0, "spanNulls": False},
        options={
            "mergeValues": True,
            "showValue": "auto",
            "alignValue": "left",
            "rowHeight": 0.9,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "single", "sort": "none"},
        },
        **more,
    )


def table(
    title: str,
    description: str,
    values: Mapping[str, tuple[str, Column]],
    *,
    labels: Sequence[str] = (),
    hidden: Sequence[str] = (),
    **more: Any,
) -> Panel:
    """Rows of the present, one for each set of labels: the queries' values are its columns.

    `values`: letter of the query -> expression and column. `labels`: which stand first, in this order. `hidden`: labels
    that the rows have and nobody reads.
    """
    single = len(values) == 1
    names = {("Value" if single else f"Value #{ref}"): column.title for ref, (_, column) in values.items()}
    order = {name: index for index, name in enumerate((*labels, *names))}
    organize = {
        "excludeByName": {"Time": True, **dict.fromkeys(hidden, True)},
        "indexByName": order,
        "renameByName": names,
    }
    transformations: list[Json] = [] if single else [{"id": "merge", "options": {}}]
    return Panel(
        kind="table",
        title=title,
        description=description,
        queries=[Query(expr=expr, table=True) for expr, _ in values.values()],
        overrides=[column.as_override() for _, column in values.values()],
        custom={"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True},
        options={"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}},
        extra={"transformations": [*transformations, {"id": "organize", "options": organize}]},
        **more,
    )


def text(title: str, description: str, content: str, **more: Any) -> Panel:
    """Words, in Markdown."""
    return Panel(
        kind="text", title=title, description=description, options={"mode": "markdown", "content": content}, **more
    )


def value_names(names: Mapping[int, tuple[str, str]]) -> Json:
    """Return the mapping of numbers to words and colours."""
    return {
        "type": "value",
        "options": {
            str(number): {"text": word, "color": color, "index": index}
            for index, (number, (word, color)) in enumerate(names.items())
        },
    }


def stage_numbers(selector: str, by: str) -> str:
    """Return the query that gives the number of the stage that runs, for a state timeline by `stage_names`.

    Grafana shows words for numbers alone. A stage that is not in the table, a program's own word, is the last number,
    `other`.
    """
    *known, other = STAGES
    terms = [
        f'max by ({by}) (gpumonitor_stage_info{{{selector},stage="{stage}"}}) * {number}'
        for number, stage in enumerate(known, start=1)
    ]
    rest = f"max by ({by}) (gpumonitor_stage_info{{{selector}}}) * {list(STAGES).index(other) + 1}"
    return " or ".join([*terms, rest])


def stage_names() -> Json:
    """Return the words of those numbers."""
    return value_names({number: (stage, color) for number, (stage, color) in enumerate(STAGES.items(), start=1)})


def stage_colors() -> list[Json]:
    """Return overrides that give series named by a stage its colour."""
    return [
        {
            "matcher": {"id": "byName", "options": stage},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for stage, color in STAGES.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under one heading, placed from left to right and wrapped. Those of one line have one height."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard, by `label_values` of a series. All are chosen at first."""

    name: str
    title: str
    query: str
    all_value: str | None = None
    """What stands for all; None: all values, one by one."""
    multi: bool = True

    def as_json(self) -> Json:
        """Return Grafana's variable."""
        everything = "All"
        return {
            "type": "query",
            "name": self.name,
            "label": self.title,
            "datasource": SOURCE,
            "definition": self.query,
            "query": {"query": self.query, "refId": f"variable-{self.name}", "qryType": 1},
            "refresh": 2,
            "sort": 1,
            "multi": self.multi,
            "includeAll": True,
            "allValue": self.all_value,
            "current": {"selected": True, "text": [everything], "value": ["$__all"]}
            if self.multi
            else {"selected": True, "text": everything, "value": "$__all"},
            "hide": 0,
            "options": [],
            "regex": "",
            "skipUrlSync": False,
        }


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Marks on all time axes while a query has a value."""

    name: str
    expr: str
    title: str
    color: str

    def as_json(self) -> Json:
        """Return Grafana's annotation."""
        return {
            "name": self.name,
            "datasource": SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": self.color,
            "expr": self.expr,
            "titleFormat": self.title,
            "step": "30s",
            "useValueForTime": False,
        }


PODS_OF_WORKLOAD: Final = (
    '{__name__=~"gpumonitor_workload_pod_info|gpumonitor_gpu_info",namespace=~"$namespace",workload=~"$workload"}'
)
"""Series that name the pods of what is chosen as `workload`, whose "All" is `.*`.

Only the controller's series have the label, so a chosen workload has the pods that the controller says. "All" fits what
has no such label, too: GPUs of pods without a job, and of one host, where no controller is and nothing to choose.
"""


NAMESPACE: Final = Variable(
    name="namespace", title="Namespace", query="label_values(gpumonitor_gpu_info, namespace)", all_value=".*"
)


@dataclass(frozen=True, kw_only=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    annotations: Sequence[Annotation] = ()
    span: str = "now-1h"

    def as_json(self) -> Json:
        """Return what Grafana reads from a file."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["gpumonitor"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "",
            "refresh": "30s",
            "time": {"from": self.span, "to": "now"},
            "links": [
                {
                    "type": "dashboards",
                    "title": "GPUMonitor",
                    "tags": ["gpumonitor"],
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                }
            ],
            "annotations": {"list": [annotation.as_json() for annotation in self.annotations]},
            "templating": {"list": [_datasource(), *(variable.as_json() for variable in self.variables)]},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[Json]:
        number, y = 1, 0
        for row in self.rows:
            heading = {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": row.collapsed,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
            placed, bottom = _placed(row.panels, number + 1, y + 1)
            number += 1 + len(placed)
            yield {**heading, "panels": placed if row.collapsed else []}
            if not row.collapsed:
                yield from placed
            y = y + 1 if row.collapsed else bottom


def _placed(panels: Sequence[Panel], number: int, y: int) -> tuple[list[Json], int]:
    """Return the panels at their places, and the line below them."""
    found: list[Json] = []
    x = height = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        found.append(panel.as_json(number + len(found), x=x, y=y))
        x, height = x + panel.width, max(height, panel.height)
    return found, y + height


def _datasource() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }

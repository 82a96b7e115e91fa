# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The dashboards as Grafana reads them: whole, without overlap, and written anew after each change."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from compose.dashboards import panels as panels_of_code
from compose.dashboards.__main__ import FOLDER, texts
from verl_gpumonitor.model.vocabulary import STAGES

Json = dict[str, Any]

BOARDS = {name: json.loads(text) for name, text in texts().items()}
# Grafana's own identifiers, from the list of units in its panels' settings.
UNITS = {
    *("short", "percent", "percentunit", "s", "h", "bytes", "mbytes", "Bps", "celsius", "watt", "kwatth", "rotmhz"),
    "dateTimeFromNow",
}
KINDS = {"row", "stat", "timeseries", "bargauge", "table", "state-timeline", "text"}
BUILT_IN = {"__rate_interval", "__range", "datasource"}


def panels(board: Json) -> Iterator[Json]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(strings(one) for one in value.values())
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(strings(one) for one in value)


@pytest.fixture(params=BOARDS, ids=str)
def board(request: pytest.FixtureRequest) -> Json:
    found: Json = BOARDS[request.param]
    return found


def test_the_files_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in FOLDER.glob("*")}
    assert written == texts(), "python -m compose.dashboards writes them"


def test_boards_are_told_apart() -> None:
    for key in ("uid", "title"):
        assert len({board[key] for board in BOARDS.values()}) == len(BOARDS)
    assert all(re.fullmatch(r"[a-z-]{1,40}", board["uid"]) for board in BOARDS.values())


def test_panels_have_numbers_of_their_own(board: Json) -> None:
    numbers = [panel["id"] for panel in panels(board)]
    assert len(set(numbers)) == len(numbers)


def test_panels_are_described_and_of_a_known_kind(board: Json) -> None:
    for panel in panels(board):
        assert panel["type"] in KINDS
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["targets"] or panel["type"] == "text"


def cells(panel: Json) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    return {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }


def test_panels_do_not_overlap(board: Json) -> None:
    for group in (board["panels"], *(panel["panels"] for panel in board["panels"] if panel.get("panels"))):
        taken = [cells(panel) for panel in group]
        assert sum(map(len, taken)) == len(set().union(*taken))


def test_rows_are_filled_to_their_end(board: Json) -> None:
    """Nothing but the last line of a row may leave a gap at the right."""
    for _, group in itertools.groupby(
        (panel for panel in panels(board) if panel["type"] != "row"), key=lambda panel: panel["gridPos"]["y"]
    ):
        line = list(group)
        assert sum(panel["gridPos"]["w"] for panel in line) == 24, [panel["title"] for panel in line]
        assert len({panel["gridPos"]["h"] for panel in line}) == 1, [panel["title"] for panel in line]


def test_units_are_grafanas(board: Json) -> None:
    for panel in panels(board):
        if panel["type"] in ("row", "text"):
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        for override in panel["fieldConfig"]["overrides"]:
            for one in override["properties"]:
                assert one["id"] != "unit" or one["value"] in UNITS, panel["title"]


def test_only_variables_that_are_offered_are_used(board: Json) -> None:
    offered = {variable["name"] for variable in board["templating"]["list"]} | BUILT_IN
    used = {name for text in strings(board) for name in re.findall(r"\$\{?(\w+)", text)} - {"__all"}
    assert used <= offered
    assert {"datasource", "namespace", "pod"} <= offered or board["uid"] == "gpumonitor-jobs"


def test_variables_look_at_those_before_them_alone(board: Json) -> None:
    known = {"datasource"}
    for variable in board["templating"]["list"]:
        query = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
        assert set(re.findall(r"\$(\w+)", query)) <= known
        known.add(variable["name"])


def test_targets_of_a_panel_have_letters_of_their_own(board: Json) -> None:
    for panel in panels(board):
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert letters == [chr(ord("A") + index) for index in range(len(letters))]


def test_columns_of_tables_are_those_that_the_queries_give(board: Json) -> None:
    """Names that a table renames are its queries' values, and overrides are of names that are then there."""
    for panel in panels(board):
        if panel["type"] != "table":
            continue
        (organize,) = [one["options"] for one in panel["transformations"] if one["id"] == "organize"]
        letters = [target["refId"] for target in panel["targets"]]
        values = {"Value"} if len(letters) == 1 else {f"Value #{letter}" for letter in letters}
        assert set(organize["renameByName"]) == values
        assert set(organize["renameByName"].values()) == {
            override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]
        }
        kept = {label for target in panel["targets"] for label in grouped(target["expr"])}
        assert set(organize["indexByName"]) - values <= kept, panel["title"]


def grouped(expr: str) -> set[str]:
    lists = re.findall(r"\bby \(([^)]*)\)", expr)
    return {label.strip() for one in lists for label in one.split(",")}


def test_what_people_know_of_the_public_dashboard_of_dcgm_is_there() -> None:
    text = json.dumps(BOARDS["gpu.json"])
    for word in (
        "temperature_celsius",
        "power_watts",
        "DCGM_FI_DEV_SM_CLOCK",
        "gpu_throttled",
        "utilization_ratio",
        "memory_used_bytes",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "ecc_uncorrected",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "nvlink_sent",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "pcie_sent",
    ):
        assert word in text, word


def test_each_stage_has_a_number_and_its_word() -> None:
    assert set(panels_of_code.STAGES) == set(STAGES) - {"unknown"}
    expr = panels_of_code.stage_numbers('pod="a"', "pod")
    numbers = dict(re.findall(r'stage="(\w+)"}\) \* (\d+)', expr))
    words = panels_of_code.stage_names()["options"]
    assert {stage: words[number]["text"] for stage, number in numbers.items()} == {
        stage: stage for stage in panels_of_code.STAGES if stage != "other"
    }
    last = re.search(r'\{pod="a"\}\) \* (\d+)$', expr)
    assert last is not None
    assert words[last[1]]["text"] == "other"

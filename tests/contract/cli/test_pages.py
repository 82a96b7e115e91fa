# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The pages in a real Chromium: on a desk and on a phone, by day and by night, without a word on the console."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

from tests.scenarios.score import VISIBLE
from tests.unit.cli import gpumonitors, logs
from tests.unit.cli.test_reports import gpumon, hostile_trace, steps_log

pytestmark = pytest.mark.slow

LONG = "verl-grpo-hot-gpu0-tvtl6-gpu-workers-worker-bhgns"
NODE = "gke-training-h100-pool-2-5f1d9a7c-x8kq"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The distribution's own Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "no Chromium here: `make setup` installs it on Debian"
    with sync_playwright() as playwright:
        # Without a sandbox, since the tests may run as root; the pages are our own.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of logs, of a record with stages, of odd names and of a GPUMonitor, and comparisons."""
    folder = tmp_path_factory.mktemp("pages")
    before, after = str(logs.before(folder)), str(logs.after(folder))
    gpumon("report", before, "-o", str(folder / "report.html"))
    gpumon("compare", before, after, "-o", str(folder / "compare.html"))
    recorded = (str(VISIBLE / f"{name}.jsonl.gz") for name in ("seed-hot-gpu0", "seed-after-fix"))
    gpumon("compare", *recorded, "-o", str(folder / "stages.html"))
    gpumon("report", str(VISIBLE / "hot-gpu-throttles.jsonl.gz"), "-o", str(folder / "throttles.html"))
    gpumon("report", str(VISIBLE / "seed-hot-gpu0.jsonl.gz"), "--from", "-10m", "-o", str(folder / "part.html"))
    minute = logs.guide_log(folder / "minute.csv", [85, 11, 10, 12], [78, 19, 18, 20], rounds=12)
    gpumon("report", str(minute), "-o", str(folder / "minute.html"))
    named = hostile_trace(folder, name="<img src=x onerror=alert(1)>" + "a-name-without-an-end-" * 20)
    gpumon("report", str(named), "-o", str(folder / "named.html"))
    gpumon("report", str(gpumonitors.write(folder, gpumonitors.monitor())), "-o", str(folder / "monitor.html"))
    long = steps_log(folder, "long.jsonl", seconds=20)
    long.write_text(long.read_text().replace('"w"', f'"{LONG}"'))
    gpumon("report", str(long), "-o", str(folder / "long-report.html"))
    worst = [
        {**gpu, "pod": LONG, "node": NODE, "note": "Imbalance, OOMRisk"}
        for gpu in gpumonitors.monitor()["status"]["worstGpus"]
    ]
    gpumon(
        "report",
        str(gpumonitors.write(folder, gpumonitors.monitor(worstGpus=worst))),
        "-o",
        str(folder / "long-monitor.html"),
    )
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.mark.parametrize("name", ["report", "compare", "throttles", "part", "monitor", "long-report", "long-monitor"])
def test_on_a_desk_no_table_is_cut_off(browser: Browser, pages: dict[str, Path], name: str) -> None:
    """With names as long as Kubernetes makes them."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(pages[name].as_uri())
    hidden = page.evaluate("[...document.querySelectorAll('.scroll')].map(one => one.scrollWidth - one.clientWidth)")
    assert hidden
    assert max(hidden) <= 0
    page.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        pytest.param("report", 1200, "light", id="a report on a desk"),
        pytest.param("report", 380, "dark", id="a report on a phone at night"),
        pytest.param("compare", 380, "light", id="a comparison on a phone"),
        pytest.param("stages", 1200, "light", id="a comparison of stages on a desk"),
        pytest.param("stages", 380, "dark", id="a comparison of stages on a phone at night"),
        pytest.param("throttles", 380, "light", id="a report with stages on a phone"),
        pytest.param("part", 380, "dark", id="a part of a record on a phone at night"),
        pytest.param("minute", 380, "light", id="a first look on a phone"),
        pytest.param("named", 1200, "light", id="names that want to be markup on a desk"),
        pytest.param("named", 380, "dark", id="names without an end on a phone at night"),
        pytest.param("monitor", 1200, "dark", id="a GPUMonitor on a desk at night"),
        pytest.param("monitor", 380, "light", id="a GPUMonitor on a phone"),
    ],
)
def test_a_page_is_readable_and_quiet(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
    page.goto(pages[name].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
    # Contrast, labels, order of headings: what the rules of WCAG say.
    violations = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == []
    assert page.locator("figure svg").count() >= (1 if name == "monitor" else 3)
    assert said == []
    context.close()

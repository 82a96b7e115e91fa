# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The page about the library: its examples run, in order, as a reader would run them; its words are the code's."""

import re
from pathlib import Path
from typing import Any

import pytest

from verl_gpumonitor import ResourceMonitor, monitor
from verl_gpumonitor.model.marks import STAGE_ROLES, STEP
from verl_gpumonitor.plugin import ENV_PLUGIN
from verl_gpumonitor.stages.sources.mark_book import QUIET_SECONDS
from verl_gpumonitor.stages.sources.mark_sender import ENV_MARKS_PORT

PAGE = (Path(__file__).parents[3] / "docs/library.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENV_MARKS_PORT, "9")
    work: list[object] = []
    names: dict[str, Any] = {
        "total_steps": 40,
        "prompts": [],
        "generate": lambda prompts: [*prompts, "a"],
        "update": work.append,
        "save": work.append,
        "train": lambda: work.append("trained"),
    }
    for number, example in enumerate(EXAMPLES):
        exec(compile(example, f"docs/library.md, example {number}", "exec"), names)  # noqa: S102
    assert len(EXAMPLES) == 4
    assert work.count("trained") == 2
    labels = [record.getMessage().split("]")[0] for record in caplog.records if record.getMessage().startswith("[")]
    assert labels[:5] == ["[start", "[after_rollout", "[after_training", "[after_rollout", "[after_training"]
    assert labels.count("[after_checkpoint") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"resources.csv", "resources.jsonl"}
    used: ResourceMonitor = names["monitor"]
    assert [sample.stage for sample in used.metrics][-1] == "epoch_40"
    assert used._sender is not None
    used._sender.close()


def test_the_page_names_what_the_code_has() -> None:
    quoted = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
    assert set(STAGE_ROLES) <= quoted
    assert {STEP, f"{ENV_PLUGIN}=off", "interval", "path", "history", "marks", "scope"} <= quoted
    assert f"the last {monitor.HISTORY} " in PAGE
    assert f"up to {QUIET_SECONDS:.0f} seconds" in PAGE

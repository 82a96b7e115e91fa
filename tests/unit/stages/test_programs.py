# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Who a process is by its command line, and that nothing else of it is told."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.stages.programs import MAX_PROGRAM, program_of

WORDS = ("python3", "-u", "-m", "-X", "--", "env", "ray::X", "a.py", "-", "A=b")
SECRETS = ("hf_abcdefghijklmnop", "sk-abcdefghijklmnop", "ghp_abcdefghijklmnopqrstuv", "AKIAABCDEFGHIJKLMNOP")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["ray::WorkerDict.actor_rollout_ref_update_actor"], "ray::WorkerDict"),
        (["ray::a7f3:WorkerDict.__init__"], "ray::WorkerDict"),
        (["ray::IDLE"], "ray::IDLE"),
        (["ray::Judge(key=hf_abcdefghijklmnop).score"], "ray::Judge"),
        (["ray::hf_abcdefghijklmnop.score"], "ray::"),
        (["VLLM::Worker_TP0"], "VLLM::Worker_TP0"),
        (["sglang::scheduler_TP1 --api-key x"], "sglang::scheduler_TP1"),
        (["/usr/bin/python3.11", "-m", "verl.trainer.main_ppo", "a.b=1"], "python3.11 verl.trainer.main_ppo"),
        (["python3", "-u", "/app/train.py", "--key=sk-abcdefghijklmnop"], "python3 train.py"),
        (["python3", "-X", "faulthandler", "-Wignore", "-uB", "eval.py"], "python3 eval.py"),
        (["python", "/usr/local/bin/torchrun", "--nnodes=2", "train.py"], "python torchrun"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main; x"], "python multiprocessing"),
        (["python", "-c", "import os; key = 'x'"], ""),
        (["python", "/opt/lib/site-packages/ray/_private/workers/default_worker.py"],
         "python ray/_private/workers/default_worker.py"),
        (["python3"], "python3"),
        (["python3 serve.py TOKEN=x"], ""),
        (["nginx: worker process"], "nginx"),
        (["/usr/bin/nvidia-smi", "dmon"], "nvidia-smi"),
        (["bash", "-c", "TOKEN=x run"], "bash"),
        (["hf_abcdefghijklmnop"], ""),
        (["/data/my programs/x"], "x"),
        ([""], ""),
    ],
)  # fmt: skip
def test_a_program_is_named_and_no_argument(words: list[str], program: str) -> None:
    assert program_of("\0".join(words).encode() + b"\0") == program


@given(cmdline=st.binary(max_size=400))
def test_whatever_a_command_line_is_what_is_told_is_short_and_plain(cmdline: bytes) -> None:
    said = program_of(cmdline)
    assert len(said) <= MAX_PROGRAM
    assert re.fullmatch(r"[A-Za-z0-9_.+:/ -]*", said)


@given(
    before=st.lists(st.sampled_from(WORDS), max_size=5),
    after=st.lists(st.text(max_size=8), max_size=3),
    secret=st.sampled_from(SECRETS),
    shape=st.sampled_from(["{}", "--token={}", "/srv/{}", "{}.py", "https://u:{}@host/x", "KEY={}", "a {}"]),
)
def test_a_secret_is_never_told_wherever_it_stands(
    before: list[str], after: list[str], secret: str, shape: str
) -> None:
    words = [*before, shape.format(secret), *after]
    assert secret not in program_of("\0".join(words).encode("utf-8", "replace"))

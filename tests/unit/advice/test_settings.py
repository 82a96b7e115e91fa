# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.advice.settings import Launch, parse_argv, parse_launch
from verl_gpumonitor.model.redaction import MAX_TEXT

PPO = "verl.trainer.main_ppo"


@pytest.mark.parametrize(
    ("line", "module", "overrides"),
    [
        pytest.param(f"python3 -m {PPO} a.b=c +x=y ++z.k=1", PPO, {"a.b": "c", "x": "y", "z.k": "1"}, id="plain"),
        pytest.param(f"python3 -u -X dev -m {PPO} a=1 a=2", PPO, {"a": "2"}, id="the last one wins"),
        pytest.param(f"/opt/venv/bin/python3.11 -m{PPO} a=1", PPO, {"a": "1"}, id="a full path, -m without blank"),
        pytest.param(f'bash -lc "set -x; cd /w && python3 -m {PPO} a=1"', PPO, {"a": "1"}, id="a shell's text"),
        pytest.param(f"sh -c 'bash -c \"python3 -m {PPO} a=1\"'", PPO, {"a": "1"}, id="a shell within a shell"),
        pytest.param(f"python3 -m {PPO} \\\n  a=1 \\\n  b='x y'\n", PPO, {"a": "1", "b": "x y"}, id="several lines"),
        pytest.param(
            f"ray job submit --address http://h:8265 --working-dir . -- python3 -m {PPO} a=1",
            PPO, {"a": "1"}, id="ray job submit",
        ),
        pytest.param(f"ray job submit -- 'python3 -m {PPO} a=1'", PPO, {"a": "1"}, id="ray job submit, one word"),
        pytest.param(f"N=8 M=$N; python3 -m {PPO} t.n=$N t.m=${{M}}", PPO, {"t.n": "8", "t.m": "8"}, id="variables"),
        pytest.param(f"python3 -m {PPO} t.n=$N t.m=$(nproc)", PPO, {"t.n": "$N", "t.m": "$(nproc)"}, id="unknown ones"),
        pytest.param(f"timeout 9h nohup env A=1 python3 -m {PPO} a=1 > log 2>&1 &", PPO, {"a": "1"}, id="wrappers"),
        pytest.param(
            f"python3 data_preprocess/gsm8k.py --x=1 && python3 -m {PPO} a=1 && python3 -m verl.model_merger merge",
            PPO, {"a": "1"}, id="the command that trains, out of a chain",
        ),
        pytest.param("python3 /src/verl/verl/trainer/main_ppo.py a=1", PPO, {"a": "1"}, id="a file of verl's tree"),
        pytest.param("python3 my.py trainer.nnodes=2", None, {"trainer.nnodes": "2"}, id="a script with settings"),
        pytest.param("bash run.sh", None, {}, id="an opaque script"),
        pytest.param(f"python3 -m {PPO} ~a.b x='[1,2]' # c=d", PPO, {"x": "[1,2]"}, id="a deletion and a comment"),
        pytest.param(f"python3 -m {PPO} u=http://h/?a=b&c=d k=v", PPO, {"u": "http://h/?a=b&c=d", "k": "v"}, id="an &"),
        pytest.param(f"python3 -m {PPO} a=\"b 'c", PPO, {"a": "b 'c"}, id="a quote without end"),
        pytest.param("", None, {}, id="nothing"),
    ],
)  # fmt: skip
def test_a_command_line_is_read(line: str, module: str | None, overrides: dict[str, str]) -> None:
    launch = parse_launch(line)
    assert (launch.module, dict(launch.overrides)) == (module, overrides)


def test_plus_deletion_and_configuration_are_remembered() -> None:
    launch = parse_launch(f"python3 -m {PPO} --config-name=ppo_megatron_trainer --config-path /c +a=1 ++b=2 c=3 ~d")
    assert (set(launch.added), set(launch.deleted)) == ({"a", "b"}, {"d"})
    assert (launch.config_name, launch.config_path) == ("ppo_megatron_trainer", "/c")


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer a=1",
        "torchrun --standalone --nnodes 2 --nproc-per-node 8 -m verl.trainer.sft_trainer a=1",
        "python3 -m torch.distributed.run --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer a=1",
        "torchrun --nnodes=2 --nproc_per_node=8 verl/trainer/sft_trainer.py a=1",
    ],
)
def test_torchrun_is_read(line: str) -> None:
    launch = parse_launch(line)
    assert (launch.module, launch.nodes, launch.processes_per_node) == ("verl.trainer.sft_trainer", 2, 8)
    assert launch.overrides == {"a": "1"}


def test_a_script_is_opaque() -> None:
    launch = parse_launch("bash -x /w/run_grpo.sh")
    assert (launch.script, launch.module, launch.known) == ("/w/run_grpo.sh", None, False)
    assert parse_launch("./run.sh").script == "./run.sh"


def test_no_secret_is_kept() -> None:
    launch = parse_launch(f"export HF_TOKEN=qqqq; K=rrrr python3 -m {PPO} +a.api_key=ssss b=hf_tttttttttttt")
    assert launch.environment == {"HF_TOKEN": "***", "K": "rrrr"}
    assert launch.overrides == {"a.api_key": "***", "b": "***"}
    assert all(secret not in launch.text for secret in ("qqqq", "ssss", "tttt"))


def test_arguments_of_a_process_need_no_shell() -> None:
    launch = parse_argv(["python3", "-m", PPO, "trainer.logger=['console','wandb']", "a=b;c", "d=$E"])
    assert launch.module == PPO
    assert launch.overrides == {"trainer.logger": "['console','wandb']", "a": "b;c", "d": "$E"}


@given(st.text())
def test_it_takes_any_text(text: str) -> None:
    assert isinstance(parse_launch(text), Launch)
    assert isinstance(parse_launch(f"bash -c 'python3 -m x {text}"), Launch)


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "A=$A$A ",
        "bash -c ",
        "python3 -m x ",
        "$(",
        "`",
        "'",
        '"',
        "\\",
        "a.b=c ",
        "(",
        "&& ",
        "A='bash -c $A;bash -c $A;'\nbash -c $A;",
    ],
)
def test_a_hostile_text_takes_no_long_time(piece: str) -> None:
    begin = time.process_time()
    parse_launch(piece * (2 * MAX_TEXT // len(piece)))
    assert time.process_time() - begin < 5.0

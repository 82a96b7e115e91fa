# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gpumonitor.model.redaction import MAX_TEXT, redact, redact_value

S = "q7Zk1Lm9"
"""Stands for a secret that has no look of its own."""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f"HF_TOKEN={S} python3 -m verl.trainer.main_ppo", id="an assignment before a command"),
        pytest.param(f"export WANDB_API_KEY='{S} x'; python3", id="a quoted assignment"),
        pytest.param(f"export MY_SECRET=\"{S}\"'{S}'{S}", id="an assignment in several quotes"),
        pytest.param(f"bash -c 'export A_TOKEN={S} && python3'", id="an assignment within a shell's text"),
        pytest.param(f'ray job submit --runtime-env-json=\'{{"env_vars": {{"API_KEY": "{S}"}}}}\'', id="JSON"),
        pytest.param(f'x --env="{{\\"HF_TOKEN\\": \\"{S} {S}\\"}}"', id="JSON with escaped quotes"),
        pytest.param(f"{{env_vars: {{HF_TOKEN: {S}, A: b}}}}", id="YAML"),
        pytest.param(f"python3 -m m +ray_kwargs.ray_init.runtime_env.env_vars.OPENAI_API_KEY={S}", id="an override"),
        pytest.param(f"python3 -m m a.secret.name=[{S}]", id="an override below a secret"),
        pytest.param(f"python3 -m m ++a.api_key={S} ~b+password={S}", id="overrides with signs before and in them"),
        pytest.param(f"x --password {S}", id="a flag"),
        pytest.param(f"x --api-key={S}", id="a flag with an equals sign"),
        pytest.param(f"x --wandb-token -{S}x PASSWORD=-{S}", id="a value that begins like a flag"),
        pytest.param("DB_PASSWORD=123456789", id="a password of digits"),
        pytest.param(f"git clone https://user:{S}@github.com/a/b", id="a password in a URL"),
        pytest.param(f"git clone https://{S}@github.com/a/b", id="a token in a URL"),
        pytest.param(f"curl 'https://a/b?X-Amz-Signature={S}&x=1'", id="a signed URL"),
        pytest.param(f"curl -H 'Authorization: Bearer {S}'", id="a bearer header"),
        pytest.param(f"curl -H 'Authorization: token {S}'", id="a token header"),
        pytest.param(f"curl -u me:{S} https://a", id="curl's user"),
        pytest.param(f"PASSWORD=$(echo {S}) x", id="a substitution"),
        pytest.param("x hf_abcdefghijklmnop123456789", id="a Hugging Face token"),
        pytest.param("x sk-proj-123456789abcdefgh", id="an OpenAI key"),
        pytest.param("x AKIA123456789ABCDEFG", id="an AWS key"),
        pytest.param("wandb login 123456789abcdef0123456789abcdef012345678", id="a Weights & Biases key"),
        pytest.param("x ghp_123456789abcdefghijklmnopqrstuvwxyz", id="a GitHub token"),
        pytest.param("x eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx123456789.abc", id="a JSON web token"),
    ],
)
def test_no_secret_is_left(line: str) -> None:
    shown = redact(line)
    assert S not in shown.replace(f"--wandb-token -{S}x", "")
    assert "123456789" not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
        "python3 -m m actor_rollout_ref.rollout.max_num_batched_tokens=8192 data.prompt_key=prompt",
        "python3 -m m reward_model.model.input_tokenizer=/models/x data.reward_fn_key=data_source",
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer --max-tokens 4096",
        "python3 -m m a.token_level=True critic.ppo_max_token_len_per_gpu=null",
    ],
)
def test_settings_of_verl_stay(line: str) -> None:
    assert redact(line) == line


def test_the_rest_of_the_line_stays() -> None:
    assert redact(f"HF_TOKEN={S} python3 -m m a=b") == "HF_TOKEN=*** python3 -m m a=b"
    assert redact_value("trainer.api_key", S) == "***"
    assert redact_value("trainer.logger", "[console]") == "[console]"


@given(
    st.text(max_size=50),
    st.text(alphabet="abcXYZ019-_+/", min_size=6, max_size=30),
    st.sampled_from(["A_TOKEN", "x.password", "API-KEY", "clientSecret"]),
    st.sampled_from(["{n}={v}", "{n}='{v}'", '{n}="{v}"', '"{n}": "{v}"', "--{n}={v}"]),
)
def test_a_secret_never_stays_whatever_is_before_it(before: str, value: str, name: str, form: str) -> None:
    secret = f"Zq{value}9zZ"
    assert secret not in redact(f"{before}\n{form.format(n=name, v=secret)}")


@given(st.text())
def test_it_takes_any_text(text: str) -> None:
    assert len(redact(text)) <= 4 * MAX_TEXT


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a.",
        '"',
        '\\"',
        "A_TOKEN=",
        "A_KEY: ",
        "A_KEY=1,",
        "://",
        "-----BEGIN PRIVATE KEY-----",
        " ",
        "'token':'",
        "hf_",
        "eyJaaaaaaaa.",
        "+",
        "~",
        "+a",
        "-+",
    ],
)
def test_a_hostile_text_takes_no_long_time(piece: str) -> None:
    begin = time.process_time()
    redact(piece * (MAX_TEXT // len(piece)))
    assert time.process_time() - begin < 3.0

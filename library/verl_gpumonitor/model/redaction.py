# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Takes secrets out of command lines before anybody stores or shows them. Pure, bounded, never raises.

Two ways to know a secret: by the name it is given under (`HF_TOKEN=…`, `"WANDB_API_KEY": "…"`, `--password …`,
`Authorization: …`), and by its own look (`hf_…`, `AKIA…`, a JSON web token, user data in a URL). Where in doubt more is
hidden than need be: a command line is shown for its verl settings, and those are numbers, switches and paths.
"""

import re
from typing import Final

REDACTED: Final = "***"
"""What stands where a secret stood."""
MAX_TEXT: Final = 65536
"""Longer command lines are cut: nobody reads on, and an entrypoint is an object of the user's making."""

_STRONG: Final = (
    "password", "passwd", "passphrase", "secret", "credential", "apikey", "api_key", "access_key", "accesskey",
    "private_key", "privatekey", "account_key", "accountkey", "authorization", "signature", "bearer",
)  # fmt: skip
"""Anywhere in a name, these make any value a secret."""
_LAST: Final = frozenset({"auth", "cookie", "dsn", "pass", "pat", "pwd", "sig"})
"""As the last word of a name, these do."""
_FIELD: Final = re.compile(
    r"(?:^|[._-])(?:prompt|image|video|audio|reward_fn|response|answer|messages?|tools?|data_source|sort|metric)_keys?$"
)
"""Names of columns and metrics, such as verl's `data.prompt_key`, which hold no secret."""
_PLAIN: Final = re.compile(
    r"[\"'\\]*(?:[+-]?\d{1,9}(?:\.\d{1,9})?(?:[eE][+-]?\d{1,3})?|[Tt]rue|[Ff]alse|null|None)?[\"'\\]*"
)
"""Numbers and switches: no token or key looks so, and verl's token limits do."""

_LOOKS: Final = re.compile(
    r"""
      -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
          hf_[A-Za-z0-9]{8,}
        | sk-[A-Za-z0-9_-]{8,}
        | (?:AKIA|ASIA)[0-9A-Z]{12,}
        | gh[opsur]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,}
        | glpat-[A-Za-z0-9_-]{16,} | xox[a-z]-[A-Za-z0-9-]{8,} | npm_[A-Za-z0-9]{16,} | nvapi-[A-Za-z0-9_-]{8,}
        | AIza[0-9A-Za-z_-]{20,}
        | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?
        | local-[0-9a-f]{40} | [0-9a-f]{40}(?![A-Za-z0-9])
      )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Secrets told by their look. 40 hex digits are a key of Weights & Biases, or a commit, which is no loss."""
_URL_USER: Final = re.compile(r"(?<=://)[^\s/@\"']+@")
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic|authorization: *token)(\s+)(?!\*\*\*)[A-Za-z0-9+/=._~-]{6,}")
_USER_FLAG: Final = re.compile(r"((?:^|\s)(?:-u|--user|--proxy-user)[ =])\s*[^\s:\"']+:[^\s\"']+")
_NAMED: Final = re.compile(r"(?<![\w.+~-])(-{0,2})([A-Za-z_+~][\w.+~-]*)(\\*[\"']?\s{0,8}(?::=|[:=])\s{0,8}|\s{1,8})")
"""A name and what parts it from its value; a blank alone does so for flags only.

A name begins where nothing that could be part of it stands before: else a run of `+` would be read from each of them.
"""


def redact(command_line: str) -> str:
    """Return the command line with each secret replaced by `***`, cut after `MAX_TEXT` characters.

    `HF_TOKEN=hf_x python3 -m m a.b=1` gives `HF_TOKEN=*** python3 -m m a.b=1`.
    """
    text = _SCHEME.sub(rf"\1\2{REDACTED}", command_line[:MAX_TEXT])
    text = _by_name(text)
    text = _URL_USER.sub(f"{REDACTED}@", text)
    text = _USER_FLAG.sub(rf"\1{REDACTED}", text)
    return _LOOKS.sub(REDACTED, text)


def redact_value(name: str, value: str) -> str:
    """Return a value that was given under this name, or `***` if either says that it is a secret."""
    return REDACTED if value and is_secret(name, value) else redact(value)


def is_secret(name: str, value: str) -> bool:
    """Say whether a name makes its value a secret. `ppo_max_token_len_per_gpu` with a number does not."""
    lower = name.lower().replace("-", "_")
    if any(word in lower for word in _STRONG):
        return True
    words = lower.rpartition(".")[2].split("_")
    if words[-1] in _LAST:
        return True
    key = any(word.endswith(("key", "keys")) for word in words) and not _FIELD.search(lower)
    token = "token" in lower.replace("tokeniz", "")
    return (token or key) and not _PLAIN.fullmatch(value)


def _by_name(text: str) -> str:
    out: list[str] = []
    at = 0
    for found in _NAMED.finditer(text):
        if found.start() < at:
            continue  # Inside of a value that is hidden already.
        dashes, name, parting = found.groups()
        blank = not parting.strip(" \t\r\n\"'\\")
        if (blank and (not dashes or text.startswith("-", found.end()))) or not is_secret(name, "x"):
            continue
        end = _value_end(text, found.end(), colon=":" in parting)
        value = text[found.end() : end]
        if value and is_secret(name, value):
            out += (text[at : found.end()], REDACTED)
            at = end
    out.append(text[at:])
    return "".join(out)


def _value_end(text: str, begin: int, *, colon: bool) -> int:
    """Return where a value ends: at a blank outside of quotes; after a colon (JSON, YAML) also at `,` and `}`.

    A quote that was open before the value began ends it, as in `bash -c 'export A=b'`.
    """
    outer = {quote for quote in "\"'" if text.count(quote, max(0, begin - 4096), begin) % 2}
    stops = ",}])" if colon else ""
    at = begin
    while at < len(text) and not text[at].isspace() and text[at] not in stops:
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in "\"'":
            close = text.find(text[at : at + 2], at + 2)
            at = len(text) if close < 0 else close + 2
        elif text.startswith("$(", at):
            close = text.find(")", at)
            at = len(text) if close < 0 else close + 1
        elif text[at] in "\"'":
            if text[at] in outer and at > begin:
                break
            at = _after_quote(text, at)
        else:
            at += 1
    return at


def _after_quote(text: str, begin: int) -> int:
    """Return the place after the quoted part that begins here; one that never ends goes to the end of the text."""
    at = begin + 1
    while at < len(text) and text[at] != text[begin]:
        at += 2 if text[at] == "\\" and text[begin] == '"' else 1
    return min(at + 1, len(text))

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the command line that started a job: which program of verl, with which settings. Pure, bounded, never raises.

A command line is written by a user: what cannot be understood is left out, and what depends on something that is not
in it (a variable, another script) is unknown rather than guessed. What it is not: a shell. It follows quotes, `&&`
chains, `bash -c`, `ray job submit -- …` and variables that are set in the same text, and nothing more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from verl_gpumonitor.model.redaction import MAX_TEXT, redact, redact_value

MAX_WORDS: Final = 8192
MAX_OVERRIDES: Final = 1024
MAX_VALUE: Final = 1024
"""Longest value that is kept, in characters."""
MAX_DEPTH: Final = 4
"""So many shells may be nested."""

_PYTHON: Final = re.compile(r"python(?:\d(?:\.\d{1,2})?)?|pypy3?")
_SHELL: Final = re.compile(r"(?:ba|da|z|k)?sh")
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "deepspeed"})
_LAUNCH_MODULES: Final = frozenset({"torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic"})
_PYTHON_WITH_VALUE: Final = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w{0,127})=(.*)", re.DOTALL)
_OVERRIDE: Final = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@:-]{0,255})=(.*)", re.DOTALL)
_DELETION: Final = re.compile(r"~([A-Za-z_][\w./@:-]{0,255})(?:=.*)?", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$(?:\{(\w{1,128})\}|([A-Za-z_]\w{0,127}))")
_OPERATORS: Final = frozenset({";", "&&", "||", "|", "&", "\n", "(", ")"})
_CPU_MODULES: Final = ("verl.model_merger", "verl.trainer.main_eval")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line says. What it does not say is None or missing, never a default."""

    module: str | None = None
    """Such as `verl.trainer.main_ppo`; None if only a script is known, or nothing."""
    script: str | None = None
    """Path of the script that runs instead of a module: its own settings are out of sight."""
    overrides: Mapping[str, str] = {}
    """Dotted key to text, without `+`; the last one wins. Secrets are `***`. A text with `$` is unknown."""
    added: frozenset[str] = frozenset()
    """Keys that were given with `+` or `++`."""
    deleted: frozenset[str] = frozenset()
    """Keys taken out with `~`."""
    config_name: str | None = None
    config_path: str | None = None
    """A configuration of the user's own: then verl's defaults need not hold."""
    processes_per_node: int | None = None
    """`torchrun --nproc_per_node`."""
    nodes: int | None = None
    """`torchrun --nnodes`; None also for a range."""
    environment: Mapping[str, str] = {}
    """Variables set in the text, secrets as `***`."""
    text: str = ""
    """The whole command line, without secrets."""

    @property
    def known(self) -> bool:
        """Whether its settings can be seen: a program with the settings in its arguments."""
        return self.module is not None or bool(self.overrides)


def parse_launch(command_line: str | None) -> Launch:
    """Read a command line as a person would type it; None or an empty one gives an empty `Launch`.

    `python3 -m verl.trainer.main_ppo a.b=c +d=1` gives that module and `{"a.b": "c", "d": "1"}`.
    """
    if not command_line:
        return Launch()
    text = command_line[:MAX_TEXT]
    seen = _Seen()
    return _best(list(_launches(text, seen, depth=0)), text, seen)


def parse_argv(argv: Sequence[str]) -> Launch:
    """Read the arguments of a running process, as `/proc/PID/cmdline` has them: no shell has to be undone."""
    words = [word[:MAX_TEXT] for word in argv[:MAX_WORDS]]
    seen = _Seen()
    return _best(list(_of_command(words, seen, depth=0)), " ".join(words), seen)


class _Seen:
    """What was met so far in one text and the texts inside of it."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.characters_left = 4 * MAX_TEXT
        """To be read still, or shells within shells within variables would multiply."""

    def remember(self, name: str, value: str) -> None:
        if len(self.environment) < MAX_OVERRIDES:
            self.environment[name] = value[:MAX_VALUE]


def _best(found: Sequence[Launch], text: str, seen: _Seen) -> Launch:
    """Choose the command that trains: of a chain, the last one with a module of verl, else with settings."""
    chosen = max(enumerate(found), key=lambda item: (_worth(item[1]), item[0]), default=(0, Launch()))[1]
    shown = {name: redact_value(name, value) for name, value in seen.environment.items()}
    return msgspec.structs.replace(chosen, text=redact(text), environment=shown)


def _worth(launch: Launch) -> int:
    module = launch.module or ""
    if module.startswith(_CPU_MODULES):
        return 1
    if module.startswith(("verl.", "recipe.")):
        return 5
    return (3 if launch.overrides else 0) + (1 if module or launch.script else 0)


def _launches(text: str, seen: _Seen, *, depth: int) -> Iterator[Launch]:
    """Yield what each simple command of a text starts."""
    text = text[: seen.characters_left] if depth < MAX_DEPTH else ""
    seen.characters_left -= len(text)
    command: list[str] = []
    for word, operator in _words(text):
        if operator:
            yield from _of_command(command, seen, depth=depth)
            command = []
            continue
        command.append(_expand(word, seen.environment))
        assignment = _ASSIGNMENT.fullmatch(command[-1])
        if assignment and all(_ASSIGNMENT.fullmatch(w) or w in ("export", "env") for w in command[:-1][-8:]):
            seen.remember(assignment[1], assignment[2])  # Now: the next word may use it.
    yield from _of_command(command, seen, depth=depth)


def _of_command(words: Sequence[str], seen: _Seen, *, depth: int) -> Iterator[Launch]:
    """Yield what one simple command starts; remember the variables that it sets.

    Wrappers (`timeout 9h`, `nohup`, `env`, `nsys profile …`, `ray job submit … --`) have many options and one thing in
    common: the program comes after them. So the first word that is a known program begins it.
    """
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if _PYTHON.fullmatch(name):
            yield from _python(words[at + 1 :])
            return
        if name in _LAUNCHERS:
            yield from _launcher(words[at + 1 :])
            return
        if _SHELL.fullmatch(name):
            yield from _shell(words[at + 1 :], seen, depth=depth)
            return
        if " " in word and at and words[at - 1] == "--":
            yield from _launches(" ".join(words[at:]), seen, depth=depth + 1)
            return
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment:
            seen.remember(assignment[1], assignment[2])
    if words and words[0].endswith((".sh", ".bash")):
        yield Launch(script=words[0][:MAX_VALUE])


def _shell(words: Sequence[str], seen: _Seen, *, depth: int) -> Iterator[Launch]:
    """`bash -lc 'text'` is read on; `bash run.sh a.b=c` is a script, whose arguments may become settings."""
    for at, word in enumerate(words):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            if at + 1 < len(words):
                yield from _launches(words[at + 1], seen, depth=depth + 1)
            return
        if not word.startswith(("-", "+")):
            yield _settings(words[at + 1 :], module=None, script=word)
            return


def _python(words: Sequence[str]) -> Iterator[Launch]:
    at = 0
    while at < len(words):
        word = words[at]
        if word == "-m" and at + 1 < len(words):
            module, rest = words[at + 1], words[at + 2 :]
            if module in _LAUNCH_MODULES:
                yield from _launcher(rest)
            else:
                yield _settings(rest, module=module, script=None)
            return
        if word.startswith("-m") and len(word) > 2:
            yield _settings(words[at + 1 :], module=word[2:], script=None)
            return
        if word == "-c" or not word.startswith("-"):
            if word != "-c":
                yield _of_script(word, words[at + 1 :])
            return
        at += 2 if word in _PYTHON_WITH_VALUE else 1


def _launcher(words: Sequence[str]) -> Iterator[Launch]:
    """Read `torchrun`, whose options come before the program; an option's value may be a word of its own."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word in ("-m", "--module") and at + 1 < len(words):
            yield _counted(_settings(words[at + 2 :], module=words[at + 1], script=None), options)
            return
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            takes_next = not equals and at + 1 < len(words) and _option_value(words[at + 1])
            options[name.replace("-", "_")] = words[at + 1] if takes_next else value
            at += 1 if takes_next else 0
        elif word != "launch":
            yield _counted(_of_script(word, words[at + 1 :]), options)
            return
        at += 1


def _option_value(word: str) -> bool:
    """Whether the word after an option is its value: not an option, and not the program that is started."""
    return not word.startswith("-") and not word.endswith(".py")


def _counted(launch: Launch, options: Mapping[str, str]) -> Launch:
    return msgspec.structs.replace(
        launch,
        processes_per_node=_count(options.get("nproc_per_node") or options.get("num_gpus")),
        nodes=_count(options.get("nnodes") or options.get("num_nodes")),
    )


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text) else None


def _of_script(path: str, rest: Sequence[str]) -> Launch:
    """A file of verl's own tree is the module of that name; another script is one whose program is not known."""
    inside = re.search(r"(?:^|/)(verl/(?:trainer|experimental|model_merger)[\w/]*?)(?:/__main__)?\.py$", path)
    module = inside[1].replace("/", ".") if inside else None
    return _settings(rest, module=module, script=None if module else path)


def _settings(words: Sequence[str], *, module: str | None, script: str | None) -> Launch:
    """Read the arguments of the program itself: Hydra's overrides and its few options."""
    overrides: dict[str, str] = {}
    added: set[str] = set()
    deleted: set[str] = set()
    for word in words:
        found = _OVERRIDE.fullmatch(word)
        if found and found[1] != "~" and (found[2] in overrides or len(overrides) < MAX_OVERRIDES):
            overrides[found[2]] = _value(found[2], found[3])
            deleted.discard(found[2])
            if found[1]:
                added.add(found[2])
        elif (gone := _DELETION.fullmatch(word)) and len(deleted) < MAX_OVERRIDES:
            deleted.add(gone[1])
            overrides.pop(gone[1], None)
    return Launch(
        module=module[:MAX_VALUE] if module else None,
        script=script[:MAX_VALUE] if script else None,
        overrides=overrides,
        added=frozenset(added),
        deleted=frozenset(deleted),
        config_name=_option(words, "--config-name", "-cn"),
        config_path=_option(words, "--config-path", "-cp") or _option(words, "--config-dir", "-cd"),
    )


def _value(key: str, text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return redact_value(key, text[:MAX_VALUE])


def _option(words: Sequence[str], *names: str) -> str | None:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            given = value if equals else words[at + 1] if at + 1 < len(words) else ""
            return given[:MAX_VALUE] or None
    return None


def _expand(word: str, environment: Mapping[str, str]) -> str:
    """Put in the variables that the same text set; another stays as `$NAME`, which makes its setting unknown."""
    if "$" not in word:
        return word
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), word)[:MAX_TEXT]


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the words of a shell text, and its operators as such (True), at most `MAX_WORDS` of both.

    A quote that never ends takes what is left. `$(…)` and backticks stay in their word as they are.
    """
    lexer = _Lexer(text)
    for _ in range(MAX_WORDS):
        found = lexer.next()
        if found is None:
            return
        yield found


class _Lexer:
    """Where we are in a text. `(` and `&` part commands at a word's edge only: many overrides contain them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def next(self) -> tuple[str, bool] | None:
        """Return the next word or operator; None at the end."""
        self._skip()
        if self.at >= len(self.text):
            return None
        for length in (2, 1):
            operator = self.text[self.at : self.at + length]
            if operator in _OPERATORS:
                self.at += length
                return operator, True
        return self._word(), False

    def _skip(self) -> None:
        """Go over blanks, continued lines and comments."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r":
                self.at += 1
            elif text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = text.index("\n", self.at) + 1
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def _word(self) -> str:
        parts: list[str] = []
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in " \t\r\n;" or text.startswith(("&&", "||"), self.at):
                break
            if char == "'":
                parts.append(self._single())
            elif char == '"':
                parts.append(self._double())
            elif char == "\\":
                parts.append(text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at += 2
            elif char == "`" or text.startswith("$(", self.at):
                parts.append(self._substitution())
            else:
                parts.append(char)
                self.at += 1
        return "".join(parts)

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        end = len(self.text) if end < 0 else end
        part = self.text[self.at + 1 : end]
        self.at = end + 1
        return part

    def _double(self) -> str:
        parts: list[str] = []
        at = self.at + 1
        while at < len(self.text) and self.text[at] != '"':
            if self.text[at] == "\\" and self.text[at + 1 : at + 2] in ("\\", '"', "$", "`", "\n"):
                at += 1
                if self.text[at] == "\n":
                    at += 1
                    continue
            parts.append(self.text[at])
            at += 1
        self.at = at + 1
        return "".join(parts)

    def _substitution(self) -> str:
        """Take `$(…)` or a pair of backticks whole: its words are not ours, its value is not known."""
        begin = self.at
        if self.text[begin] == "`":
            end = self.text.find("`", begin + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return f"${self.text[begin : self.at]}"
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == "(") - (char == ")")
            self.at += 1
            if char == ")" and depth <= 0:
                break
        return self.text[begin : self.at]

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""As much of JSON Patch (RFC 6902) as the admission uses: `add`, `replace`, `remove`, applied without harm. Pure.

A patch that the API server cannot apply refuses the user's pod, so every patch is applied here before it leaves.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `value` is not used by `remove`, and is then left out of the JSON."""

    op: Literal["add", "replace", "remove"]
    path: str
    value: Any = msgspec.UNSET


class PatchError(ValueError):
    """The patch does not apply; the text names the operation's path."""


def pointer(*parts: str) -> str:
    """JSON pointer (RFC 6901) of these keys: `~` and `/` escaped. `pointer("a/b", "-")` is `/a~1b/-`."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def applied(document: Any, operations: Sequence[Operation]) -> Any:
    """Return what the document becomes. It is not changed itself; untouched parts are shared. Raises PatchError."""
    for operation in operations:
        if not operation.path.startswith("/"):
            raise PatchError(f"{operation.path!r} names no member")
        keys = [part.replace("~1", "/").replace("~0", "~") for part in operation.path[1:].split("/")]
        document = _changed(document, keys, operation)
    return document


def _changed(document: Any, keys: Sequence[str], operation: Operation) -> Any:
    if isinstance(document, dict):
        return _changed_object(document, keys, operation)
    if isinstance(document, list):
        return _changed_array(document, keys, operation)
    raise PatchError(f"{operation.path}: there is nothing that could have a member")


def _changed_object(document: dict[str, Any], keys: Sequence[str], operation: Operation) -> dict[str, Any]:
    key, *rest = keys
    if key not in document and (rest or operation.op != "add"):
        raise PatchError(f"{operation.path}: {key!r} is not there")
    if rest:
        return {**document, key: _changed(document[key], rest, operation)}
    if operation.op == "remove":
        return {name: value for name, value in document.items() if name != key}
    return {**document, key: operation.value}


def _changed_array(document: list[Any], keys: Sequence[str], operation: Operation) -> list[Any]:
    key, *rest = keys
    adds = operation.op == "add" and not rest
    if key == "-" and adds:
        return [*document, operation.value]
    index = int(key) if key.isascii() and key.isdigit() else len(document) + 1
    if index >= len(document) + (1 if adds else 0):
        raise PatchError(f"{operation.path}: no element {key!r}")
    before, after = document[:index], document[index:]
    if rest:
        return [*before, _changed(after[0], rest, operation), *after[1:]]
    if operation.op == "remove":
        return [*before, *after[1:]]
    return [*before, operation.value, *(after if adds else after[1:])]

# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities as exact integers, so that sums and comparisons come out as the API server's do. Pure."""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Final

Amount = int
"""Billionths of the resource's unit (CPU, byte, piece): the finest that Kubernetes keeps."""
Amounts = Mapping[str, Amount]
"""Resource name -> amount. A name that is absent was not specified, which is not the same as 0."""

UNIT: Final = 10**9

_FORM: Final = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)
_SCALES: Final[Mapping[str, Fraction]] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(10 ** (3 * (power + 1))) for power, suffix in enumerate("kMGTPE")},
    **{suffix + "i": Fraction(2 ** (10 * (power + 1))) for power, suffix in enumerate("KMGTPE")},
}
_MAX_LENGTH: Final = 64


@lru_cache(maxsize=4096)
def _parse_text(text: str) -> Amount | None:
    # Some are a user's free text (`rayStartParams` of a RayCluster), which the API server has not looked at.
    match = _FORM.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    sign, number, exponent, suffix = match.groups()
    value = Fraction(number + "0" if number.endswith(".") else number)
    value *= Fraction(10) ** int(exponent[1:]) if exponent else _SCALES[suffix or ""]
    # Kubernetes rounds up what is finer than a billionth.
    amount = -((-value * UNIT) // 1)
    return -amount if sign == "-" else amount


def parse(value: object) -> Amount | None:
    """Read a quantity such as `64Mi`, `1e3` or a plain number; `"1500m"` is 1.5 * UNIT. None where it is none."""
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value * UNIT
    if isinstance(value, float):
        return _parse_text(repr(value))
    return None


def parse_all(values: object) -> dict[str, Amount]:
    """Read a resource list. Entries that are no quantities are left out; whatever is no mapping is empty."""
    if not isinstance(values, dict):
        return {}
    result: dict[str, Amount] = {}
    for name, value in values.items():
        # Nearly all are text; this is called some hundred times for each pod.
        amount = _parse_text(value) if type(value) is str else parse(value)
        if amount is not None:
            result[name] = amount
    return result


def plus(one: Amounts, other: Amounts) -> dict[str, Amount]:
    """Sum by resource."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def highest(one: Amounts, other: Amounts) -> dict[str, Amount]:
    """Maximum by resource."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def total(lists: Iterable[Amounts]) -> dict[str, Amount]:
    """Sum of any number of resource lists."""
    result: dict[str, Amount] = {}
    for amounts in lists:
        for name, amount in amounts.items():
            result[name] = result.get(name, 0) + amount
    return result


def shown(resource: str, amount: Amount) -> str:
    """Write an amount for a person: `50m` of CPU, `64Mi` of memory, plain numbers otherwise."""
    if resource.rpartition(".")[2] == "cpu":
        return str(amount // UNIT) if amount % UNIT == 0 else f"{amount * 1000 // UNIT}m"
    whole = amount // UNIT
    for power, suffix in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if whole and whole % 2**power == 0:
            return f"{whole >> power}{suffix}"
    return str(whole)

"""Rules of a configuration: the type, the common kinds, and the validation."""

import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, NamedTuple

from diptych.plans.model.layers import layer_numbers

LARGEST = 2**63 - 1
"""Largest accepted integer; products of several are still finite as a float."""


class Rule(NamedTuple):
    """A condition that a configuration must satisfy, with its error message."""

    name: str
    holds: Callable[[Any], bool]
    message: Callable[[Any], str]
    is_single: bool = False
    """True if the rule reads one setting, which it is named after."""


def count(field: str, least: int = 1) -> Rule:
    """Require an integer of at least ``least``, or None if the field's default is None."""

    def holds(config: Any) -> bool:
        value = getattr(config, field)
        if value is None:
            return type(config).__dataclass_fields__[field].default is None
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= LARGEST

    def message(config: Any) -> str:
        value = getattr(config, field)
        is_large = isinstance(value, Integral) and int(value) > LARGEST
        return f"{field}: expected an integer {'< 2**63' if is_large else f'>= {least}'}, got {value!r}"

    return Rule(field, holds, message, True)


def number(field: str, interval: str) -> Rule:
    """Require a finite number inside ``interval``, written as in mathematics: ``[0, 1)``."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def holds(config: Any) -> bool:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if (isinstance(value, int) and abs(value) > LARGEST) or not math.isfinite(value):
            return False
        above = value >= low if interval[0] == "[" else value > low
        return above and (value <= high if interval[-1] == "]" else value < high)

    return Rule(field, holds, lambda c: f"{field}: expected a number in {interval}, got {getattr(c, field)!r}", True)


def flag(field: str) -> Rule:
    """Require a bool."""
    return Rule(
        field,
        lambda c: isinstance(getattr(c, field), bool),
        lambda c: f"{field}: expected True or False, got {getattr(c, field)!r}",
        True,
    )


def choice(field: str, allowed: tuple[str | None, ...]) -> Rule:
    """Require one of the values in ``allowed``."""
    return Rule(
        field,
        lambda c: getattr(c, field) in allowed,
        lambda c: f"{field}: expected one of {allowed}, got {getattr(c, field)!r}",
        True,
    )


def names_layers(field: str, of: str, read: Callable[[str, str], Iterable[int]] = layer_numbers) -> Rule:
    """Require numbers of layers of the model, as in ``0-3,7``, or None; only None is accepted if ``of`` is not used.

    Args:
        field: the setting that names layers.
        of: the setting that ``field`` limits to these layers.
        read: ``read(text, field)`` returns the layers of a text, or raises a ValueError.
    """
    return Rule(field, lambda c: not _layers_fault(c, field, of, read), lambda c: _layers_fault(c, field, of, read))


def _layers_fault(config: Any, field: str, of: str, read: Callable[[str, str], Iterable[int]]) -> str:
    """Return what is wrong with a setting that names layers, or the empty string."""
    text = getattr(config, field)
    if text is None:
        return ""
    if not getattr(config, of):
        return f"{field}: expected None without {of}, got {text!r}"
    try:
        largest = max(read(str(text), field))
    except ValueError as error:
        return str(error)
    limit = f"{field}: expected layers below num_layers={config.num_layers}, got {text!r}"
    return "" if largest < config.num_layers else limit


def validate(config: Any, rules: tuple[Rule, ...]) -> None:
    """Check every rule, in order.

    Raises:
        ValueError: the configuration breaks a rule; the message of the first one names the setting, the expected and
            the given value, and the remedy where it is not obvious.
    """
    for rule in rules:
        if not rule.holds(config):
            raise ValueError(rule.message(config))


def check_at_least(least: int, **values: float | None) -> None:
    """Reject values, given by name, that are below ``least``; None is accepted."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")

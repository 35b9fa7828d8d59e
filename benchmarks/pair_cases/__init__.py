"""Pairs of PyTorch and JAX from PyPI, each with the settings under which it is compared and the expected verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from parity import Report

EQUAL = "equal"
DIFFERENT = "different"
SHAPES = "shapes differ"
DTYPES = ("float64", "float32", "bfloat16")


class Case(NamedTuple):
    """Settings under which a pair is compared, and the verdict that the page states."""

    settings: str
    """The settings as a reader writes them; "defaults" if there are none."""
    verdict: str
    """EQUAL, DIFFERENT or SHAPES."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """The same settings as arguments of the function that compares."""
    dtypes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Pair:
    """Two implementations that users expect to be equal."""

    torch: str
    """Name in PyTorch, below torch.nn, torch.nn.functional or torch."""
    jax: str
    """Name in flax, optax or jax."""
    why: str
    """Reason of the difference in a few words; empty if there is none."""
    compare: Callable[..., Report]
    """The function that compares both; it receives a case's dtypes and arguments."""
    cases: tuple[Case, ...] = field(default=())


PAIRS: list[Pair] = []
"""All pairs in the order of the page."""


def pair(torch: str, jax: str, why: str, *cases: tuple) -> Callable[[Callable[..., Report]], Callable]:
    """Return a decorator that adds a pair, whose comparison is the decorated function.

    Args:
        torch: see Pair.
        jax: see Pair.
        why: see Pair.
        cases: the arguments of each Case.
    """

    def register(compare: Callable[..., Report]) -> Callable[..., Report]:
        PAIRS.append(Pair(torch, jax, why, compare, tuple(Case(*case) for case in cases)))
        return compare

    return register

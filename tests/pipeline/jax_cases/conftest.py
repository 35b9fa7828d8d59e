"""How the cases of this folder are compiled."""

import pytest

from jax_impl import ops


@pytest.fixture(autouse=True)
def few_rounds_of_each_case(monkeypatch):
    """Three rounds of random numbers, not ten: masks still depend on everything, and take most of the compiling."""
    monkeypatch.setattr(ops, "ROUNDS", 3)

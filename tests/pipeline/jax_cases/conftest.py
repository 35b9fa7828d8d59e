"""How the cases of this folder are compiled."""

import jax
import pytest

from jax_impl import ops


@pytest.fixture(autouse=True)
def compiled_fast_rather_than_well(monkeypatch):
    """Three rounds of random numbers, not ten: masks still depend on everything, and take most of the compiling."""
    monkeypatch.setattr(ops, "ROUNDS", 3)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compiled_well(compiled_fast_rather_than_well):
    """Where operations are counted."""
    jax.config.update("jax_disable_most_optimizations", False)

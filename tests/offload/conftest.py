"""How programs of JAX's offload are compiled."""

import pytest

from jax_impl import ops
from tests.backends import _Unoptimised


@pytest.fixture
def quick(monkeypatch):
    """Random numbers of fewer rounds, and programs compiled fast rather than well: here it is the order that counts."""
    monkeypatch.setattr(ops, "ROUNDS", 3)
    with _Unoptimised():
        yield

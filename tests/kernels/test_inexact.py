"""Error budgets of kernels hold where single operations are as inexact as on a GPU."""

import pytest

from tests.kernels.inexact import UNITS, inexact
from tests.kernels.support import CASES, assert_within_budget, inputs_of
from tests.kernels.test_delta_rule import RULES, drawn_arrays, within_budget

pytestmark = pytest.mark.slow
SIZES = [((1, 5), 4, 33), ((3, 1), 5, 20), ((2, 3), 8, 64), ((1, 1), 1, 5)]
"""Tokens, streams and channels."""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_streams_and_activations(name, size):
    with inexact() as changed:
        for dtype in ("float32", "bfloat16"):
            assert_within_budget(CASES[name], inputs_of(CASES[name], *size, seed=3), dtype)
    assert changed or "aggregate" in name or "apply" in name or "write" in name, "nothing was inexact"
    assert changed["create_dot"] or name not in ("compute_mappings", "read_streams"), "no product was inexact"


def test_larger_errors_are_seen(monkeypatch):
    """Of a thousand times as many units."""
    for name, units in UNITS.items():
        monkeypatch.setitem(UNITS, name, 1000 * units)
    for name in ("sinkhorn", "swiglu", "compute_mappings"):
        with inexact(), pytest.raises(AssertionError, match=r"array \d: .* > "):
            assert_within_budget(CASES[name], inputs_of(CASES[name], *SIZES[0], seed=3), "float32")


@pytest.mark.parametrize("decay", [0.02, 1.0, 50.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 21])
def test_kernels_of_the_delta_rule(rule, dtype, decay, tokens):
    if dtype == "bfloat16" and tokens == 1:
        pytest.skip("a norm of few numbers is at the mercy of single roundings")
    with inexact() as changed:
        within_budget(rule, *drawn_arrays(rule, 3, 1, tokens, 1, 2, 7, 9, 1, decay), dtype, chunk_size=16)
    assert changed["create_exp2"], "nothing was inexact"
    assert changed["create_dot"] or dtype != "float32", "no product was inexact"

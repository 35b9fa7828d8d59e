"""Every technique in every transformation of JAX; test_support_matrix.py runs this in a process with four devices."""

import re

import jax
import numpy as np
import pytest
from jax.extend.core import Var

from tests.everywhere.support_matrix_jax import (
    LIMIT,
    REFUSED,
    SURROUNDINGS,
    TECHNIQUES,
    batch,
    difference,
    function_of,
    model_with,
    run,
)

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)


@pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_cell(technique, surroundings):
    outcome = run(technique, surroundings)
    if (technique, surroundings) in REFUSED:
        assert re.match(REFUSED[technique, surroundings], outcome, re.DOTALL), outcome
    else:
        assert re.fullmatch(r"\d+e[+-]\d\d", outcome), outcome
        assert float(outcome) <= LIMIT


def saved(technique, surroundings):
    """Arrays that a model saves for backward, without its parameters and inputs: bytes, and bytes in host memory."""
    apply, params = function_of(model_with(technique, surroundings, has_rule=False))
    program = jax.make_jaxpr(lambda params, x: jax.vjp(apply, params, x)[1])(params, batch(2)).jaxpr
    given = {id(variable) for variable in program.invars}
    arrays = {id(v): v.aval for v in program.outvars if isinstance(v, Var) and id(v) not in given}
    sizes = [(x.size * x.dtype.itemsize, x.memory_space == jax.memory.Space.Host) for x in arrays.values()]
    return sum(size for size, _ in sizes), sum(size for size, is_on_host in sizes if is_on_host)


@pytest.mark.parametrize("surroundings", ["jit", "scan over layers", "remat inside"])
def test_techniques_are_active_in_each_model(surroundings):
    plain, on_host = saved("", surroundings)
    assert on_host == 0
    recomputed, _ = saved("recompute_modules", surroundings)
    assert recomputed < plain
    _, on_host = saved("offload_modules", surroundings)
    assert on_host > plain / 2


def test_a_wrong_gradient_is_seen():
    expected = {"weight": np.ones(3), "bias": np.zeros(2)}
    found = {**expected, "weight": np.array([1.0, 1.0, 1.001])}
    assert difference(found, expected) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(AssertionError, match="no gradient for"):
        difference({"weight": expected["weight"]}, expected)

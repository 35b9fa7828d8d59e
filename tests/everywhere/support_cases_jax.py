"""Every technique in every transformation of JAX; test_support_matrix.py runs this in a process with four devices."""

import re

import jax
import numpy as np
import pytest

from tests.everywhere.support_matrix_jax import LIMIT, REFUSED, SURROUNDINGS, TECHNIQUES, difference, run

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


def test_a_wrong_gradient_is_seen():
    expected = {"weight": np.ones(3), "bias": np.zeros(2)}
    found = {**expected, "weight": np.array([1.0, 1.0, 1.001])}
    assert difference(found, expected) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(AssertionError, match="no gradient for"):
        difference({"weight": expected["weight"]}, expected)

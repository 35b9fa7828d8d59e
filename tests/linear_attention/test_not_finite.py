"""Numbers that are not finite: they reach the same outputs and states in chunks as a token at a time."""

import jax
import numpy as np
import pytest
import torch

from tests.backends import BACKENDS, backend_module
from tests.linear_attention.support import RULES, make_case

LENGTH, OFFSETS = 150, [0, 37, 38, 38, 150]
NAMES = ("q", "k", "v", "g", "beta")


def outputs(backend: str, form: str, rule: str, arrays: dict, **more) -> tuple[np.ndarray, np.ndarray]:
    function = getattr(backend_module(backend, "delta_rule"), f"{form}_{rule}")
    if backend == "torch":
        o, states = function(**{n: torch.from_numpy(x) for n, x in arrays.items()}, output_final_state=True, **more)
        return o.numpy(), states.numpy()
    key = (form, rule, *more.items())
    if key not in COMPILED:
        COMPILED[key] = jax.jit(lambda arrays: function(**arrays, output_final_state=True, **more))
    o, states = COMPILED[key](arrays)
    return np.asarray(o), np.asarray(states)


COMPILED = {}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_no_output_depends_on_later_numbers_that_are_not_finite(backend, rule, keep):
    """One element of one head's token; in both forms the same outputs and final states are not finite."""
    case = make_case(rule, length=LENGTH, heads=2, offsets=OFFSETS, dtype=np.float32)
    options = {"chunk_size": 64, "disable_recompute": keep}
    clean, clean_states = outputs(backend, "chunk", rule, case.arrays, **options)
    for name in NAMES:
        for token, value in ((100, np.nan), (101, np.inf), (37, -np.inf), (149, np.nan), (63, np.nan)):
            if (name == "g" and value != value) or name != "g":
                arrays = {n: x.copy() for n, x in case.arrays.items()}
                arrays[name][(0, token, 1, *[1] * (arrays[name].ndim - 3))] = value
                o, states = outputs(backend, "chunk", rule, arrays, **options)
                wanted, wanted_states = outputs("torch", "recurrent", rule, arrays)
                assert (o[:, :token] == clean[:, :token]).all(), (name, token)
                assert (o[:, :, 0] == clean[:, :, 0]).all(), "the other head"
                np.testing.assert_array_equal(np.isfinite(o), np.isfinite(wanted), err_msg=f"{name} {token}")
                np.testing.assert_array_equal(np.isfinite(states), np.isfinite(wanted_states))
                assert not (np.isfinite(o) & (o != clean)).any() or name == "q", (name, token)
                assert not np.isfinite(o).all()
    assert np.isfinite(clean_states).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_decay_of_minus_infinity_forgets(backend, rule):
    case = make_case(rule, length=LENGTH, heads=2, offsets=OFFSETS, dtype=np.float64)
    case.arrays["g"][0, [5, 70, 100]] = -np.inf
    found = outputs(backend, "chunk", rule, case.arrays, chunk_size=64)
    for ours, theirs in zip(found, outputs("torch", "recurrent", rule, case.arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)

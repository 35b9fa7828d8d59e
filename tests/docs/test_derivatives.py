"""What docs/linear_attention.md says about derivatives of the chunked delta rule: which exist in which backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_impl import delta_rule as in_jax
from reference_torch import delta_rule as in_torch


def arrays(rule: str) -> list[np.ndarray]:
    """Return the arguments of a call: q, k, v, g and beta of 8 tokens."""
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(3, 1, 8, 1, 4))
    g = -rng.random((1, 8, 1, 4) if rule == "kda" else (1, 8, 1))
    return [q, k, v, g, rng.random((1, 8, 1))]


def jax_rules(rule: str):
    """Return the recurrence and the chunked form."""
    names = (
        ("recurrent_kda", "chunk_kda") if rule == "kda" else ("recurrent_gated_delta_rule", "chunk_gated_delta_rule")
    )
    return [getattr(in_jax, name) for name in names]


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_jax_has_second_derivatives_of_chunked_forms(rule):
    with jax.enable_x64(True):
        given = [jnp.array(x) for x in arrays(rule)]

        def penalty(q, function):
            gradient = jax.grad(lambda x: (function(x, *given[1:])[0] ** 2).sum())(q)
            return (gradient**2).sum()

        expected, found = (np.asarray(jax.grad(penalty)(given[0], function)) for function in jax_rules(rule))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_jax_has_no_forward_mode_of_chunked_forms(rule):
    given = [jnp.array(x, jnp.float32) for x in arrays(rule)]
    recurrent, chunked = jax_rules(rule)
    jax.jvp(lambda q: recurrent(q, *given[1:])[0], given[:1], given[:1])
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: chunked(q, *given[1:])[0], given[:1], given[:1])


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule"])
def test_pytorch_refuses_second_derivatives_of_chunked_forms(name):
    given = [torch.from_numpy(x).requires_grad_() for x in arrays("kda" if name == "chunk_kda" else "gdn")]
    output = getattr(in_torch, name)(*given)[0]
    with pytest.raises(RuntimeError, match="expected to be differentiated once, got create_graph=True"):
        torch.autograd.grad(output.square().sum(), given[:1], create_graph=True)

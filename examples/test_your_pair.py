"""Test a pair of your own with pytest and hypothesis: 5 seconds on 2 CPU cores.

pytest examples/test_your_pair.py
"""

import jax.numpy as jnp
from hypothesis import given, settings

from parity.testing import assert_equivalent, normal, shapes


def torch_rms_norm(x):
    """Return x divided by the root mean square of its last axis."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def jax_rms_norm(x):
    """Return x divided by the root mean square of its last axis."""
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


@settings(max_examples=20, deadline=None)
@given(shapes(rank=2, block=16))
def test_rms_norm(shape):
    """Check that outputs and gradients are equal up to rounding, also for sizes around a block size."""
    assert_equivalent(torch_rms_norm, jax_rms_norm, [normal(shape)])

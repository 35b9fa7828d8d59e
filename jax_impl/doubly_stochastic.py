"""Doubly stochastic matrices by Sinkhorn's alternate normalisation of rows and columns, with a backward of its own.

Backward of a normalisation m = x / sum(x) is dx = (dm - sum(dm m)) / sum(x). Multiplied by x, this is

    x dx = m dm - m sum(m dm)

so backward carries the product of each matrix and its gradient, and divides by no sum.

Mirrors ``reference_torch/doubly_stochastic.py``. Iterations are a scan, so that the program does not grow with them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model import operations
from diptych.plans.model.parameters import SINKHORN_FLOOR
from jax_impl.operands import at_least_float32, operand
from jax_impl.ops import kernel_backend


def sinkhorn(
    logits: Float[Array, "*b s s"],
    iterations: int = 20,
    last: str = "row",
    impl: str = "auto",
    mhc_epsilon: float = 0.0,
) -> Float[Array, "*b s s"]:
    """Return doubly stochastic matrices: exp(logits), normalised along rows and columns in turn.

    Only the logits are saved for backward, which recomputes the iterates and differentiates each normalisation.

    Args:
        logits: computed in float32 if their type is narrower. [..., S, S]
        iterations: pairs of normalisations, >= 1.
        last: ``"row"`` (as in the paper: columns first, row sums are exact) or ``"column"``.
        impl: see diptych.plans.model.implementation.
        mhc_epsilon: added to the first normalisation, and to the sums of the others.

    Returns:
        Matrices in the type of logits. [..., S, S]

    Raises:
        ValueError: an argument has a wrong shape, type or value.

    Reference: mHC, eq. 9. The first normalisation is a softmax with a floor of 1e-30; entries below the floor are
    constants. With the floor no later sum is 0, so no epsilon is needed and the last normalisation is exact. With an
    epsilon there is no floor, and the sums are only nearly 1 (DeepSeek-V4: 1e-6).
    """
    operations.check_iterations(iterations, last)
    operations.check_epsilon(mhc_epsilon, "mhc_epsilon")
    operations.check_matrices(operand("logits", logits))
    if kernels := kernel_backend(impl, logits):
        return kernels.sinkhorn(logits, iterations, last, mhc_epsilon)
    tokens_innermost = jnp.moveaxis(at_least_float32(logits), (-2, -1), (0, 1))
    first_axis = 0 if last == "row" else 1  # a sum over axis 0, the row index, normalises columns
    matrices: Array = _sinkhorn(tokens_innermost, iterations, first_axis, mhc_epsilon)
    return jnp.moveaxis(matrices, (0, 1), (-2, -1)).astype(logits.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _sinkhorn(logits: Array, iterations: int, first_axis: int, epsilon: float) -> Array:  # [S, S, ...]
    """Run Sinkhorn on logits [S, S, ...], whose backward recomputes the iterates."""
    matrix = _first_matrix(jax.nn.softmax(logits, axis=first_axis), epsilon)
    matrix, _ = jax.lax.scan(partial(_normalise_twice, first_axis, epsilon), matrix, length=iterations - 1)
    return matrix / (matrix.sum(1 - first_axis, keepdims=True) + epsilon)


def _sinkhorn_forward(logits: Array, iterations: int, first_axis: int, epsilon: float) -> tuple[Array, Array]:
    """Run Sinkhorn, and save only the logits."""
    return _sinkhorn(logits, iterations, first_axis, epsilon), logits


def _sinkhorn_backward(iterations: int, first_axis: int, epsilon: float, logits: Array, grad: Array) -> tuple[Array]:
    """Recompute the iterates, and differentiate each normalisation."""
    softmax = jax.nn.softmax(logits, axis=first_axis)
    normalise_twice = partial(_normalise_twice, first_axis, epsilon)

    def twice(matrix: Array, _: None) -> tuple[Array, Array]:
        return normalise_twice(matrix, None)[0], matrix

    first_matrix = _first_matrix(softmax, epsilon)
    matrix, iterates = jax.lax.scan(twice, first_matrix, length=iterations - 1)
    last = matrix / (matrix.sum(1 - first_axis, keepdims=True) + epsilon)
    weighted = _normalise_backward(grad * last, last, 1 - first_axis)

    def twice_backward(weighted: Array, iterate: Array) -> tuple[Array, None]:
        first, other = normalise_twice(iterate, None)
        return _normalise_backward(_normalise_backward(weighted, first, first_axis), other, 1 - first_axis), None

    weighted, _ = jax.lax.scan(twice_backward, weighted, iterates, reverse=True)
    if epsilon:
        weighted = weighted / first_matrix * softmax
    else:
        softmax = first_matrix
        weighted = jnp.where(softmax > SINKHORN_FLOOR, weighted, 0.0)
    return (_normalise_backward(weighted, softmax, first_axis),)


_sinkhorn.defvjp(_sinkhorn_forward, _sinkhorn_backward)


def _first_matrix(softmax: Array, epsilon: float) -> Array:
    """Return the first normalisation: a softmax with an epsilon, or with a floor if it is 0."""
    return softmax + epsilon if epsilon else jnp.maximum(softmax, SINKHORN_FLOOR)


def _normalise_twice(first_axis: int, epsilon: float, matrix: Array, _: None) -> tuple[Array, Array]:
    """Normalise over the other axis, then over the first; return the last result and the one before."""
    other = matrix / (matrix.sum(1 - first_axis, keepdims=True) + epsilon)
    return other / (other.sum(first_axis, keepdims=True) + epsilon), other


def _normalise_backward(weighted: Array, normalised: Array, axis: int) -> Array:
    """Return x dx of x -> normalised = x / sum(x, axis), given weighted = normalised d(normalised)."""
    return weighted - weighted.sum(axis, keepdims=True) * normalised

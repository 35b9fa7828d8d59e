"""Doubly stochastic matrices by Sinkhorn's alternate normalisation of rows and columns, with a backward of its own.

Backward of a normalisation m = x / sum(x) is dx = (dm - sum(dm m)) / sum(x). Multiplied by x, this is

    x dx = m dm - m sum(m dm)

so backward carries the product of each matrix and its gradient, and divides by no sum.

The token axis is the innermost one, which makes each of the 2 * iterations normalisations one vectorised pass.
"""

from collections import deque

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.model import operations
from diptych.plans.model.parameters import SINKHORN_FLOOR
from reference_torch.autograd import as_one_operation
from reference_torch.operands import at_least_float32, operand
from reference_torch.ops import kernel_backend


@as_one_operation
def sinkhorn(
    logits: Float[Tensor, "*b s s"],
    iterations: int = 20,
    last: str = "row",
    impl: str = "auto",
    mhc_epsilon: float = 0.0,
) -> Float[Tensor, "*b s s"]:
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
    tokens_innermost = at_least_float32(logits).movedim((-2, -1), (0, 1))
    first_axis = 0 if last == "row" else 1  # a sum over axis 0, the row index, normalises columns
    matrices = _Sinkhorn.apply(tokens_innermost, iterations, first_axis, mhc_epsilon)
    return matrices.movedim((0, 1), (-2, -1)).to(logits.dtype)


class _Sinkhorn(torch.autograd.Function):
    """Sinkhorn on logits [S, S, ...], which saves only the logits; backward recomputes the iterates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits, iterations, first_axis, epsilon):  # [S, S, ...]
        return deque(_iterates(logits, iterations, first_axis, epsilon), maxlen=1).pop()

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, ctx.iterations, ctx.first_axis, ctx.epsilon = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits,) = ctx.saved_tensors
        iterates = list(_iterates(logits, ctx.iterations, ctx.first_axis, ctx.epsilon))
        axis = 1 - ctx.first_axis
        # Otherwise results take the layout of grad, in which sums over four elements are slow.
        weighted = grad.contiguous() * iterates[-1]
        for matrix in reversed(iterates[1:]):
            weighted = torch.addcmul(weighted, weighted.sum(axis, keepdim=True), matrix, value=-1)
            axis = 1 - axis
        softmax = iterates[0]
        if ctx.epsilon:
            softmax = logits.softmax(axis)
            weighted = weighted / iterates[0] * softmax
        else:
            weighted = weighted.where(softmax > SINKHORN_FLOOR, 0.0)
        return torch.addcmul(weighted, weighted.sum(axis, keepdim=True), softmax, value=-1), None, None, None


def _iterates(logits: Tensor, iterations: int, first_axis: int, epsilon: float):
    """Yield each normalised matrix, the softmax first."""
    axis = first_axis
    softmax = logits.softmax(axis)
    matrix = softmax + epsilon if epsilon else softmax.clamp(min=SINKHORN_FLOOR)
    yield matrix
    for _ in range(2 * iterations - 1):
        axis = 1 - axis
        total = matrix.sum(axis, keepdim=True)
        total = total + epsilon if epsilon else total
        matrix = matrix / total
        yield matrix

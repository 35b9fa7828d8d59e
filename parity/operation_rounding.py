"""Emulation of the rounding of every operation of PyTorch, in a run in float64.

Changes of the inputs do not show all rounding errors. The gradient of a sum of terms that cancel is an example: changed
inputs give other terms, which cancel too, but rounding errors of the terms do not. Here the result of each operation is
changed at random by the unit roundoff of a dtype, forward and backward. Operations of JAX are not emulated: an
implementation in JAX whose rounding errors are three times larger than these is reported as different.

Reference: Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997).
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_EXACT = frozenset(
    f"aten::{name}"
    for name in [
        "arange",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy",
        "embedding",
        "empty",
        "full",
        "gather",
        "index",
        "index_select",
        "lift_fresh",
        "masked_fill",
        "neg",
        "new_zeros",
        "ones",
        "ones_like",
        "relu",
        "scatter",
        "select_backward",
        "slice_backward",
        "stack",
        "where",
        "zeros",
        "zeros_like",
        "_to_copy",
    ]
)
"""Operations that only move elements, or create constants."""


class OperationRounding(TorchDispatchMode):
    """A mode in which the floating results of operations are changed by a factor of 1 + u or 1 - u, u = epsilon / 2.

    Args:
        epsilon: machine epsilon of the dtype to emulate.
        seed: seed of the changes.
    """

    def __init__(self, epsilon: float, seed: int) -> None:
        super().__init__()
        self._half = epsilon / 2.0
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and change its results, unless they are views or in an argument, or exact."""
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name in _EXACT or any(returned.alias_info is not None for returned in schema.returns):
            return result
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=self._generator)
                tensor.mul_((1.0 + self._half * (2.0 * signs - 1.0)).to(tensor.device, tensor.dtype))
        return result

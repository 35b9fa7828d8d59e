"""Bytes and errors of the kernels of hyper-connections, for notebook 03."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference_torch.hyper_connections as torch_hc
from diptych_kernels import aot, launch_configs, torch_backend, tuning
from jax_impl import ops as jax_ops
from parity.compare import relative_difference
from parity.notebooks.hyper_connections import complex_step_gradient, final_matrix_gradient, normal
from reference_torch import ops as torch_ops

STREAMS = 4
DTYPES = ("float32", "float16", "bfloat16")
ROUNDOFF = {dtype: torch.finfo(getattr(torch, dtype)).eps / 2 for dtype in DTYPES}
"""Unit roundoff, by dtype."""


class Traffic(TorchDispatchMode):
    """Bytes of the arrays that operations read and write; an operation that makes no new array is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = (
            {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in tree_leaves(part)
                if torch.is_tensor(x)
            }
            for part in ((args, kwargs), result)
        )
        made = written.keys() - read.keys()
        self.bytes += (sum(read.values()) + sum(written[address] for address in made)) if made else 0
        return result


def eager_bytes(function: Callable[..., Tensor], tokens: int, width: int) -> tuple[float, float]:
    """Return the bytes per token that PyTorch's operations move in forward and in backward, in bfloat16."""
    x = torch.ones(1, tokens, STREAMS, width, dtype=torch.bfloat16, requires_grad=True)
    h_pre = torch.ones(1, tokens, STREAMS, requires_grad=True)
    with Traffic() as forward:
        y = function(x, h_pre)
    cotangent = torch.ones_like(y)
    with Traffic() as backward:
        torch.autograd.grad(y, (x, h_pre), cotangent)
    return forward.bytes / tokens, backward.bytes / tokens


def kernel_bytes(tokens: int, width: int) -> tuple[float, ...]:
    """Return the bytes per token of the inputs and outputs of both kernels, in bfloat16."""
    x = ((tokens, STREAMS, width), "bfloat16")
    h_pre = ((tokens, STREAMS), "float32")
    inputs = {
        launch_configs.aggregate_forward: [x, h_pre],
        launch_configs.aggregate_backward: [x, h_pre, ((tokens, width), "bfloat16")],
    }
    found = []
    for build, arrays in inputs.items():
        launch = build(tuning.first(build), lead=(tokens,), streams=STREAMS, width=width, dtype="bfloat16")
        sizes = [np.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in (*arrays, *launch.outputs)]
        found.append(float(sum(sizes)) / tokens)
    return tuple(found)


def least_bytes(width: int) -> tuple[float, float]:
    """Return the least bytes per token of forward and backward, by the formulas."""
    sizes = STREAMS * width
    return 2.0 * (sizes + width) + 4 * STREAMS, 2.0 * (2 * sizes + width) + 8 * STREAMS


def product_then_sum(x: Tensor, h_pre: Tensor) -> Tensor:
    """Aggregate in two operations."""
    return (h_pre.to(x.dtype)[..., None] * x).sum(-2)


def batched_product(x: Tensor, h_pre: Tensor) -> Tensor:
    """Aggregate by the batched matrix product of the PyTorch backend."""
    return torch_hc.aggregate(x, h_pre, impl="reference")


def aggregate_of(module: ModuleType, **options: Any) -> Callable[..., Any]:
    """Return aggregate of a module of either backend, with h_pre in at least float32."""
    ops = jax_ops if "jax" in module.__name__ else torch_ops
    return lambda x, h_pre: module.aggregate(x, ops.at_least_float32(h_pre), **options)


def aggregate_inputs(tokens: int, width: int) -> dict[str, np.ndarray]:
    """Return streams x [1, T, S, D] and coefficients h_pre [1, T, S], in float32."""
    h_pre = np.random.default_rng(1).uniform(0, 1, (1, tokens, STREAMS))
    return {"x": normal(0, 1, tokens, STREAMS, width).astype(np.float32), "h_pre": h_pre.astype(np.float32)}


def _evaluate(
    function: Callable[..., Any], inputs: Sequence[Tensor], dtype: str, with_gradients: bool
) -> list[np.ndarray]:
    """Return outputs, and gradients under a random cotangent that is exact in a dtype."""
    inputs = [x.clone().requires_grad_(with_gradients) for x in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if not with_gradients:
        return [a.numpy() for a in outputs]
    drawn = [torch.tensor(normal(9 + place, *y.shape)).to(getattr(torch, dtype)) for place, y in enumerate(outputs)]
    cotangents = [cotangent.to(y.dtype) for cotangent, y in zip(drawn, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, inputs, cotangents)
    return [a.detach().double().numpy() for a in (*outputs, *gradients)]


def _errors(
    kernel: Callable, eager: Callable, inputs: Sequence[Tensor], dtype: str, with_gradients: bool = True
) -> dict[str, list[float]]:
    """Return the errors of all outputs and gradients of a kernel and of PyTorch's operations beside float64."""
    exact = _evaluate(eager, [x.double() for x in inputs], dtype, with_gradients)
    return {
        f"{name}, {dtype}": [
            relative_difference(ours, theirs)
            for ours, theirs in zip(_evaluate(function, inputs, dtype, with_gradients), exact, strict=True)
        ]
        for name, function in (("kernel", kernel), ("PyTorch", eager))
    }


def _streams(seed: int, tokens: int, width: int, dtype: str) -> Tensor:
    return torch.tensor(normal(seed, 1, tokens, STREAMS, width)).to(getattr(torch, dtype))


def _aggregate_errors(width: int, dtype: str) -> dict[str, list[float]]:
    h_pre = torch.tensor(np.random.default_rng(4).uniform(0, 1, (1, 16, STREAMS))).float()
    return _errors(torch_backend.aggregate, batched_product, [_streams(3, 16, width, dtype), h_pre], dtype)


def _mappings_errors(tokens: int, width: int, dtype: str, with_gradients: bool) -> dict[str, list[float]]:
    columns = STREAMS * (STREAMS + 2)
    x = _streams(5, tokens, width, dtype)
    phi = torch.tensor(normal(6, STREAMS * width, columns) / (STREAMS * width) ** 0.5).to(x.dtype).float()
    return _errors(
        lambda *a: torch_backend.compute_mappings(*a, iterations=5),
        lambda *a: torch_hc.compute_mappings(*a, iterations=5, impl="reference"),
        [x, phi, torch.ones(3), torch.tensor(normal(7, columns)).float()],
        dtype,
        with_gradients,
    )


VALUES: Mapping[str, tuple[int, Callable[[int, str], dict[str, list[float]]]]] = {
    "aggregated": (0, _aggregate_errors),
    "dh_pre": (2, _aggregate_errors),
    "h_res": (2, lambda width, dtype: _mappings_errors(32, width, dtype, False)),
    "dphi": (4, lambda tokens, dtype: _mappings_errors(tokens, 16, dtype, True)),
}
"""Place among outputs and gradients, and the function of a size and a dtype that returns all errors, by value."""


def value_errors(name: str, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the errors of one of VALUES for sizes, by "kernel, <dtype>" and "PyTorch, <dtype>"."""
    place, errors_of = VALUES[name]
    curves: dict[str, list[float]] = {}
    for dtype in DTYPES:
        for size in sizes:
            for label, errors in errors_of(size, dtype).items():
                curves.setdefault(label, []).append(errors[place])
    return curves


def sinkhorn_errors(stds: Sequence[float]) -> dict[str, list[float]]:
    """Return the errors of the gradient of Sinkhorn with 20 iterations, for standard deviations of the logits."""
    unit_logits, cotangent = (normal(seed, 64, STREAMS, STREAMS) for seed in (10, 11))

    def kernel(logits: np.ndarray, dtype: str) -> np.ndarray:
        x = torch.from_numpy(logits.astype(dtype)).requires_grad_()
        y = torch_backend.sinkhorn(x)
        return torch.autograd.grad(y, x, torch.from_numpy(cotangent.astype(dtype)))[0].numpy()

    curves: dict[str, list[float]] = {}
    for std in stds:
        logits = (std * unit_logits).astype(np.float32).astype(np.float64)
        exact = complex_step_gradient(logits, cotangent, 20, "row")
        gradients = {
            "kernel, float64": kernel(logits, "float64"),
            "kernel, float32": kernel(logits, "float32"),
            "failing: final matrix only": final_matrix_gradient(logits, cotangent, 20, "row"),
        }
        for label, gradient in gradients.items():
            curves.setdefault(label, []).append(relative_difference(gradient, exact))
    return curves


def count_instructions(launch: Any) -> dict[str, int]:
    """Return the numbers of loads, stores, multiply-adds and conversions of a launch that is compiled for sm_90."""
    ptx = aot.compile_ahead(launch, 90).asm["ptx"]
    pattern = r"^\s*(?:@%p\d+ )?((?:ld\.global|st\.global|fma|cvt)\S*)"
    return dict(Counter(re.findall(pattern, ptx, re.MULTILINE)))

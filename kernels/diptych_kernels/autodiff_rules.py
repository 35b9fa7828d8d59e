"""Forward and backward rules of every operation in terms of launches, shared by all backends.

A backend (torch_backend, jax_backend, aot) is a function ``backend(launch_function, sizes, *inputs) -> outputs`` with
a method ``cast(x, dtype)``. Rules touch arrays only through it, through ``shape`` and ``dtype`` and through slices,
which PyTorch and JAX both have.

    forward(backend, static, *inputs)            -> outputs, saved        saved for backward, including inputs
    backward(backend, static, saved, *gradients) -> gradient of every input, None if it has none
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from diptych_kernels import launch_configs as launch
from diptych_kernels.launch_configs import Launch, Write, wide

Array = Any


class Backend(Protocol):
    """A framework's way to launch kernels."""

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Array) -> tuple[Array, ...]:
        """Launch the kernel ``build(block, **sizes)`` describes."""
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """Cast x to another type."""
        ...


class Operation(NamedTuple):
    """A differentiable function whose forward and backward consist of kernels."""

    forward: Callable[..., tuple[tuple[Array, ...], tuple[Array, ...]]]
    backward: Callable[..., tuple[Array, ...]]


def dtype_name(x: Array) -> str:
    """Return the numpy name of x's type, e.g. ``bfloat16``."""
    return str(x.dtype).removeprefix("torch.")


def column_sum(backend: Backend, x: Array, rows: int, width: int) -> Array:
    """Sum over rows to [width] in float32 or float64, in two steps if there are many rows.

    Narrow types always take both steps, so that the compiled kernels do not depend on the number of rows.
    """
    dtype = dtype_name(x)
    groups = min(math.ceil(rows / 256), 64)
    if dtype != wide(dtype):
        groups = max(groups, 2)
    for parts in [groups, 1] if groups > 1 else [1]:
        (x,) = backend(launch.column_sum, dict(rows=rows, groups=parts, width=width, dtype=dtype_name(x)), x)
        rows = parts
    return x.reshape(width)


class Sinkhorn(NamedTuple):
    """Static arguments of compute_mappings and sinkhorn."""

    iterations: int
    last: str
    epsilon: float = 0.0


def _sinkhorn_forward(backend: Backend, static: Sinkhorn, logits: Array):
    return backend(launch.sinkhorn_forward, _sinkhorn_sizes(static, logits), logits), (logits,)


def _sinkhorn_backward(backend: Backend, static: Sinkhorn, saved: tuple, grad: Array):
    (logits,) = saved
    return backend(launch.sinkhorn_backward, _sinkhorn_sizes(static, logits), logits, grad)


def _sinkhorn_sizes(static: Sinkhorn, logits: Array) -> dict[str, Any]:
    *lead, streams, _ = logits.shape
    return dict(
        lead=tuple(lead),
        streams=streams,
        dtype=dtype_name(logits),
        iterations=static.iterations,
        last=static.last,
    )


def _mappings_forward(backend: Backend, static: Sinkhorn, x: Array, phi: Array, alpha: Array, bias: Array):
    sizes = _stream_sizes(x)
    narrow = backend.cast(phi, sizes["dtype"])
    projected, r = backend(launch.project_forward, {**sizes, "epsilon": static.epsilon}, x, narrow)
    outputs = backend(launch.mappings_forward, _mappings_sizes(static, x), projected, r, alpha, bias)
    return outputs, (x, phi, alpha, bias, projected, r)


def _mappings_backward(backend: Backend, static: Sinkhorn, saved: tuple, *grads: Array):
    x, phi, alpha, bias, projected, r = saved
    sizes = {**_mappings_sizes(static, x), "width": x.shape[-1]}
    dprojected, shrink, rows = backend(launch.mappings_backward, sizes, projected, r, alpha, bias, *grads)
    narrow = backend.cast(phi, dtype_name(x))
    dx, dphi = backend(launch.project_backward, _stream_sizes(x), x, narrow, dprojected, shrink)
    dphi = column_sum(backend, dphi, dphi.shape[0], math.prod(phi.shape)).reshape(phi.shape)
    sums = column_sum(backend, rows, *rows.shape)
    return dx, backend.cast(dphi, dtype_name(phi)), sums[:3], sums[3:]


def _mappings_sizes(static: Sinkhorn, x: Array) -> dict[str, Any]:
    *lead, streams, _ = x.shape
    last, iterations = static.last, static.iterations
    return dict(lead=tuple(lead), streams=streams, dtype=wide(dtype_name(x)), iterations=iterations, last=last)


def _stream_sizes(x: Array) -> dict[str, Any]:
    *lead, streams, width = x.shape
    return dict(lead=tuple(lead), streams=streams, width=width, dtype=dtype_name(x))


def _aggregate_forward(backend: Backend, static: None, x: Array, h_pre: Array):
    return backend(launch.aggregate_forward, _stream_sizes(x), x, h_pre), (x, h_pre)


def _aggregate_backward(backend: Backend, static: None, saved: tuple, grad: Array):
    x, h_pre = saved
    return backend(launch.aggregate_backward, _stream_sizes(x), x, h_pre, grad)


def _write_forward(backend: Backend, static: Write, *inputs: Array | None):
    """Run forward of x, h_res, y, bias, h_post, row_low, row_high, step; None for inputs that static excludes."""
    outputs = backend(launch.write_forward, _write_sizes(static, *inputs), *_all_there(inputs))
    saved = inputs if static.add == "mix" else (None, *inputs[1:])  # no gradient depends on an unmixed x
    return outputs, saved


def _write_backward(backend: Backend, static: Write, saved: tuple, grad: Array):
    bias = saved[3]
    sizes = {**_stream_sizes(grad), "write": static}
    dx, dh_res, dy, dh_post = backend(launch.write_backward, sizes, *_all_there(saved), grad)
    dbias = None
    if static.bias:
        width = grad.shape[-1]
        dbias = backend.cast(column_sum(backend, dy, math.prod(dy.shape[:-1]), width), dtype_name(bias))
    if static.add != "mix":
        dx, dh_res = (grad if static.add == "plain" else None), None
    if not static.post:
        dy, dh_post = None, None
    return dx, dh_res, dy, dbias, dh_post, None, None, None


def _write_sizes(static: Write, x: Array, h_res: Array, y: Array, bias: Array, h_post: Array, *_: Array):
    if x is not None:
        return {**_stream_sizes(x), "write": static}
    *lead, width = y.shape
    return dict(lead=tuple(lead), streams=h_post.shape[-1], width=width, dtype=dtype_name(y), write=static)


def _all_there(inputs: tuple) -> list[Array]:
    """Replace missing inputs by the coefficients, because a kernel needs an array even if it does not read it."""
    coefficients = inputs[4] if inputs[4] is not None else inputs[1]
    return [coefficients if x is None else x for x in inputs]


def _swiglu_forward(backend: Backend, static: None, x: Array):
    return backend(launch.swiglu_forward, _halved(x), x), (x,)


def _swiglu_backward(backend: Backend, static: None, saved: tuple, grad: Array):
    return backend(launch.swiglu_backward, _halved(*saved), *saved, grad)


def _halved(x: Array) -> dict[str, Any]:
    *lead, width = x.shape
    return dict(lead=tuple(lead), width=width // 2, dtype=dtype_name(x))


def _gelu_forward(backend: Backend, static: None, x: Array):
    return backend(launch.gelu_forward, _rows(x), x), (x,)


def _gelu_backward(backend: Backend, static: None, saved: tuple, grad: Array):
    return backend(launch.gelu_backward, _rows(*saved), *saved, grad)


def _rows(x: Array) -> dict[str, Any]:
    *lead, width = x.shape
    return dict(lead=tuple(lead), width=width, dtype=dtype_name(x))


SINKHORN = Operation(_sinkhorn_forward, _sinkhorn_backward)
COMPUTE_MAPPINGS = Operation(_mappings_forward, _mappings_backward)
AGGREGATE = Operation(_aggregate_forward, _aggregate_backward)
WRITE = Operation(_write_forward, _write_backward)
SWIGLU = Operation(_swiglu_forward, _swiglu_backward)
GELU = Operation(_gelu_forward, _gelu_backward)

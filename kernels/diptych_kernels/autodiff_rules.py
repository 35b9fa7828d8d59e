"""Forward and backward rules of every operation in terms of launches, shared by all backends.

A backend (torch_backend, jax_backend, aot) is a function ``backend(build, sizes, *inputs) -> outputs`` with a method
``cast(x, dtype)``, where ``build`` is a function of launch_configs. Rules use arrays only through the backend and
through ``shape``, ``dtype``, ``reshape`` and slices, which PyTorch and JAX both have.

    forward(backend, static, *inputs)            -> outputs, saved        saved for backward, including inputs
    backward(backend, static, saved, *gradients) -> gradient of every input, None if it has none

The modules of the kernels (coefficients, streams, activations) state the formulas of the gradients.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from diptych_kernels import launch_configs
from diptych_kernels.launch_configs import Launch, MappingOptions, Write, wide

Array = Any


class Backend(Protocol):
    """The launch of kernels by one framework."""

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Array) -> tuple[Array, ...]:
        """Launch the kernel that ``build(block, **sizes)`` describes."""
        ...

    def cast(self, x: Array, dtype: str) -> Array:
        """Cast x to another type."""
        ...


class Operation(NamedTuple):
    """A differentiable function whose forward and backward consist of kernels."""

    name: str
    forward: Callable[..., tuple[tuple[Array, ...], tuple[Array, ...]]]
    backward: Callable[..., tuple[Array, ...]]
    num_outputs: int = 1


def dtype_name(x: Array) -> str:
    """Return the numpy name of x's type, e.g. ``bfloat16``."""
    return str(x.dtype).removeprefix("torch.")


def column_sum(backend: Backend, x: Array, rows: int, width: int) -> Array:
    """Sum over the rows of x in float32 or float64, in two steps if there are many rows.

    16-bit types always take both steps, so that the compiled kernels do not depend on the number of rows.

    Args:
        backend: the kernel backend.
        x: array of rows * width elements.
        rows: number of rows.
        width: elements per row.

    Returns:
        The sum. [width]
    """
    dtype = dtype_name(x)
    groups = min(math.ceil(rows / 256), 64)
    if dtype != wide(dtype):
        groups = max(groups, 2)
    for parts in [groups, 1] if groups > 1 else [1]:
        (x,) = backend(launch_configs.column_sum, dict(rows=rows, groups=parts, width=width, dtype=dtype_name(x)), x)
        rows = parts
    return x.reshape(width)


def _sinkhorn_forward(backend: Backend, static: MappingOptions, logits: Array):
    """Compute the doubly stochastic matrices of logits [..., S, S]. Only the logits are saved."""
    return backend(launch_configs.sinkhorn_forward, _mapping_sizes(static, logits), logits), (logits,)


def _sinkhorn_backward(backend: Backend, static: MappingOptions, saved: tuple, grad: Array):
    """Compute dlogits. The kernel replays the normalisations m = n / sum(n) and differentiates each.

    dn = (dm - sum(dm m)) / sum(n), with sums over the axis of the normalisation.
    """
    (logits,) = saved
    return backend(launch_configs.sinkhorn_backward, _mapping_sizes(static, logits), logits, grad)


def _mapping_sizes(static: MappingOptions, x: Array) -> dict[str, Any]:
    """Return the size arguments of launches on coefficients of logits [..., S, S] or of streams x [..., S, D]."""
    *lead, streams, _ = x.shape
    return dict(lead=tuple(lead), streams=streams, dtype=wide(dtype_name(x)), options=static)


def _mappings_forward(backend: Backend, static: MappingOptions, x: Array, phi: Array, alpha: Array, bias: Array):
    """Compute h_pre, h_post and h_res from streams x [..., S, D].

    projected = x phi and r = 1 / rms(x) are saved, so that backward does not repeat the product. phi is cast to the
    type of x, whose products run on tensor cores.
    """
    sizes = _stream_sizes(x)
    narrow = backend.cast(phi, sizes["dtype"])
    projected, r = backend(launch_configs.project_forward, {**sizes, "epsilon": static.rms_epsilon}, x, narrow)
    outputs = backend(launch_configs.mappings_forward, _mapping_sizes(static, x), projected, r, alpha, bias)
    return outputs, (x, phi, alpha, bias, projected, r)


def _mappings_backward(
    backend: Backend,
    static: MappingOptions,
    saved: tuple,
    *grads: Array,
    aggregate: tuple[Array, Array] | None = None,
    residual_grad: Array | None = None,
):
    """Compute dx, dphi, dalpha and dbias from dh_pre, dh_post and dh_res.

    dx = dprojected phi^T - shrink x and dphi = x^T dprojected, where shrink comes from the derivative of r. Partial
    sums of dphi, dalpha and dbias are added by column_sum in a fixed order.

    Args:
        backend: the kernel backend.
        static: static arguments of the operation.
        saved: result of _mappings_forward.
        *grads: dh_pre, dh_post and dh_res.
        aggregate: h_pre and the gradient of the weighted sum of the streams, whose gradient dx includes.
        residual_grad: gradient of x as a residual, which dx includes; None: 0.
    """
    x, phi, alpha, bias, projected, r = saved
    sizes = {**_mapping_sizes(static, x), "width": x.shape[-1]}
    dprojected, shrink, rows = backend(launch_configs.mappings_backward, sizes, projected, r, alpha, bias, *grads)
    narrow = backend.cast(phi, dtype_name(x))
    sizes = {**_stream_sizes(x), "aggregate": aggregate is not None, "residual_grad": residual_grad is not None}
    h_pre, grad = aggregate or (dprojected, dprojected)  # a kernel needs arrays, also those that it does not read
    residual_grad = dprojected if residual_grad is None else residual_grad
    arrays = (x, narrow, dprojected, shrink, h_pre, grad, residual_grad)
    dx, dphi = backend(launch_configs.project_backward, sizes, *arrays)
    dphi = column_sum(backend, dphi, dphi.shape[0], math.prod(phi.shape)).reshape(phi.shape)
    sums = column_sum(backend, rows, *rows.shape)
    return dx, backend.cast(dphi, dtype_name(phi)), sums[:3], sums[3:]


def _stream_sizes(x: Array) -> dict[str, Any]:
    """Return the size arguments of launches on residual streams x [..., S, D]."""
    *lead, streams, width = x.shape
    return dict(lead=tuple(lead), streams=streams, width=width, dtype=dtype_name(x))


def _aggregate_forward(backend: Backend, static: None, x: Array, h_pre: Array):
    """Compute sum_s h_pre[s] x[s]."""
    return backend(launch_configs.aggregate_forward, _stream_sizes(x), x, h_pre), (x, h_pre)


def _aggregate_backward(backend: Backend, static: None, saved: tuple, grad: Array):
    """Compute dx[s] = h_pre[s] grad and dh_pre[s] = sum_d grad[d] x[s, d]."""
    x, h_pre = saved
    return backend(launch_configs.aggregate_backward, _stream_sizes(x), x, h_pre, grad)


def _read_forward(backend: Backend, static: MappingOptions, x: Array, *parameters: Array):
    """Compute sum_s h_pre[s] x[s], h_post and h_res; the parameters are phi, alpha and bias."""
    (h_pre, h_post, h_res), saved = _mappings_forward(backend, static, x, *parameters)
    (aggregated,) = backend(launch_configs.aggregate_forward, _stream_sizes(x), x, h_pre)
    return (aggregated, h_post, h_res), (*saved, h_pre)


def _read_with_residual_forward(backend: Backend, static: MappingOptions, x: Array, *parameters: Array):
    """Return x as a further output: backward receives its gradient as a residual, and adds it in its own pass."""
    outputs, saved = _read_forward(backend, static, x, *parameters)
    return (*outputs, x), saved


def _read_backward(
    backend: Backend,
    static: MappingOptions,
    saved: tuple,
    grad: Array,
    dh_post: Array,
    dh_res: Array,
    residual_grad: Array | None = None,
):
    """Compute dx, dphi, dalpha and dbias. One kernel writes dx, with the terms of all uses of x.

    ``residual_grad`` is the gradient of the returned x.
    """
    *of_mappings, h_pre = saved
    sizes = {**_stream_sizes(saved[0]), "dx": False}
    _, dh_pre = backend(launch_configs.aggregate_backward, sizes, saved[0], h_pre, grad)
    grads = (dh_pre, dh_post, dh_res)
    more = dict(aggregate=(h_pre, grad), residual_grad=residual_grad)
    return _mappings_backward(backend, static, tuple(of_mappings), *grads, **more)


def _write_forward(backend: Backend, static: Write, *inputs: Array | None):
    """Compute next[s] = sum_j h_res[s, j] residual[j] + dropout(h_post[s] (output + bias)).

    The inputs are residual, h_res, output, bias, h_post, row_low, row_high and step; None for those that ``static``
    excludes.
    """
    outputs = backend(launch_configs.write_forward, _write_sizes(static, *inputs), *_fill_missing(inputs))
    saved = inputs if static.add == "mix" else (None, *inputs[1:])  # no gradient depends on an unmixed residual
    return outputs, saved


def _write_backward(backend: Backend, static: Write, saved: tuple, grad: Array):
    """Compute the gradients of all inputs, with m the dropout mask divided by 1 - p.

    dresidual[j] = sum_s h_res[s, j] grad[s]
    dh_res[s, j] = sum_d grad[s, d] residual[j, d]
    doutput      = sum_s h_post[s] m[s] grad[s]
    dh_post[s]   = sum_d m[s, d] grad[s, d] (output[d] + bias[d])

    dbias is the sum of doutput over all tokens.
    """
    bias = saved[3]
    sizes = {**_stream_sizes(grad), "write": static}
    dresidual, dh_res, doutput, dh_post = backend(launch_configs.write_backward, sizes, *_fill_missing(saved), grad)
    dbias = None
    if static.bias:
        width = grad.shape[-1]
        dbias = backend.cast(column_sum(backend, doutput, math.prod(doutput.shape[:-1]), width), dtype_name(bias))
    if static.add != "mix":
        dresidual = grad if static.add == "plain" else None
        dh_res = None
    if not static.post:
        doutput = None
        dh_post = None
    return dresidual, dh_res, doutput, dbias, dh_post, None, None, None


def _write_sizes(static: Write, residual: Array, h_res: Array, output: Array, bias: Array, h_post: Array, *_: Array):
    """Return the size arguments of write_forward."""
    if residual is not None:
        return {**_stream_sizes(residual), "write": static}
    *lead, width = output.shape
    return dict(lead=tuple(lead), streams=h_post.shape[-1], width=width, dtype=dtype_name(output), write=static)


def _fill_missing(inputs: tuple) -> list[Array]:
    """Replace missing inputs by h_post, or by h_res without it.

    A kernel needs an array even if it does not read it. write_forward and write_backward take the type of their sums
    from h_post, so that a missing h_post needs an array of coefficients.
    """
    coefficients = inputs[4] if inputs[4] is not None else inputs[1]
    return [coefficients if x is None else x for x in inputs]


def _activation(name: str, forward: Callable[..., Launch], backward: Callable[..., Launch], inputs: int) -> Operation:
    """Return the rules of an activation, which saves only its input.

    Args:
        name: name of the operation.
        forward: launch x [..., inputs * width] -> [..., width].
        backward: launch x, grad -> dx.
        inputs: number of inputs of each output element.
    """

    def sizes(x: Array) -> dict[str, Any]:
        *lead, width = x.shape
        return dict(lead=tuple(lead), width=width // inputs, dtype=dtype_name(x))

    def run_forward(backend: Backend, static: None, x: Array):
        return backend(forward, sizes(x), x), (x,)

    def run_backward(backend: Backend, static: None, saved: tuple, grad: Array):
        return backend(backward, sizes(*saved), *saved, grad)

    return Operation(name, run_forward, run_backward)


SINKHORN = Operation("sinkhorn", _sinkhorn_forward, _sinkhorn_backward)
COMPUTE_MAPPINGS = Operation("compute_mappings", _mappings_forward, _mappings_backward, num_outputs=3)
AGGREGATE = Operation("aggregate", _aggregate_forward, _aggregate_backward)
READ = Operation("read_streams", _read_forward, _read_backward, num_outputs=3)
READ_WITH_RESIDUAL = Operation("read_streams_with_residual", _read_with_residual_forward, _read_backward, num_outputs=4)
WRITE = Operation("write_streams", _write_forward, _write_backward)
SWIGLU = _activation("swiglu", launch_configs.swiglu_forward, launch_configs.swiglu_backward, inputs=2)
"""silu(gate) value for x = [gate | value]; dx = [grad value silu'(gate) | grad silu(gate)]."""
GELU = _activation("gelu", launch_configs.gelu_forward, launch_configs.gelu_backward, inputs=1)
"""x Phi(x); dx = grad (Phi(x) + x phi(x))."""

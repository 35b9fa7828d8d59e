"""Sinkhorn, its gradient, and stacks of layers with hyper-connections in both backends, for notebook 01."""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_impl.hyper_connections as jax_hc
import reference_torch.hyper_connections as torch_hc
from diptych.plans.config import TransformerConfig
from jax_impl.forward_context import ForwardContext as JaxContext
from jax_impl.transformer import TransformerLayer as JaxLayer
from parity.compare import relative_difference
from reference_torch.forward_context import ForwardContext as TorchContext
from reference_torch.transformer import TransformerLayer as TorchLayer

Results = dict[int, np.ndarray]
"""Arrays by number of layers."""


def normal(seed: int, *shape: int) -> np.ndarray:
    """Return numbers of a standard normal distribution, in float64."""
    return np.random.default_rng(seed).standard_normal(shape)


def mapping_inputs(config: TransformerConfig, tokens: int) -> dict[str, np.ndarray]:
    """Return the arguments of compute_mappings: random streams x [1, T, S, D], and the initial parameters."""
    module = torch_hc.HyperConnectionModule(config, 0)
    x = normal(0, 1, tokens, config.num_residual_streams, config.hidden_size)
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    return {"x": x.astype(np.float32), **parameters}


def mappings_of(backend: ModuleType) -> Callable[..., dict[str, Any]]:
    """Return compute_mappings of a backend with named results."""
    return lambda **inputs: dict(zip(("h_pre", "h_post", "h_res"), backend.compute_mappings(**inputs), strict=True))


_jax_sinkhorn = jax.jit(jax_hc.sinkhorn, static_argnums=(1, 2))


def sinkhorn(logits: np.ndarray, iterations: int, last: str) -> dict[str, np.ndarray]:
    """Return the matrices of both backends, by backend."""
    return {
        "PyTorch": torch_hc.sinkhorn(torch.from_numpy(logits), iterations, last).numpy(),
        "JAX": np.asarray(_jax_sinkhorn(jnp.asarray(logits), iterations, last)),
    }


def sum_errors(logits: np.ndarray, iterations: Sequence[int], last: str) -> dict[str, np.ndarray]:
    """Return the largest deviation of a row or column sum from 1, of each matrix and number of iterations.

    Args:
        logits: logits of N matrices. [N, S, S]
        iterations: numbers of iterations.
        last: side that is normalised last, row or column.

    Returns:
        Deviations [len(iterations), N], by "<backend>, normalised last" and "<backend>, normalised first".
    """
    axes = (-1, -2) if last == "row" else (-2, -1)
    found: dict[str, list[np.ndarray]] = {}
    for count in iterations:
        for backend, matrices in sinkhorn(logits, count, last).items():
            for side, axis in zip(("last", "first"), axes, strict=True):
                deviations = np.abs(matrices.sum(axis) - 1).max(-1)
                found.setdefault(f"{backend}, normalised {side}", []).append(deviations)
    return {label: np.array(deviations) for label, deviations in found.items()}


def sum_curves(errors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the worst deviation of both sides, and the median of the side normalised first; see sum_errors.

    A deviation of 0 is replaced by half a rounding step, so that a logarithmic axis shows it.
    """
    errors = {label: np.maximum(deviations, 2.0**-54) for label, deviations in errors.items()}
    worst = {f"{label}: worst": deviations.max(-1) for label, deviations in errors.items()}
    medians = {f"{label}: median": np.median(errors[label], -1) for label in errors if label.endswith("first")}
    return {**worst, **medians}


def order_gaps(logits: np.ndarray, iterations: int = 20) -> dict[str, np.ndarray]:
    """Return the largest difference between the two orders of each matrix, by backend."""
    ours, theirs = (sinkhorn(logits, iterations, last) for last in ("row", "column"))
    return {backend: np.abs(ours[backend] - theirs[backend]).max((-2, -1)) for backend in ours}


def describe(errors: np.ndarray) -> str:
    """Return median, 99th percentile and largest of the errors of many matrices."""
    median, high, worst = np.quantile(errors, (0.5, 0.99, 1.0))
    return f"median {median:.1e}, 99th percentile {high:.1e}, worst {worst:.1e}"


def torch_gradient(logits: np.ndarray, cotangent: np.ndarray, iterations: int, last: str) -> np.ndarray:
    """Return the gradient of <cotangent, sinkhorn(logits)> in PyTorch."""
    x = torch.from_numpy(logits).requires_grad_()
    return torch.autograd.grad(torch_hc.sinkhorn(x, iterations, last), x, torch.from_numpy(cotangent))[0].numpy()


def jax_gradient(logits: np.ndarray, cotangent: np.ndarray, iterations: int, last: str) -> np.ndarray:
    """Return the gradient of <cotangent, sinkhorn(logits)> in JAX."""
    _, pull_back = jax.vjp(lambda x: _jax_sinkhorn(x, iterations, last), jnp.asarray(logits))
    return np.asarray(pull_back(jnp.asarray(cotangent))[0])


def by_entry(derivative: Callable[[np.ndarray], np.ndarray], logits: np.ndarray) -> np.ndarray:
    """Return a gradient from the derivatives in the direction of each of the S x S entries, all matrices at once."""
    gradient = np.empty_like(logits)
    for index in np.ndindex(logits.shape[-2:]):
        direction = np.zeros(logits.shape[-2:])
        direction[index] = 1.0
        gradient[(..., *index)] = derivative(direction)
    return gradient


def finite_difference_gradient(
    logits: np.ndarray, cotangent: np.ndarray, iterations: int, last: str, step: float = 1e-5
) -> np.ndarray:
    """Return central finite differences of the forward of PyTorch."""

    def f(x: np.ndarray) -> np.ndarray:
        return (cotangent * torch_hc.sinkhorn(torch.from_numpy(x), iterations, last).numpy()).sum((-2, -1))

    return by_entry(lambda d: (f(logits + step * d) - f(logits - step * d)) / (2 * step), logits)


def complex_step_gradient(
    logits: np.ndarray, cotangent: np.ndarray, iterations: int, last: str, step: float = 1e-30
) -> np.ndarray:
    """Return the complex-step derivative of a plain loop: the oracle, exact to rounding."""

    def f(x: np.ndarray) -> np.ndarray:
        matrix = np.exp(x - np.real(x).max((-2, -1), keepdims=True))
        for _ in range(iterations):
            for axis in (-2, -1) if last == "row" else (-1, -2):
                matrix = matrix / matrix.sum(axis, keepdims=True)
        return (cotangent * matrix.imag).sum((-2, -1))

    return by_entry(lambda d: f(logits + 1j * step * d) / step, logits)


def final_matrix_gradient(logits: np.ndarray, cotangent: np.ndarray, iterations: int, last: str) -> np.ndarray:
    """Return the gradient as if the last iterate was the limit: the failing variant."""
    p = torch_hc.sinkhorn(torch.from_numpy(logits), iterations, last).numpy()
    size = p.shape[-1]
    identity = np.eye(size)
    weighted = p * cotangent
    upper = [p.sum(-1)[..., None] * identity, p]
    lower = [p.swapaxes(-1, -2), p.sum(-2)[..., None] * identity]
    right = np.concatenate([weighted.sum(-1), weighted.sum(-2)], -1)
    # (u + c, v - c) solves it too for any c, so the last v is 0.
    solution = np.linalg.solve(np.block([upper, lower])[..., :-1, :-1], right[..., :-1, None])[..., 0]
    u = solution[..., :size]
    v = np.pad(solution[..., size:], ((0, 0), (0, 1)))
    return p * (cotangent - u[..., :, None] - v[..., None, :])


GRADIENTS = {
    "PyTorch": torch_gradient,
    "JAX": jax_gradient,
    "finite differences": finite_difference_gradient,
    "failing: final matrix only": final_matrix_gradient,
}
"""Gradients of Sinkhorn that are compared with the complex step, by label."""


def gradient_errors(
    cases: Iterable[tuple[np.ndarray, int, str]], cotangent: np.ndarray, labels: Sequence[str]
) -> dict[str, list[float]]:
    """Return the errors of gradients beside the complex step.

    Args:
        cases: logits [N, S, S], iterations, and the side that is normalised last.
        cotangent: cotangent of the matrices. [N, S, S]
        labels: which of GRADIENTS.
    """
    errors: dict[str, list[float]] = {label: [] for label in labels}
    for logits, iterations, last in cases:
        exact = complex_step_gradient(logits, cotangent, iterations, last)
        for label in labels:
            found = GRADIENTS[label](logits, cotangent, iterations, last)
            errors[label].append(relative_difference(found, exact))
    return errors


def stack_torch(
    config: TransformerConfig, depths: Sequence[int], inputs: np.ndarray, cotangent: np.ndarray, dtype: str
) -> tuple[Results, Results]:
    """Return the streams after each number of layers, and the gradients of the input streams, in PyTorch.

    Args:
        config: the model; its layers have the initial parameters, in float32.
        depths: numbers of layers.
        inputs: input streams. [B, T, S, D]
        cotangent: cotangent of the streams. [B, T, S, D]
        dtype: float32 or float64.
    """
    layers = [TorchLayer(config, number) for number in range(max(depths))]
    layers = [layer.requires_grad_(False).to(getattr(torch, dtype)) for layer in layers]
    x, given = (torch.from_numpy(a.astype(dtype)) for a in (inputs, cotangent))
    context = TorchContext(torch.arange(x.shape[1]))
    outputs = [x.requires_grad_()]
    for layer in layers:
        outputs.append(layer(outputs[-1], context))
    gradients = {n: torch.autograd.grad(outputs[n], x, given, retain_graph=True)[0].numpy() for n in depths}
    return {n: outputs[n].detach().numpy() for n in depths}, gradients


def stack_jax(
    config: TransformerConfig, depths: Sequence[int], inputs: np.ndarray, cotangent: np.ndarray, dtype: str
) -> tuple[Results, Results]:
    """Return streams and gradients in JAX, where one compiled function serves all layers; see stack_torch."""
    split = [nnx.split(JaxLayer(config, number), nnx.Param) for number in range(max(depths))]
    graph = split[0][0]
    layers = [jax.tree.map(lambda p: p.astype(dtype), params) for _, params in split]

    @jax.jit
    def forward(params: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, JaxContext(jnp.arange(x.shape[1])))

    @jax.jit
    def backward(params: nnx.State, x: jax.Array, given: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: forward(params, x), x)[1](given)[0]

    outputs = [jnp.asarray(inputs, dtype)]
    for params in layers:
        outputs.append(forward(params, outputs[-1]))
    gradients = {}
    for n in depths:
        gradient = jnp.asarray(cotangent, dtype)
        for number in reversed(range(n)):
            gradient = backward(layers[number], outputs[number], gradient)
        gradients[n] = np.asarray(gradient)
    return {n: np.asarray(outputs[n]) for n in depths}, gradients


PAIRS = {
    "PyTorch, float32 error": (("PyTorch", "float32"), ("PyTorch", "float64")),
    "JAX, float32 error": (("JAX", "float32"), ("JAX", "float64")),
    "between backends, float32": (("PyTorch", "float32"), ("JAX", "float32")),
    "between backends, float64": (("PyTorch", "float64"), ("JAX", "float64")),
}
"""The two stacks of each curve, by its label."""


def scale_drift(ours: np.ndarray, exact: np.ndarray) -> float:
    """Return the factor by which an array exceeds another, minus 1."""
    return float(ours.astype(np.float64).ravel() @ exact.ravel() / (exact.ravel() @ exact.ravel()) - 1)


def stack_errors(
    config: TransformerConfig, depths: Sequence[int]
) -> dict[str, tuple[dict[str, list[float]], dict[str, list[float]]]]:
    """Return the errors of the streams after each number of layers, and of the gradients of the input streams.

    Args:
        config: the model.
        depths: numbers of layers.

    Returns:
        Errors by label of PAIRS, and the drift of scale in float32, for "streams" and "input gradient".
    """
    inputs, cotangent = (normal(seed, 2, 16, 4, config.hidden_size).astype(np.float32) for seed in (3, 4))
    runs = {
        (backend, dtype): run(config, depths, inputs, cotangent, dtype)
        for backend, run in (("PyTorch", stack_torch), ("JAX", stack_jax))
        for dtype in ("float32", "float64")
    }
    found = {}
    for place, name in enumerate(("streams", "input gradient")):
        values = {key: results[place] for key, results in runs.items()}
        assert all(array.dtype == dtype for (_, dtype), arrays in values.items() for array in arrays.values())
        errors = {
            label: [relative_difference(values[ours][n], values[theirs][n]) for n in depths]
            for label, (ours, theirs) in PAIRS.items()
        }
        drifts = {
            f"{backend}, drift": [
                scale_drift(values[backend, "float32"][n], values[backend, "float64"][n]) for n in depths
            ]
            for backend in ("PyTorch", "JAX")
        }
        found[name] = errors, drifts
    return found

"""Chunked and recurrent Kimi delta attention in both backends, for notebook 10."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from jax_impl.delta_rule import chunk_kda as jax_chunk_kda
from parity.compare import relative_difference
from reference_torch.delta_rule import chunk_kda, recurrent_kda

NAMES = ("q", "k", "v", "g", "beta")
RESULTS = ("outputs", *NAMES)
"""Results of a run: the outputs, and the gradients of the inputs under a fixed random cotangent."""

Arrays = dict[str, np.ndarray]
"""Inputs and the cotangent, or results, by name."""
Rule = Callable[..., tuple[Any, Any]]


def make_inputs(length: int, decay: float, heads: int = 2, width: int = 16, seed: int = 0) -> Arrays:
    """Return random inputs of one sequence, and a cotangent of the outputs.

    Args:
        length: number of tokens T.
        decay: mean log decay per token, at most 0, uniform in [2 decay, 0]; 0: nothing decays.
        heads: number of heads H.
        width: width of keys and values K = V.
        seed: seed of the numbers.

    Returns:
        q, k, v, g, cotangent [1, T, H, K] and beta [1, T, H], float64 with float32's precision. Keys have length one.
    """
    rng = np.random.default_rng(seed)
    q, k, v, cotangent = rng.standard_normal((4, 1, length, heads, width))
    g = decay * rng.uniform(0.0, 2.0, q.shape)
    beta = rng.uniform(0.0, 1.0, q.shape[:-1])
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cotangent": cotangent}
    return {name: array.astype(np.float32).astype(np.float64) for name, array in arrays.items()}


def run_torch(arrays: Arrays, dtype: str, rule: Rule = chunk_kda) -> Arrays:
    """Return outputs and gradients of a rule in PyTorch.

    Args:
        arrays: see make_inputs.
        dtype: float32 or float64.
        rule: a function of q, k, v, g, beta that returns outputs and final states.
    """
    inputs = [torch.from_numpy(arrays[name].astype(dtype)).requires_grad_() for name in NAMES]
    outputs = rule(*inputs)[0]
    gradients = torch.autograd.grad(outputs, inputs, torch.from_numpy(arrays["cotangent"].astype(dtype)))
    return dict(zip(RESULTS, (x.detach().numpy() for x in (outputs, *gradients)), strict=True))


def run_jax(arrays: Arrays, dtype: str, offsets: Sequence[int] | None = None) -> Arrays:
    """Return outputs and gradients of chunk_kda in JAX; see run_torch.

    Args:
        arrays: see make_inputs.
        dtype: float32 or float64.
        offsets: offsets of packed sequences, and T; None: one sequence.
    """
    cu_seqlens = None if offsets is None else np.array(offsets, np.int32)

    @jax.jit
    def outputs_and_gradients(inputs: Sequence[jax.Array], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        outputs, pull_back = jax.vjp(lambda *x: jax_chunk_kda(*x, cu_seqlens=cu_seqlens)[0], *inputs)
        return outputs, *pull_back(cotangent)

    inputs = [jnp.asarray(arrays[name], dtype) for name in NAMES]
    results = outputs_and_gradients(inputs, jnp.asarray(arrays["cotangent"], dtype))
    return dict(zip(RESULTS, map(np.asarray, results), strict=True))


def run_oracle(arrays: Arrays) -> Arrays:
    """Return outputs and gradients of the recurrence, token by token in float64."""
    return run_torch(arrays, "float64", recurrent_kda)


def numpy_recurrence(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs and the state after each token, by the four lines of the definition.

    Args:
        arrays: see make_inputs.

    Returns:
        Outputs [T, H, V] and states [T, H, K, V].
    """
    q, k, v, g, beta = (arrays[name][0] for name in NAMES)
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2]))
    outputs = []
    states = []
    for t in range(len(q)):
        state = np.exp(g[t])[..., None] * state
        error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * error[:, None]
        outputs.append(q.shape[2] ** -0.5 * np.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return np.stack(outputs), np.stack(states)


def dividing_chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Run KDA in chunks with quotients of cumulative decays: the failing variant.

    It follows the equations: a key is divided by the decay since the start of its chunk, exp(-G), which overflows if
    the decay is strong. Arguments and results are those of chunk_kda, for one sequence of whole chunks.
    """
    scale = q.shape[-1] ** -0.5
    state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for start in range(0, q.shape[1], chunk):
        part = slice(start, start + chunk)
        queries, keys, values, decays = (x[0, part].transpose(0, 1) for x in (q, k, v, g))
        strengths = beta[0, part].T[..., None]
        total = decays.cumsum(-2)
        divided = keys * torch.exp(-total)
        decayed = keys * torch.exp(total)
        queries = scale * queries * torch.exp(total)
        system = torch.eye(values.shape[1], dtype=q.dtype) + strengths * (decayed @ divided.mT).tril(-1)
        right = strengths * (values - decayed @ state)
        errors = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(queries @ state + (queries @ divided.mT).tril() @ errors)
        last = total[:, -1:]
        state = torch.exp(last).mT * (state + divided.mT @ errors)
    return torch.cat(outputs, 1).transpose(0, 1)[None], state[None]


CURVES = ("PyTorch, chunks", "JAX, chunks", "failing: divided decays")
"""Labels of the compared implementations, all in float32."""


def errors_of(sequences: Sequence[tuple[int, float]]) -> dict[str, list[dict[str, float]]]:
    """Return the errors of all results in float32 beside the float64 recurrence.

    JAX computes all sequences packed in one call, so that it compiles once.

    Args:
        sequences: length and mean log decay of each sequence; the lengths are multiples of 64.

    Returns:
        The error of every result (see RESULTS) of each sequence, by label of CURVES.
    """
    inputs = [make_inputs(length, decay) for length, decay in sequences]
    offsets = np.cumsum([0, *(length for length, _ in sequences)])
    packed = {name: np.concatenate([arrays[name] for arrays in inputs], axis=1) for name in inputs[0]}
    in_jax = run_jax(packed, "float32", offsets.tolist())
    errors: dict[str, list[dict[str, float]]] = {label: [] for label in CURVES}
    for arrays, start, stop in zip(inputs, offsets[:-1], offsets[1:], strict=True):
        exact = run_oracle(arrays)
        found = (
            run_torch(arrays, "float32"),
            {name: values[:, start:stop] for name, values in in_jax.items()},
            run_torch(arrays, "float32", dividing_chunk_kda),
        )
        for label, results in zip(CURVES, found, strict=True):
            errors[label].append({name: relative_difference(results[name], exact[name]) for name in RESULTS})
    return errors


def largest(errors: Mapping[str, Sequence[Mapping[str, float]]], names: Sequence[str]) -> dict[str, list[float]]:
    """Return the largest error of the named results for each sequence, by label of CURVES."""
    return {label: [max(entry[name] for name in names) for entry in entries] for label, entries in errors.items()}

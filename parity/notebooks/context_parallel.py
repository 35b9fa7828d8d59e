"""Affine maps of the state, and KDA over several ranks in both backends, for notebook 06."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec
from torch import Tensor

from diptych.plans.context.exchange import EXCHANGES, exchange_cost
from jax_impl.context_parallel import build_cp_context
from jax_impl.delta_rule import chunk_kda
from parity.compare import relative_difference
from parity.notebooks.context_ranks import CHUNK, run_part
from reference_torch.delta_rule import recurrent_kda
from reference_torch.rank_pool import RankPool, preload

RESULTS = ("outputs", "q", "k", "v", "g", "beta")
"""Results of a run: the outputs, and the gradients of the inputs."""


def make_inputs(length: int, heads: int = 2, width: int = 16, seed: int = 0) -> list[np.ndarray]:
    """Return q, k, v, g, beta of one sequence and a cotangent, float64 with float32's precision.

    Args:
        length: number of tokens T.
        heads: number of heads H. The first ones forget slowly, the last ones quickly.
        width: width of keys and values K = V.
        seed: seed of the numbers.

    Returns:
        q, k, v, g, cotangent [1, T, H, K] and beta [1, T, H].
    """
    rng = np.random.default_rng(seed)
    q, k, v, cotangent = rng.standard_normal((4, 1, length, heads, width))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    g = -rng.uniform(0.0, 0.02, q.shape) * np.linspace(0.1, 1.0, heads)[:, None]
    beta = rng.uniform(0.0, 1.0, q.shape[:-1])
    return [x.astype(np.float32).astype(np.float64) for x in (q, k, v, g, beta, cotangent)]


class Part:
    """A part of a sequence as an affine map of the state, computed by one run of the recurrence.

    Args:
        inputs: q, k, v, g, beta of the part. [1, T, H, ...]
    """

    def __init__(self, inputs: Sequence[np.ndarray]) -> None:
        q, k, v, g, beta = (torch.from_numpy(np.ascontiguousarray(x)) for x in inputs)
        heads, keys = k.shape[2:]
        width = v.shape[3]
        start = torch.cat([torch.zeros(heads, keys, width), torch.eye(keys).expand(heads, keys, keys)], -1).double()
        values = torch.nn.functional.pad(v, (0, keys))
        outputs, last = recurrent_kda(q, k, values, g, beta, initial_state=start[None], output_final_state=True)
        assert last is not None
        self.M: Tensor = last[0, ..., width:]
        """Map of the state. [H, K, K]"""
        self.S_local: Tensor = last[0, ..., :width]
        """Final state from a state of 0. [H, K, V]"""
        self.outputs: Tensor = outputs[0, ..., :width]
        """Outputs from a state of 0. [T, H, V]"""
        self.transition_outputs: Tensor = outputs[0, ..., width:]
        """Change of the outputs with the initial state. [T, H, K]"""

    def outputs_from(self, state: Tensor) -> Tensor:
        """Return the outputs for an initial state [H, K, V]."""
        return self.outputs + torch.einsum("thk,hkv->thv", self.transition_outputs, state)


def product_of_tokens(inputs: Sequence[np.ndarray]) -> Tensor:
    """Return M as the product of the matrices of the tokens, the last one on the left.

    Args:
        inputs: q, k, v, g, beta. [1, T, H, ...]

    Returns:
        The map M. [H, K, K]
    """
    _, k, _, g, beta = (torch.from_numpy(x)[0] for x in inputs)
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    product = identity.expand(k.shape[1], *identity.shape)
    for t in range(len(k)):
        rank_one = beta[t][:, None, None] * k[t][:, :, None] * k[t][:, None]
        product = (identity - rank_one) @ torch.diag_embed(g[t].exp()) @ product
    return product


def parts_of(inputs: Sequence[np.ndarray], count: int) -> list[list[np.ndarray]]:
    """Cut the tokens of q, k, v, g and beta into equal parts."""
    return [list(part) for part in zip(*(np.array_split(x, count, axis=1) for x in inputs[:5]), strict=True)]


def run_jax(arrays: Sequence[np.ndarray], ranks: int, dtype: str, cp_exchange: str = "all_gather") -> list[np.ndarray]:
    """Return outputs and gradients of KDA over several CPU devices; see run_part for the arguments."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("cp",))
    by_token = PartitionSpec(None, "cp")

    @partial(jax.shard_map, mesh=mesh, in_specs=by_token, out_specs=by_token)
    def part(*inputs: jax.Array) -> jax.Array:
        context = build_cp_context(np.array([0, arrays[0].shape[1]], np.int32), "cp", cp_exchange=cp_exchange)
        return chunk_kda(*inputs, cp_context=context, chunk_size=CHUNK)[0]

    @jax.jit
    def outputs_and_gradients(inputs: Sequence[jax.Array], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        outputs, pull_back = jax.vjp(part, *inputs)
        return outputs, *pull_back(cotangent)

    *inputs, cotangent = (jnp.asarray(x, dtype) for x in arrays)
    return [np.asarray(x) for x in outputs_and_gradients(inputs, cotangent)]


def run_torch(
    pool: RankPool, arrays: Sequence[np.ndarray], ranks: int, dtype: str, *options: str | bool
) -> list[np.ndarray]:
    """Return outputs and gradients of KDA over several processes.

    Args:
        pool: at least as many ranks.
        arrays: see make_inputs.
        ranks: number of ranks that share the tokens.
        dtype: float32 or float64.
        options: cp_exchange and wrong of run_part.
    """
    values = [x.astype(dtype) for x in arrays]
    parts = pool.run("parity.notebooks.context_ranks:run_part", values, ranks, *options)
    return [np.concatenate(x, axis=1) for x in zip(*(part for part in parts if part is not None), strict=True)]


def new_pool(size: int) -> RankPool:
    """Return a pool of PyTorch's ranks that can execute run_part."""
    preload("parity.notebooks.context_ranks")
    return RankPool(size)


def worst_error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Return the largest relative difference of any result."""
    return max(relative_difference(ours, theirs) for ours, theirs in zip(found, exact, strict=True))


def errors_of(pool: RankPool, cases: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """Return the worst error of outputs and gradients in float64 beside one process, by curve.

    Args:
        pool: PyTorch's ranks.
        cases: numbers of ranks and tokens; the ranks divide the tokens.
    """
    errors: dict[str, list[float]] = {"PyTorch": [], "JAX": [], "failing: M, not its transpose": []}
    for ranks, length in cases:
        arrays = make_inputs(length)
        exact = run_part(arrays)
        assert exact is not None
        wrong = run_torch(pool, arrays, ranks, "float64", "all_gather", True)
        found = (run_torch(pool, arrays, ranks, "float64"), run_jax(arrays, ranks, "float64"), wrong)
        for curve, results in zip(errors.values(), found, strict=True):
            curve.append(worst_error(results, exact))
    return errors


def exchange_costs(sizes: Sequence[int], heads: int, width: int) -> list[dict[str, list[float]]]:
    """Return rounds, MiB sent by one rank and MiB received by all, each by exchange and number of ranks.

    Args:
        sizes: numbers of ranks.
        heads: number of heads.
        width: width of keys and values; states are in float32.
    """
    costs = {name: [exchange_cost(name, size, heads, width, width) for size in sizes] for name in EXCHANGES}
    scales = {"rounds": 1.0, "payload_bytes": 2.0**20, "wire_bytes": 2.0**20}
    return [
        {name: [getattr(cost, field) / scale for cost in found] for name, found in costs.items()}
        for field, scale in scales.items()
    ]

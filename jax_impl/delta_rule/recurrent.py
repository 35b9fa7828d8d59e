"""The delta rule token by token, as defined: the oracle of the other forms, and the form for incremental decoding."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Integer

from diptych_kernels.mesh_axes import match_varying_axes


def recurrent(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t h k"],
    v: Float[Array, "b t h v"],
    g: Float[Array, "b t h g"],
    beta: Float[Array, "b t h 1"],
    initial: Float[Array, "n h k v"] | None,
    cu_seqlens: Integer[Array, " n1"] | None,
) -> tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Return outputs and final states.

    Args:
        q: scaled queries. [B, T, H, K]
        k: keys. [B, T, H, K]
        v: values. [B, T, H, V]
        g: log decay, natural log, per channel or per head. [B, T, H, K or 1]
        beta: write strength. [B, T, H, 1]
        initial: states before the sequences; None: zeros. [N, H, K, V]
        cu_seqlens: offsets of packed sequences, and the end; None: each row of the batch is a sequence.

    Returns:
        Outputs [B, T, H, V] and final states [N, H, K, V].
    """
    batch, length, heads, key = k.shape
    width = v.shape[-1]
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    before = jnp.zeros((sequences, heads, key, width), q.dtype) if initial is None else initial
    before, q, k, v, g, beta = match_varying_axes((before, q, k, v, g, beta))
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    rows = jnp.arange(batch)[None].repeat(length, 0)  # index of the state that each token changes
    if cu_seqlens is not None:
        rows = jnp.searchsorted(cu_seqlens, jnp.arange(length), side="right")[:, None] - 1

    def run_token(states: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta, row = token
        output, after = step(q, k, v, g, beta, states[row])
        return states.at[row].set(after), output

    finals, outputs = jax.lax.scan(run_token, before, (*tokens, rows))
    return jnp.moveaxis(outputs, 0, 1), finals


def step(
    q: Float[Array, "b h k"],
    k: Float[Array, "b h k"],
    v: Float[Array, "b h v"],
    g: Float[Array, "b h g"],
    beta: Float[Array, "b h 1"],
    state: Float[Array, "b h k v"],
) -> tuple[Float[Array, "b h v"], Float[Array, "b h k v"]]:
    """Return the output of one token and the state after it; see recurrent for the arguments, here without axis T."""
    state = jnp.exp(g)[..., None] * state
    error = beta * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * error[..., None, :]
    return (q[..., None] * state).sum(-2), state

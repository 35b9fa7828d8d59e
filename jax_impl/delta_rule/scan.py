"""States through chunks, forward and back: the only part of the chunked form that goes chunk by chunk.

    e = u - w S                       the chunk's errors
    o = q_decayed S + A_qk e
    S <- diag(decay) S + k_decayed^T e

Backward, from the last chunk to the first, dS the gradient of the state a chunk ends with:

    de = A_qk^T do + k_decayed dS
    dS <- diag(decay) dS + q_decayed^T do - w^T de

and all else is a product of these and the states, for all chunks at once.
"""

from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float, Integer

from jax_impl.delta_rule.intra import ChunkTerms


class Scanned(NamedTuple):
    """What a scan leaves for outputs and backward."""

    states: Float[Array, "n r k v"]
    """Those chunks begin with."""
    errors: Float[Array, "n r c v"]


def scan_chunks(
    terms: ChunkTerms, owners: Integer[Array, " n"], states: Float[Array, "s r k v"]
) -> tuple[Scanned, Float[Array, "s r k v"]]:
    """Take the sequences' states through their chunks.

    Args:
        terms: of n chunks.
        owners: whose they are. [n]
        states: of every sequence before. [N, R, K, V]

    Returns:
        What outputs and backward need, and the states after.
    """

    def through(states: Array, chunk: tuple[Array, ...]) -> tuple[Array, Scanned]:
        owner, w, u, k_decayed, decay = chunk
        start = states[owner]
        errors = u - w @ start
        end = decay[..., None] * start + k_decayed.mT @ errors
        return states.at[owner].set(end), Scanned(start, errors)

    states, scanned = jax.lax.scan(through, states, (owners, terms.w, terms.u, terms.k_decayed, terms.decay))
    return scanned, states


def outputs(terms: ChunkTerms, scanned: Scanned) -> Float[Array, "n r c v"]:
    """Of every token."""
    return terms.q_decayed @ scanned.states + terms.a_qk @ scanned.errors


def scan_chunks_backward(
    terms: ChunkTerms,
    owners: Integer[Array, " n"],
    scanned: Scanned,
    d_output: Float[Array, "n r c v"],
    d_states: Float[Array, "s r k v"],
) -> tuple[ChunkTerms, Float[Array, "s r k v"]]:
    """Gradients of the terms, and of the states before.

    Args:
        terms: as given to ``scan_chunks``.
        owners: as given to it.
        scanned: as returned by it.
        d_output: gradient of the outputs. [n, R, C, V]
        d_states: of the states after. [N, R, K, V]
    """

    def back(d_states: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        owner, own, into_state, w, k_decayed, decay = chunk
        d_end = d_states[owner]
        d_errors = own + k_decayed @ d_end
        d_start = decay[..., None] * d_end + into_state - w.mT @ d_errors
        return d_states.at[owner].set(d_start), (d_end, d_errors)

    own, into_state = terms.a_qk.mT @ d_output, terms.q_decayed.mT @ d_output
    chunks = (owners, own, into_state, terms.w, terms.k_decayed, terms.decay)
    d_states, (d_ends, d_errors) = jax.lax.scan(back, d_states, chunks, reverse=True)
    by_channel = terms.decay.shape[-1] > 1
    gradients = ChunkTerms(
        w=-(d_errors @ scanned.states.mT),
        u=d_errors,
        q_decayed=d_output @ scanned.states.mT,
        k_decayed=scanned.errors @ d_ends.mT,
        a_qk=d_output @ scanned.errors.mT,
        decay=(scanned.states * d_ends).sum(-1 if by_channel else (-2, -1)).reshape(terms.decay.shape),
    )
    return gradients, d_states

"""States through chunks, forward and back: the only part of the chunked form that goes chunk by chunk.

    e = u - w S                       the chunk's errors
    o = q_decayed S + A_qk e
    S <- diag(decay) S + k_decayed^T e

Backward, from the last chunk to the first, dS the gradient of the state a chunk ends with:

    de = A_qk^T do + k_decayed dS
    dS <- diag(decay) dS + q_decayed^T do - w^T de

and all else is a product of these and the states, for all chunks at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jax_impl.delta_rule.intra import ChunkTerms, lower_product


class Scanned(NamedTuple):
    """What a scan leaves for outputs and backward."""

    states: Float[Array, "n r k v"]
    """Those chunks begin with."""
    errors: Float[Array, "n r c v"]


class Sequences(NamedTuple):
    """Whose the chunks are. [n]"""

    owner: Integer[Array, " n"]
    is_first: Bool[Array, " n"]
    """The sequence's first chunk."""
    is_last: Bool[Array, " n"]


def sequences_of(owner: Integer[Array, " n"]) -> Sequences:
    """Of all chunks, which lie sequence by sequence."""
    changes = jnp.concatenate([jnp.ones(1, bool), owner[1:] != owner[:-1], jnp.ones(1, bool)])
    return Sequences(owner, changes[:-1], changes[1:])


class States(NamedTuple):
    """What goes from chunk to chunk: the states of all sequences are only written, so a chunk's time does not grow with
    their number."""

    one: Float[Array, "r k v"]
    """The state after the chunk before, if that was of the same sequence."""
    ends: Float[Array, "s r k v"] | None
    """After the sequences' chunks so far; of a sequence without chunks, what it began with. None: nobody asks."""

    def after(self, owner: Array, end: Array) -> "States":
        """One chunk on."""
        return States(end, None if self.ends is None else self.ends.at[owner].set(end))


def scan_chunks(
    terms: ChunkTerms, sequences: Sequences, initial: Float[Array, "s r k v"] | None, states: States
) -> tuple[Scanned, States]:
    """Take the sequences' states through their chunks.

    Args:
        terms: of n chunks.
        sequences: whose they are. [n]
        initial: states of all sequences before; None for zeros. [N, R, K, V]
        states: after the chunks before these.

    Returns:
        What outputs and backward need, and the states after.
    """

    def through(states: States, chunk: tuple[Any, ...]) -> tuple[States, Scanned]:
        (owner, is_first, _), w, u, k_decayed, decay = chunk
        start = jnp.where(is_first, 0 if initial is None else initial[owner], states.one)
        errors = u - w @ start
        end = decay[..., None] * start + k_decayed.mT @ errors
        return states.after(owner, end), Scanned(start, errors)

    states, scanned = jax.lax.scan(through, states, (sequences, terms.w, terms.u, terms.k_decayed, terms.decay))
    return scanned, states


def outputs(terms: ChunkTerms, scanned: Scanned) -> Float[Array, "n r c v"]:
    """Of every token."""
    return terms.q_decayed @ scanned.states + lower_product(terms.a_qk, scanned.errors)


def scan_chunks_backward(
    terms: ChunkTerms,
    sequences: Sequences,
    scanned: Scanned,
    d_output: Float[Array, "n r c v"],
    d_finals: Float[Array, "s r k v"],
    d_states: States,
) -> tuple[ChunkTerms, States]:
    """Gradients of the terms, and of the states before.

    Args:
        terms: as given to ``scan_chunks``.
        sequences: as given to it.
        scanned: as returned by it.
        d_output: gradient of the outputs. [n, R, C, V]
        d_finals: of the sequences' last states. [N, R, K, V]
        d_states: of the states these chunks end with; from the last chunk on, ``ends`` are the beginnings.
    """

    def back(d_states: States, chunk: tuple[Any, ...]) -> tuple[States, tuple[Array, Array]]:
        (owner, _, is_last), own, into_state, w, k_decayed, decay = chunk
        d_end = jnp.where(is_last, d_finals[owner], d_states.one)
        d_errors = own + k_decayed @ d_end
        d_start = decay[..., None] * d_end + into_state - w.mT @ d_errors
        return d_states.after(owner, d_start), (d_end, d_errors)

    own, into_state = terms.a_qk.mT @ d_output, terms.q_decayed.mT @ d_output
    chunks = (sequences, own, into_state, terms.w, terms.k_decayed, terms.decay)
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

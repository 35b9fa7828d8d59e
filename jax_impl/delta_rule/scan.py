"""The scan of states over chunks, forward and backward: the only sequential part of the chunked form.

    e = u - w S                       beta-weighted prediction errors of the chunk; v_new in flash-linear-attention
    o = q_from_start S + A_qk e
    S <- diag(decay) S + k_to_end^T e

Backward runs from the last chunk to the first, where dS is the gradient of the final state of a chunk:

    de = A_qk^T do + k_to_end dS
    dS <- diag(decay) dS + q_from_start^T do - w^T de

All other gradients are products of these and the states, computed for all chunks at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jax_impl.delta_rule.intra import ChunkTerms, lower_product


class ScanResult(NamedTuple):
    """The results of a scan that outputs and backward need."""

    chunk_states: Float[Array, "n r k v"]
    """States before the chunks."""
    errors: Float[Array, "n r c v"]
    """Beta-weighted prediction errors of the tokens."""


class ChunkSequences(NamedTuple):
    """The sequence of each of n chunks."""

    sequence_ids: Integer[Array, " n"]
    """Index of the sequence."""
    is_first: Bool[Array, " n"]
    """True for the first chunk of a sequence."""
    is_last: Bool[Array, " n"]
    """True for the last chunk of a sequence."""


def chunk_sequences(sequence_ids: Integer[Array, " n"]) -> ChunkSequences:
    """Return the ChunkSequences of all chunks, which are ordered by sequence."""
    changes = jnp.concatenate([jnp.ones(1, bool), sequence_ids[1:] != sequence_ids[:-1], jnp.ones(1, bool)])
    return ChunkSequences(sequence_ids, changes[:-1], changes[1:])


class States(NamedTuple):
    """The carry of the scan.

    The states of all sequences are only written, so the time per chunk does not grow with the number of sequences.
    """

    current: Float[Array, "r k v"]
    """State after the previous chunk, which is used if that chunk belongs to the same sequence."""
    finals: Float[Array, "s r k v"] | None
    """State of each sequence after its chunks so far, or its initial state; None: not needed."""

    def after(self, sequence: Array, end: Array) -> "States":
        """Return the carry after a chunk.

        Args:
            sequence: index of the chunk's sequence. []
            end: state after the chunk. [R, K, V]
        """
        return States(end, None if self.finals is None else self.finals.at[sequence].set(end))


def scan_chunks(
    terms: ChunkTerms, sequences: ChunkSequences, initial: Float[Array, "s r k v"] | None, states: States
) -> tuple[ScanResult, States]:
    """Scan the states of sequences over their chunks.

    Args:
        terms: terms of n chunks.
        sequences: sequence of each chunk. [n]
        initial: initial states of all sequences; None: zeros. [N, R, K, V]
        states: states before these chunks.

    Returns:
        Values for outputs and backward, and the states after these chunks.
    """

    def step_forward(states: States, chunk: tuple[Any, ...]) -> tuple[States, ScanResult]:
        (sequence, is_first, _), w, u, k_to_end, decay = chunk
        start = jnp.where(is_first, 0 if initial is None else initial[sequence], states.current)
        errors = u - w @ start
        end = decay[..., None] * start + k_to_end.mT @ errors
        return states.after(sequence, end), ScanResult(start, errors)

    states, scanned = jax.lax.scan(step_forward, states, (sequences, terms.w, terms.u, terms.k_to_end, terms.decay))
    return scanned, states


def outputs(terms: ChunkTerms, scanned: ScanResult) -> Float[Array, "n r c v"]:
    """Return the outputs of all tokens."""
    return terms.q_from_start @ scanned.chunk_states + lower_product(terms.a_qk, scanned.errors)


def scan_chunks_backward(
    terms: ChunkTerms,
    sequences: ChunkSequences,
    scanned: ScanResult,
    d_output: Float[Array, "n r c v"],
    d_finals: Float[Array, "s r k v"],
    d_states: States,
) -> tuple[ChunkTerms, States]:
    """Return the gradients of the terms, and of the states before these chunks.

    Args:
        terms: argument of ``scan_chunks``.
        sequences: argument of ``scan_chunks``.
        scanned: result of ``scan_chunks``.
        d_output: gradient of the outputs. [n, R, C, V]
        d_finals: gradient of the final states of all sequences. [N, R, K, V]
        d_states: gradients of the states after these chunks; its ``finals`` collect the gradients of initial states.
    """

    def step_backward(d_states: States, chunk: tuple[Any, ...]) -> tuple[States, tuple[Array, Array]]:
        (sequence, _, is_last), d_errors_output, d_start_output, w, k_to_end, decay = chunk
        d_end = jnp.where(is_last, d_finals[sequence], d_states.current)
        d_errors = d_errors_output + k_to_end @ d_end
        d_start = decay[..., None] * d_end + d_start_output - w.mT @ d_errors
        return d_states.after(sequence, d_start), (d_end, d_errors)

    d_errors_output = terms.a_qk.mT @ d_output  # the parts of both gradients that come from the outputs
    d_start_output = terms.q_from_start.mT @ d_output
    chunks = (sequences, d_errors_output, d_start_output, terms.w, terms.k_to_end, terms.decay)
    d_states, (d_ends, d_errors) = jax.lax.scan(step_backward, d_states, chunks, reverse=True)
    by_channel = terms.decay.shape[-1] > 1
    gradients = ChunkTerms(
        w=-(d_errors @ scanned.chunk_states.mT),
        u=d_errors,
        q_from_start=d_output @ scanned.chunk_states.mT,
        k_to_end=scanned.errors @ d_ends.mT,
        a_qk=d_output @ scanned.errors.mT,
        decay=(scanned.chunk_states * d_ends).sum(-1 if by_channel else (-2, -1)).reshape(terms.decay.shape),
    )
    return gradients, d_states

"""The scan of states over chunks, forward and backward: the only sequential part of the chunked form.

    e = u - w S                       beta-weighted prediction errors of the chunk; v_new in flash-linear-attention
    o = q_from_start S + A_qk e
    S <- diag(decay) S + k_to_end^T e

Backward runs from the last chunk to the first, where dS is the gradient of the final state of a chunk:

    de = A_qk^T do + k_to_end dS
    dS <- diag(decay) dS + q_from_start^T do - w^T de

All other gradients are products of these and the states, computed for all chunks at once.
"""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reference_torch.delta_rule.intra import ChunkTerms, lower_product


class ScanResult(NamedTuple):
    """The results of a scan that outputs and backward need."""

    chunk_states: Float[Tensor, "n r k v"]
    """States before the chunks."""
    errors: Float[Tensor, "n r c v"]
    """Beta-weighted prediction errors of the tokens."""


States = MutableMapping[int, Tensor]
"""State [R, K, V] of each sequence, by its index."""


def scan_chunks(terms: ChunkTerms, sequence_ids: Sequence[int], states: States) -> ScanResult:
    """Scan the states of sequences over their chunks.

    Args:
        terms: terms of n chunks.
        sequence_ids: index of each chunk's sequence. [n]
        states: states before these chunks; changed to the states after them.

    Returns:
        Values for outputs and backward.
    """
    chunk_states = []
    errors = []
    for sequence, w, u, k_to_end, decay in zip(
        sequence_ids, terms.w, terms.u, terms.k_to_end.mT, terms.decay[..., None], strict=True
    ):
        chunk_states.append(states[sequence])
        errors.append(torch.baddbmm(u, w, states[sequence], alpha=-1))
        states[sequence] = torch.baddbmm(states[sequence] * decay, k_to_end, errors[-1])
    return ScanResult(torch.stack(chunk_states), torch.stack(errors))


def outputs(terms: ChunkTerms, scanned: ScanResult) -> Float[Tensor, "n r c v"]:
    """Return the outputs of all tokens."""
    return terms.q_from_start @ scanned.chunk_states + lower_product(terms.a_qk, scanned.errors)


def scan_chunks_backward(
    terms: ChunkTerms, sequence_ids: Sequence[int], scanned: ScanResult, d_output: Tensor, d_states: States
) -> ChunkTerms:
    """Return the gradients of the terms.

    Args:
        terms: argument of ``scan_chunks``.
        sequence_ids: argument of ``scan_chunks``.
        scanned: result of ``scan_chunks``.
        d_output: gradient of the outputs. [n, R, C, V]
        d_states: gradients of the states after these chunks; changed to those of the states before them.
    """
    d_errors_output = terms.a_qk.mT @ d_output  # the parts of both gradients that come from the outputs
    d_start_output = terms.q_from_start.mT @ d_output
    d_ends = []
    d_errors = []
    for chunk, sequence in reversed(list(enumerate(sequence_ids))):
        d_ends.append(d_states[sequence])
        d_errors.append(torch.baddbmm(d_errors_output[chunk], terms.k_to_end[chunk], d_ends[-1]))
        carried = torch.addcmul(d_start_output[chunk], terms.decay[chunk, ..., None], d_ends[-1])
        d_states[sequence] = torch.baddbmm(carried, terms.w[chunk].mT, d_errors[-1], alpha=-1)
    d_after = torch.stack(d_ends[::-1])
    d_u = torch.stack(d_errors[::-1])
    by_channel = terms.decay.shape[-1] > 1
    return ChunkTerms(
        w=-(d_u @ scanned.chunk_states.mT),
        u=d_u,
        q_from_start=d_output @ scanned.chunk_states.mT,
        k_to_end=scanned.errors @ d_after.mT,
        a_qk=d_output @ scanned.errors.mT,
        decay=(scanned.chunk_states * d_after).sum(-1 if by_channel else (-2, -1)).view(terms.decay.shape),
    )

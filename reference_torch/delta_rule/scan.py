"""The scan of states over chunks, forward and backward: the only sequential part of the chunked form.

    e = u - w S                       errors of the chunk
    o = q_decayed S + A_qk e
    S <- diag(decay) S + k_decayed^T e

Backward runs from the last chunk to the first, where dS is the gradient of the final state of a chunk:

    de = A_qk^T do + k_decayed dS
    dS <- diag(decay) dS + q_decayed^T do - w^T de

All other gradients are products of these and the states, computed for all chunks at once.
"""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reference_torch.delta_rule.intra import ChunkTerms, lower_product


class Scanned(NamedTuple):
    """The results of a scan that outputs and backward need."""

    states: Float[Tensor, "n r k v"]
    """Initial states of the chunks."""
    errors: Float[Tensor, "n r c v"]


States = MutableMapping[int, Tensor]
"""State [R, K, V] of each sequence, by its number."""


def scan_chunks(terms: ChunkTerms, owners: Sequence[int], states: States) -> Scanned:
    """Scan the states of sequences over their chunks.

    Args:
        terms: terms of n chunks.
        owners: number of the sequence of each chunk. [n]
        states: states before these chunks; changed to the states after them.

    Returns:
        Values for outputs and backward.
    """
    starts = []
    errors = []
    for owner, w, u, k_decayed, decay in zip(
        owners, terms.w, terms.u, terms.k_decayed.mT, terms.decay[..., None], strict=True
    ):
        starts.append(states[owner])
        errors.append(torch.baddbmm(u, w, states[owner], alpha=-1))
        states[owner] = torch.baddbmm(states[owner] * decay, k_decayed, errors[-1])
    return Scanned(torch.stack(starts), torch.stack(errors))


def outputs(terms: ChunkTerms, scanned: Scanned) -> Float[Tensor, "n r c v"]:
    """Return the outputs of all tokens."""
    return terms.q_decayed @ scanned.states + lower_product(terms.a_qk, scanned.errors)


def scan_chunks_backward(
    terms: ChunkTerms, owners: Sequence[int], scanned: Scanned, d_output: Tensor, d_states: States
) -> ChunkTerms:
    """Return the gradients of the terms.

    Args:
        terms: argument of ``scan_chunks``.
        owners: argument of ``scan_chunks``.
        scanned: result of ``scan_chunks``.
        d_output: gradient of the outputs. [n, R, C, V]
        d_states: gradients of the states after these chunks; changed to those of the states before them.
    """
    d_errors_output = terms.a_qk.mT @ d_output  # the parts of both gradients that come from the outputs
    d_start_output = terms.q_decayed.mT @ d_output
    d_ends = []
    d_errors = []
    for chunk, owner in reversed(list(enumerate(owners))):
        d_ends.append(d_states[owner])
        d_errors.append(torch.baddbmm(d_errors_output[chunk], terms.k_decayed[chunk], d_ends[-1]))
        carried = torch.addcmul(d_start_output[chunk], terms.decay[chunk, ..., None], d_ends[-1])
        d_states[owner] = torch.baddbmm(carried, terms.w[chunk].mT, d_errors[-1], alpha=-1)
    d_after = torch.stack(d_ends[::-1])
    d_u = torch.stack(d_errors[::-1])
    by_channel = terms.decay.shape[-1] > 1
    return ChunkTerms(
        w=-(d_u @ scanned.states.mT),
        u=d_u,
        q_decayed=d_output @ scanned.states.mT,
        k_decayed=scanned.errors @ d_after.mT,
        a_qk=d_output @ scanned.errors.mT,
        decay=(scanned.states * d_after).sum(-1 if by_channel else (-2, -1)).view(terms.decay.shape),
    )

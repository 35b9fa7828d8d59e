"""States through chunks, forward and back: the only part of the chunked form that goes chunk by chunk.

    e = u - w S                       the chunk's errors
    o = q_decayed S + A_qk e
    S <- diag(decay) S + k_decayed^T e

Backward, from the last chunk to the first, dS the gradient of the state a chunk ends with:

    de = A_qk^T do + k_decayed dS
    dS <- diag(decay) dS + q_decayed^T do - w^T de

and all else is a product of these and the states, for all chunks at once.
"""

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from reference_torch.delta_rule.intra import ChunkTerms, lower_product


class Scanned(NamedTuple):
    """What a scan leaves for outputs and backward."""

    states: Float[Tensor, "n r k v"]
    """Those chunks begin with."""
    errors: Float[Tensor, "n r c v"]


States = MutableMapping[int, Tensor]
"""By number of the sequence. [R, K, V]"""


def scan_chunks(terms: ChunkTerms, owners: Sequence[int], states: States) -> Scanned:
    """Take the sequences' states through their chunks.

    Args:
        terms: of n chunks.
        owners: whose they are. [n]
        states: of the owners before; changed to those after.

    Returns:
        What outputs and backward need.
    """
    starts, errors = [], []
    for owner, w, u, k_decayed, decay in zip(
        owners, terms.w, terms.u, terms.k_decayed.mT, terms.decay[..., None], strict=True
    ):
        starts.append(states[owner])
        errors.append(torch.baddbmm(u, w, states[owner], alpha=-1))
        states[owner] = torch.baddbmm(states[owner] * decay, k_decayed, errors[-1])
    return Scanned(torch.stack(starts), torch.stack(errors))


def outputs(terms: ChunkTerms, scanned: Scanned) -> Float[Tensor, "n r c v"]:
    """Of every token."""
    return terms.q_decayed @ scanned.states + lower_product(terms.a_qk, scanned.errors)


def scan_chunks_backward(
    terms: ChunkTerms, owners: Sequence[int], scanned: Scanned, d_output: Tensor, d_states: States
) -> ChunkTerms:
    """Gradients of the terms.

    Args:
        terms: as given to ``scan_chunks``.
        owners: as given to it.
        scanned: as returned by it.
        d_output: gradient of the outputs. [n, R, C, V]
        d_states: gradients of the owners' states after; changed to those of the states before.
    """
    own, into_state = terms.a_qk.mT @ d_output, terms.q_decayed.mT @ d_output
    d_ends, d_errors = [], []
    for chunk, owner in reversed(list(enumerate(owners))):
        d_ends.append(d_states[owner])
        d_errors.append(torch.baddbmm(own[chunk], terms.k_decayed[chunk], d_ends[-1]))
        kept = torch.addcmul(into_state[chunk], terms.decay[chunk, ..., None], d_ends[-1])
        d_states[owner] = torch.baddbmm(kept, terms.w[chunk].mT, d_errors[-1], alpha=-1)
    d_after, d_u = torch.stack(d_ends[::-1]), torch.stack(d_errors[::-1])
    by_channel = terms.decay.shape[-1] > 1
    return ChunkTerms(
        w=-(d_u @ scanned.states.mT),
        u=d_u,
        q_decayed=d_output @ scanned.states.mT,
        k_decayed=scanned.errors @ d_after.mT,
        a_qk=d_output @ scanned.errors.mT,
        decay=(scanned.states * d_after).sum(-1 if by_channel else (-2, -1)).view(terms.decay.shape),
    )

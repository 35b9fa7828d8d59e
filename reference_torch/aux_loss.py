"""The load-balancing loss of mixtures of experts, by token.

Its sum over the tokens of a document is the loss of the document times its length. With E experts of which a token
has k, f[e] is E / k times the share of the document's tokens that have expert e, and p[t, e] is the score of expert e
for token t divided by the sum of the token's scores:

    aux_loss[t] = sum over e of f[e] p[t, e]

It is 1 if all experts have equal scores or equal shares. f is a constant in backward. The mean over tokens of a batch
does not depend on how its documents are distributed over microbatches, replicas and ranks, so all of them add the mean
to their own loss. Between layers and stages, the sum over the layers so far is carried beside the hidden states.
Mirrors ``jax_impl/aux_loss.py``.

Reference: DeepSeek-AI, arXiv 2412.19437, eqs. 17-20 (there by sequence). The loss of Switch Transformers (Fedus et al.,
arXiv 2101.03961, eq. 4), as in transformers, is k times as large, and takes the shares over the whole batch.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from reference_torch.context_parallel import sum_over_ranks
from reference_torch.documents import PackedDocuments

SMALLEST_SUM = 1e-20
"""Added to the sum of a token's scores before the division by it, as in DeepSeek-V3."""


class AuxLossSum:
    """The sum of the load-balancing losses of the layers that have run. A replay of layers in backward adds nothing."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._is_closed = False

    def add(self, aux_loss: Tensor) -> None:
        """Add the load-balancing loss [B, T] of a layer."""
        if not self._is_closed:
            self.total = aux_loss if self.total is None else self.total + aux_loss

    def close(self) -> Tensor | None:
        """Return the sum and release it; later calls of add do nothing."""
        total = self.total
        self.total = None
        self._is_closed = True
        return total


def divided_by_sum(scores: Float[Tensor, "*n e"]) -> Float[Tensor, "*n e"]:
    """Return scores divided by the sum over the last axis plus SMALLEST_SUM. [..., E]."""
    return scores / (scores.sum(-1, keepdim=True) + SMALLEST_SUM)


def token_aux_loss(
    scores: Float[Tensor, "n e"],
    chosen: Int[Tensor, "n k"],
    batch: int,
    sequences: PackedDocuments | FLACPContext | None = None,
) -> Float[Tensor, "b t"]:
    """Return the load-balancing loss of each token.

    Args:
        scores: scores of the experts. [N, E]
        chosen: indices of each token's experts. [N, k]
        batch: number of sequences B; N = B T.
        sequences: the documents of the sequences, or the part of them that this rank holds; None: each sequence is one
            document.

    Returns:
        [B, T]
    """
    documents, count = _documents(len(scores), batch, sequences, scores.device)
    experts = scores.shape[1]
    pairs = (documents[:, None] * experts + chosen).flatten()
    counts = torch.bincount(pairs, minlength=count * experts).view(count, experts)
    if isinstance(sequences, FLACPContext):
        counts = sum_over_ranks(counts, sequences)
    shares = counts.to(scores.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    probabilities = divided_by_sum(scores)
    return experts * (probabilities * shares[documents]).sum(-1).view(batch, -1)


def _documents(
    tokens: int, batch: int, sequences: PackedDocuments | FLACPContext | None, device: torch.device
) -> tuple[Tensor, int]:
    """Return the index of each token's document [N], and the number of documents."""
    places = torch.arange(tokens, device=device)
    if sequences is None:
        return places // (tokens // batch), batch
    if isinstance(sequences, FLACPContext):
        places = places + sequences.rank * tokens
        offsets = sequences.all_cu_seqlens
    else:
        offsets = sequences.cu_seqlens
    offsets = torch.as_tensor(offsets, device=device).long()
    return torch.searchsorted(offsets, places, right=True) - 1, len(offsets) - 1


def join_aux_loss(hidden_states: Tensor, aux_loss: Tensor | None) -> Float[Tensor, "b t w"]:
    """Return hidden states with streams concatenated, and the loss (None: 0) as a last channel [B, T, S * D + 1]."""
    hidden_states = hidden_states.flatten(2)
    channel = hidden_states.new_zeros(hidden_states.shape[:2]) if aux_loss is None else aux_loss.to(hidden_states.dtype)
    return torch.cat([hidden_states, channel[..., None]], dim=-1)


def split_aux_loss(joined: Float[Tensor, "b t w"], streams: int | None) -> tuple[Tensor, Float[Tensor, "b t"]]:
    """Return hidden states [B, T, D], or [B, T, S, D] with streams, and the loss [B, T]; reverses join_aux_loss."""
    hidden_states = joined[..., :-1]
    return hidden_states if streams is None else hidden_states.unflatten(-1, (streams, -1)), joined[..., -1]

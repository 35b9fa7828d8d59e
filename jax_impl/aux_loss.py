"""The load-balancing loss of mixtures of experts, by token.

Its sum over the tokens of a document is the loss of the document times its length. With E experts of which a token
has k, f[e] is E / k times the share of the document's tokens that have expert e, and p[t, e] is the score of expert e
for token t divided by the sum of the token's scores:

    aux_loss[t] = sum over e of f[e] p[t, e]

It is 1 if all experts have equal scores or equal shares. f is a constant in backward. The mean over tokens of a batch
does not depend on how its documents are distributed over microbatches, replicas and ranks, so all of them add the mean
to their own loss. Between layers and stages, the sum over the layers so far is carried beside the hidden states.
Mirrors ``reference_torch/aux_loss.py``.

Reference: DeepSeek-AI, arXiv 2412.19437, eqs. 17-20 (there by sequence). The loss of Switch Transformers (Fedus et al.,
arXiv 2101.03961, eq. 4), as in transformers, is k times as large, and takes the shares over the whole batch.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from diptych.plans.context.sequences import FLACPContext
from jax_impl.context_parallel import sum_over_ranks
from jax_impl.documents import PackedDocuments

SMALLEST_SUM = 1e-20
"""Added to the sum of a token's scores before the division by it, as in DeepSeek-V3."""


class AuxLossSum:
    """The sum of the load-balancing losses of the layers that have run."""

    def __init__(self) -> None:
        self.total: Array | None = None

    def add(self, aux_loss: Array) -> None:
        """Add the load-balancing loss [B, T] of a layer."""
        self.total = aux_loss if self.total is None else self.total + aux_loss

    def close(self) -> Array | None:
        """Return the sum."""
        return self.total


def divided_by_sum(scores: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
    """Return scores divided by the sum over the last axis plus SMALLEST_SUM. [..., E]."""
    return _ratio(scores, scores.sum(-1, keepdims=True) + SMALLEST_SUM)


@jax.custom_jvp
def _ratio(x: Array, total: Array) -> Array:
    """Return x / total; the derivative by JAX would compute total**-2, which overflows for small sums."""
    return x / total


@_ratio.defjvp
def _ratio_derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the ratio and its tangent."""
    x, total = primals
    d_x, d_total = tangents
    y = x / total
    return y, d_x / total - y * (d_total / total)


def token_aux_loss(
    scores: Float[Array, "n e"],
    chosen: Int[Array, "n k"],
    batch: int,
    sequences: PackedDocuments | FLACPContext | None = None,
) -> Float[Array, "b t"]:
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
    documents, count = _documents(len(scores), batch, sequences)
    experts = scores.shape[1]
    pairs = (documents[:, None] * experts + chosen).reshape(-1)
    counts = jnp.bincount(pairs, length=count * experts).reshape(count, experts)
    if isinstance(sequences, FLACPContext):
        counts = sum_over_ranks(counts, sequences)
    shares = counts.astype(scores.dtype) / jnp.maximum(counts.sum(-1, keepdims=True), 1)
    probabilities = divided_by_sum(scores)
    return experts * (probabilities * shares[documents]).sum(-1).reshape(batch, -1)


def _documents(tokens: int, batch: int, sequences: PackedDocuments | FLACPContext | None) -> tuple[Array, int]:
    """Return the index of each token's document [N], and the number of documents."""
    places = jnp.arange(tokens)
    if sequences is None:
        return places // (tokens // batch), batch
    if isinstance(sequences, FLACPContext):
        places = places + sequences.rank * tokens
        offsets = jnp.asarray(sequences.all_cu_seqlens)
    else:
        offsets = sequences.cu_seqlens
    return jnp.searchsorted(offsets, places, side="right") - 1, len(offsets) - 1


def join_aux_loss(hidden_states: Array, aux_loss: Array | None) -> Float[Array, "b t w"]:
    """Return hidden states with streams concatenated, and the loss (None: 0) as a last channel [B, T, S * D + 1]."""
    hidden_states = hidden_states.reshape(*hidden_states.shape[:2], -1)
    channel = jnp.zeros_like(hidden_states[..., 0]) if aux_loss is None else aux_loss.astype(hidden_states.dtype)
    return jnp.concatenate([hidden_states, channel[..., None]], axis=-1)


def split_aux_loss(joined: Float[Array, "b t w"], streams: int | None) -> tuple[Array, Float[Array, "b t"]]:
    """Return hidden states [B, T, D], or [B, T, S, D] with streams, and the loss [B, T]; reverses join_aux_loss."""
    hidden_states = joined[..., :-1]
    if streams is not None:
        hidden_states = hidden_states.reshape(*hidden_states.shape[:2], streams, -1)
    return hidden_states, joined[..., -1]

"""Packed documents: the arrays with which layers keep the documents of one sequence apart.

``diptych/plans/model/documents.py`` defines how a corpus marks the beginnings of documents. Mirrors
``reference_torch/documents.py``.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Int

from diptych.plans.model.documents import check_document_starts


class PackedDocuments(NamedTuple):
    """The positions of documents in a batch."""

    before: Int[Array, "b t"]
    """Number of tokens before each token in its document. [B, T]"""
    cu_seqlens: Int[Array, " n"]
    """Offsets of the documents in the concatenated sequences, and the end. [B * N + 1] int32"""
    mask: Bool[Array, "b t t"] | None
    """True where row t and column s belong to one document, or s > t; None: no layer needs it. [B, T, T]"""


def pack_documents(document_starts: Array | None, inputs: Array, masked: bool) -> PackedDocuments | None:
    """Return the positions of documents for the layers, or None if document_starts is None.

    Args:
        document_starts: see diptych.plans.model.documents. [B, N] int32
        inputs: tokens or hidden states. [B, T, ...]
        masked: compute the mask, which attention layers need.

    Raises:
        ValueError: see diptych.plans.model.documents.check_document_starts; traced values are not checked.
    """
    if document_starts is None:
        return None
    batch, length = inputs.shape[:2]
    values = None if isinstance(document_starts, Tracer) else np.asarray(document_starts)
    check_document_starts(document_starts.shape, document_starts.dtype.name, values, batch, length)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * length
    cu_seqlens = jnp.append((document_starts + rows).reshape(-1), batch * length).astype(jnp.int32)
    starts = document_starts[..., None]
    tokens = jnp.arange(length)
    own = jnp.where(starts <= tokens, starts, 0).max(1)
    return PackedDocuments(tokens - own, cu_seqlens, tokens >= own[..., None] if masked else None)


def combine_masks(
    attention_mask: Bool[Array, "b t t"] | None, documents: PackedDocuments | None
) -> Bool[Array, "b t t"] | None:
    """Return the mask [B, T, T] that allows what both attention_mask and the documents allow; None allows all."""
    mask = None if documents is None else documents.mask
    if attention_mask is None or mask is None:
        return attention_mask if mask is None else mask
    return attention_mask & mask

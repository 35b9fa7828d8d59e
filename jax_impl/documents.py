"""Several documents in one sequence: what the layers need to know to keep them apart.

Twin of ``reference_torch/documents.py``; how a corpus says where documents begin stands in
``diptych/plans/model/documents.py``.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Int

from diptych.plans.model.documents import check_document_starts


class PackedDocuments(NamedTuple):
    """Where the documents of a batch lie."""

    before: Int[Array, "b t"]
    """How many tokens of its document come before each. [B, T]"""
    cu_seqlens: Int[Array, " n"]
    """Where documents begin once sequences are laid end to end, and the end. [B * N + 1] int32"""
    mask: Bool[Array, "b t t"] | None
    """True where row t and column s are of one document, or s follows t; None: no layer asks. [B, T, T]"""


def pack_documents(document_starts: Array | None, inputs: Array, masked: bool) -> PackedDocuments | None:
    """Tell the layers where documents begin; None where nothing tells of documents.

    Args:
        document_starts: see diptych.plans.model.documents. [B, N] int32
        inputs: tokens or hidden states. [B, T, ...]
        masked: some layer asks for the mask.

    Raises:
        ValueError: see diptych.plans.model.documents.check_document_starts; values that are traced are not looked at.
    """
    if document_starts is None:
        return None
    batch, length = inputs.shape[:2]
    values = None if isinstance(document_starts, Tracer) else np.asarray(document_starts)
    check_document_starts(document_starts.shape, document_starts.dtype.name, values, batch, length)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * length
    cu_seqlens = jnp.append((document_starts + rows).reshape(-1), batch * length).astype(jnp.int32)
    starts, tokens = document_starts[..., None], jnp.arange(length)
    own = jnp.where(starts <= tokens, starts, 0).max(1)
    return PackedDocuments(tokens - own, cu_seqlens, tokens >= own[..., None] if masked else None)


def both_masks(
    attention_mask: Bool[Array, "b t t"] | None, documents: PackedDocuments | None
) -> Bool[Array, "b t t"] | None:
    """What attention may look at: what it is told and, of that, what is of the same document. [B, T, T]"""
    mask = None if documents is None else documents.mask
    if attention_mask is None or mask is None:
        return attention_mask if mask is None else mask
    return attention_mask & mask

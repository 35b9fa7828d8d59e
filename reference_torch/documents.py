"""Packed documents: the arrays with which layers keep the documents of one sequence apart.

``diptych/plans/model/documents.py`` defines how a corpus marks the beginnings of documents. Mirrors
``jax_impl/documents.py``.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diptych.plans.model.documents import check_document_starts


class PackedDocuments(NamedTuple):
    """The positions of documents in a batch."""

    before: Int[Tensor, "b t"]
    """Number of tokens before each token in its document. [B, T]"""
    cu_seqlens: Int[Tensor, " n"]
    """Offsets of the documents in the concatenated sequences, and the end. [B * N + 1] int32, on the device of
    document_starts; the host reads it for the delta rule."""
    mask: Bool[Tensor, "b t t"] | None
    """True where row t and column s belong to one document, or s > t; None: no layer needs it. [B, T, T]"""


def pack_documents(document_starts: Tensor | None, inputs: Tensor, masked: bool) -> PackedDocuments | None:
    """Return the positions of documents for the layers, or None if document_starts is None.

    Args:
        document_starts: see diptych.plans.model.documents; fastest on the host. [B, N] int32
        inputs: tokens or hidden states. [B, T, ...]
        masked: compute the mask, which attention layers need.

    Raises:
        ValueError: see diptych.plans.model.documents.check_document_starts.
    """
    if document_starts is None:
        return None
    batch, length = inputs.shape[:2]
    device = inputs.device
    values = document_starts.cpu().numpy()
    dtype = str(document_starts.dtype).removeprefix("torch.")
    check_document_starts(tuple(document_starts.shape), dtype, values, batch, length)
    rows = torch.arange(batch, device=document_starts.device)[:, None] * length
    end = torch.full((1,), batch * length, device=document_starts.device)
    cu_seqlens = torch.cat([(document_starts + rows).flatten(), end]).int()
    starts = document_starts.to(device).long()
    tokens = torch.arange(length, device=device)
    own = torch.where(starts[..., None] <= tokens, starts[..., None], 0).amax(1)
    return PackedDocuments(tokens - own, cu_seqlens, tokens >= own[..., None] if masked else None)


def combine_masks(
    attention_mask: Bool[Tensor, "b t t"] | None, documents: PackedDocuments | None
) -> Bool[Tensor, "b t t"] | None:
    """Return the mask [B, T, T] that allows what both attention_mask and the documents allow; None allows all."""
    mask = None if documents is None else documents.mask
    if attention_mask is None or mask is None:
        return attention_mask if mask is None else mask
    return attention_mask & mask

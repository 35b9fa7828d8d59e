"""Several documents in one sequence: what the layers need to know to keep them apart.

Twin of ``jax_impl/documents.py``; how a corpus says where documents begin stands in
``diptych/plans/model/documents.py``.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diptych.plans.model.documents import check_document_starts


class PackedDocuments(NamedTuple):
    """Where the documents of a batch lie."""

    before: Int[Tensor, "b t"]
    """How many tokens of its document come before each. [B, T]"""
    cu_seqlens: Int[Tensor, " n"]
    """Where documents begin once sequences are laid end to end, and the end. [B * N + 1] int32, where document_starts
    lay: the delta rule reads it on the host."""
    mask: Bool[Tensor, "b t t"] | None
    """True where row t and column s are of one document, or s follows t; None: no layer asks. [B, T, T]"""


def pack_documents(document_starts: Tensor | None, inputs: Tensor, masked: bool) -> PackedDocuments | None:
    """Tell the layers where documents begin; None where nothing tells of documents.

    Args:
        document_starts: see diptych.plans.model.documents; best on the host. [B, N] int32
        inputs: tokens or hidden states. [B, T, ...]
        masked: some layer asks for the mask.

    Raises:
        ValueError: see diptych.plans.model.documents.check_document_starts.
    """
    if document_starts is None:
        return None
    (batch, length), device = inputs.shape[:2], inputs.device
    values, dtype = document_starts.cpu().numpy(), str(document_starts.dtype).removeprefix("torch.")
    check_document_starts(tuple(document_starts.shape), dtype, values, batch, length)
    rows = torch.arange(batch, device=document_starts.device)[:, None] * length
    end = torch.full((1,), batch * length, device=document_starts.device)
    cu_seqlens = torch.cat([(document_starts + rows).flatten(), end]).int()
    starts, tokens = document_starts.to(device).long(), torch.arange(length, device=device)
    own = torch.where(starts[..., None] <= tokens, starts[..., None], 0).amax(1)
    return PackedDocuments(tokens - own, cu_seqlens, tokens >= own[..., None] if masked else None)


def both_masks(
    attention_mask: Bool[Tensor, "b t t"] | None, documents: PackedDocuments | None
) -> Bool[Tensor, "b t t"] | None:
    """What attention may look at: what it is told and, of that, what is of the same document. [B, T, T]"""
    mask = None if documents is None else documents.mask
    if attention_mask is None or mask is None:
        return attention_mask if mask is None else mask
    return attention_mask & mask

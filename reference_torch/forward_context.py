"""The values besides hidden states that a forward pass gives to its layers. Mirrors ``jax_impl/forward_context.py``."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from reference_torch.aux_loss import AuxLossSum
from reference_torch.cache import DecodingCache
from reference_torch.documents import PackedDocuments
from reference_torch.ops import DropoutState
from reference_torch.recompute import SAVE_ALL, BlockRecomputation
from reference_torch.tensor_parallel import UNSHARDED, TensorParallel


class ForwardContext(NamedTuple):
    """The context of one forward pass. Only ``recompute`` differs between its layers."""

    positions: Int[Tensor, " t"]
    """Positions of the tokens within their sequence. [T]"""
    dropout: DropoutState | None = None
    """Dropout state of the batch; None: no dropout."""
    attention_mask: Bool[Tensor, "b t t"] | None = None
    """See ops.causal_attention. [B, T, T]"""
    sequences: PackedDocuments | FLACPContext | None = None
    """The documents in each sequence, or the context-parallel context of this rank. None: each sequence is one document
    and is complete on this rank."""
    cache: DecodingCache | None = None
    """State of the previous tokens, changed in place; None: there are none."""
    aux_loss: AuxLossSum | None = None
    """Sum to which layers of experts add their load-balancing loss; None: they compute none."""
    tensor_parallel: TensorParallel = UNSHARDED
    """The ranks that share the layers."""
    recompute: BlockRecomputation = SAVE_ALL
    """Values to drop after forward, and the manager that recomputes them in backward."""

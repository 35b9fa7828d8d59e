"""The values besides hidden states that a forward pass gives to its layers.

Mirrors ``reference_torch/forward_context.py``.
"""

from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Int

from diptych.plans.context.sequences import FLACPContext
from jax_impl.aux_loss import AuxLossSum
from jax_impl.cache import DecodingCache
from jax_impl.documents import PackedDocuments
from jax_impl.ops import DropoutState
from jax_impl.tensor_parallel import UNSHARDED, TensorParallel


class ForwardContext(NamedTuple):
    """The context of one forward pass, without recompute settings, because jax.checkpoint wraps whole blocks."""

    positions: Int[Array, " t"]
    """Positions of the tokens within their sequence. [T]"""
    dropout: DropoutState | None = None
    """Dropout state of the batch; None: no dropout."""
    attention_mask: Bool[Array, "b t t"] | None = None
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

"""PyTorch's part of notebook 06 that ranks execute. It imports no JAX, so that ranks start quickly."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from reference_torch.context_parallel import build_cp_context, exchange
from reference_torch.delta_rule import chunk_kda

CHUNK = 16
"""Tokens per chunk. XLA compiles chunks of 16 in two thirds of the time of the default."""


def run_part(
    arrays: Sequence[np.ndarray], ranks: int = 1, cp_exchange: str = "all_gather", wrong: bool = False
) -> list[np.ndarray] | None:
    """Return outputs of KDA and gradients of q, k, v, g and beta for this rank's part of the tokens.

    Every rank of the pool has to call it.

    Args:
        arrays: q, k, v, g, beta and a cotangent of the outputs, of all tokens. [1, T, ...]
        ranks: number of ranks that share the tokens. The other ranks of the pool return None.
        cp_exchange: exchange of the states.
        wrong: the failing variant, which exchanges gradients with M in place of its transpose.
    """
    group = None
    if dist.is_initialized():
        found = dist.new_group(list(range(ranks)))
        if dist.get_rank() >= ranks:
            return None
        assert isinstance(found, dist.ProcessGroup)
        group = found
    offsets = torch.tensor([0, arrays[0].shape[1]], dtype=torch.int32)
    context = build_cp_context(offsets, group, cp_exchange=cp_exchange)
    parts = [torch.from_numpy(np.array_split(x, context.size, axis=1)[context.rank].copy()) for x in arrays]
    inputs = [x.requires_grad_() for x in parts[:-1]]
    with mock.patch.object(exchange, "exchange_states", _untransposed) if wrong else nullcontext():
        outputs = chunk_kda(*inputs, cp_context=context, chunk_size=CHUNK)[0]
        gradients = torch.autograd.grad(outputs, inputs, parts[-1])
    return [x.detach().numpy() for x in (outputs, *gradients)]


_exchange_states = exchange.exchange_states


def _untransposed(transition: Any, state: torch.Tensor, context: Any, reverse: bool = False) -> torch.Tensor:
    """Exchange states; in reverse, undo the transposition of M."""
    return _exchange_states(transition.mT if reverse else transition, state, context, reverse=reverse)

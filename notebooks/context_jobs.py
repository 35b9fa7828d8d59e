"""What the ranks of notebook 06 run."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from reference_torch.context_parallel import build_cp_context
from reference_torch.delta_rule import chunk_kda


def layer(arrays: Sequence[np.ndarray], cp_exchange: str = "all_gather") -> list[np.ndarray]:
    """Outputs of KDA and gradients of q, k, v, g, beta under cotangents v, of this rank's part of the tokens."""
    offsets = torch.tensor([0, arrays[0].shape[1]], dtype=torch.int32)
    context = build_cp_context(offsets, dist.group.WORLD if dist.is_initialized() else None, cp_exchange=cp_exchange)
    parts = [np.array_split(x, context.size, axis=1)[context.rank] for x in arrays]
    inputs = [torch.from_numpy(x.copy()).requires_grad_() for x in parts]
    o, _ = chunk_kda(*inputs, cp_context=context)
    return [x.detach().numpy() for x in (o, *torch.autograd.grad(o, inputs, inputs[2].detach()))]

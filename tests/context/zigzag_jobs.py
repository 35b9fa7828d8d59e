"""What ranks run in tests of zigzag attention, and what one process computes."""

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from reference_torch.context_parallel import build_cp_context, cp_attention
from reference_torch.ops import causal_attention

HEADS, GROUPS, WIDTH = 4, 2, 6


class Case(NamedTuple):
    """Attention over sequences."""

    offsets: tuple[int, ...]
    fused: bool = False
    dtype: str = "float64"
    layout: str = "zigzag"

    @property
    def tokens(self) -> int:
        return self.offsets[-1]


def divisions(tokens: int) -> list[tuple[int, ...]]:
    """Where sequences begin: one, several with an empty one and one of a token, all of two tokens or one."""
    return [
        (0, tokens),
        (0, *sorted((1, tokens // 2, tokens // 2, tokens - 1)), tokens),
        (*range(0, tokens, 2), tokens),
    ]


def cases_of(size: int) -> list[Case]:
    """Parts of even length, of odd length, and of one token."""
    found = [Case(cut) for part in (6, 5, 1) for cut in divisions(part * size)]
    return [*found, found[1]._replace(fused=True), found[4]._replace(fused=True)]


def arrays_of(case: Case) -> list[np.ndarray]:
    """The cotangent of the outputs, queries, keys and values; exact in bfloat16."""
    rng = np.random.default_rng(case.tokens)
    heads = (HEADS, HEADS, GROUPS, GROUPS)
    drawn = [rng.standard_normal((1, case.tokens, count, WIDTH)) for count in heads]
    return [torch.from_numpy(x).bfloat16().double().numpy() for x in drawn]


def unsharded(case: Case) -> list[np.ndarray]:
    """Outputs and gradients of q, k and v, sequence by sequence, in float64."""
    cotangent, *arrays = [torch.from_numpy(x).requires_grad_() for x in arrays_of(case)]
    cuts = [(begin, end) for begin, end in itertools.pairwise(case.offsets) if begin < end]
    output = torch.cat([causal_attention(*(x[:, begin:end] for x in arrays)) for begin, end in cuts], dim=1)
    return [output.detach().numpy(), *(x.numpy() for x in torch.autograd.grad(output, arrays, cotangent.detach()))]


def part(case: Case) -> list[np.ndarray]:
    """The same of this rank's tokens."""
    group = dist.group.WORLD if dist.is_initialized() else None
    offsets = torch.tensor(case.offsets, dtype=torch.int32)
    context = build_cp_context(offsets, group, cp_attention_layout=case.layout)
    own = [torch.from_numpy(x).chunk(context.size, dim=1)[context.rank] for x in arrays_of(case)]
    cotangent, *arrays = [x.to(getattr(torch, case.dtype)).clone().requires_grad_() for x in own]
    output = cp_attention(*arrays, context, case.fused)
    found = torch.autograd.grad(output, arrays, cotangent.detach())
    return [x.detach().double().numpy() for x in (output, *found)]


def parts(cases: list[Case]) -> list[Any]:
    """One after the other."""
    return [part(case) for case in cases]


def count_sent(case: Case) -> Counter[str]:
    """Bytes this rank sends from point to point, forward and in all, and FLOPs of its products forward."""
    found: Counter[str] = Counter()
    plain = dist.isend

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found["all"] += tensor.nbytes
        return plain(tensor, *args, **options)

    dist.isend = send
    try:
        context = build_cp_context(
            torch.tensor(case.offsets, dtype=torch.int32), dist.group.WORLD, cp_attention_layout=case.layout
        )
        own = [torch.from_numpy(x).chunk(context.size, dim=1)[context.rank] for x in arrays_of(case)[1:]]
        arrays = [x.clone().requires_grad_() for x in own]
        with FlopCounterMode(display=False) as counter:
            output = cp_attention(*arrays, context, case.fused)
        found["flops"], found["forward"] = counter.get_total_flops(), found["all"]
        output.sum().backward()
    finally:
        dist.isend = plain
    return found

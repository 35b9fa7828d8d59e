"""Before an exchange and after it: what a scan begins with, and how it is completed."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel.exchange import Crossing, ExchangedState, map_passed_on
from reference_torch.context_parallel.wavefront import handed_on, taken


class _Attached(torch.autograd.Function):
    """x itself, and in backward a gradient of 0 for y: every rank takes part in the exchange of gradients."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_x, d_x.new_zeros(ctx.shape, dtype=ctx.dtype)


def with_transition_columns(initial_state: Tensor | None, context: FLACPContext, like: Tensor) -> Tensor | None:
    """What the rank's scan begins with: of a sequence that began on another rank 0 and the identity.

    Args:
        initial_state: of the rank's sequences; that of one which began on another rank is not looked at. [n, HV, K, V]
        context: of the ranks.
        like: a state's shape and type. [HV, K, V]

    Returns:
        As given where the first sequence begins here; else H and M side by side, [n, HV, K, V + K], or without initial
        states those of the first sequence alone, [1, HV, K, V + K].
    """
    if context.is_first_rank:
        return initial_state
    heads, key, _ = like.shape
    identity = torch.eye(key, dtype=like.dtype, device=like.device).expand(heads, -1, -1)
    first = torch.cat([torch.zeros_like(like), identity], dim=-1)[None]
    if initial_state is None:
        return first
    first = _Attached.apply(first, initial_state[:1])
    if len(initial_state) == 1:
        return first
    return torch.cat([first, F.pad(initial_state[1:], (0, key))])


def handed_through(
    initial_state: Tensor | None,
    like: Tensor,
    context: FLACPContext,
    run: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states, pipelined: the first sequence begins with the state that the rank before hands on.

    Args:
        initial_state: as with_transition_columns'.
        like: a state's shape and type. [HV, K, V]
        context: of the ranks.
        run: outputs and final states of initial ones, [n, HV, K, V] each.
        beside: something else that run reads, which has a gradient if anything has; None: nothing has.

    Returns:
        The same; a sequence that goes on on another rank has a final state of 0 here.
    """
    states, last = initial_state, context.num_sequences - 1
    if not context.is_first_rank:
        begun = taken("state", like, like if beside is None else beside, context)[None]
        if states is None:
            states = torch.cat([begun, like.new_zeros(last, *like.shape)])
        else:
            states = torch.cat([_Attached.apply(begun, states[:1]), states[1:]])
    o, finals = run(states)
    if context.is_last_rank:
        return o, finals
    here = torch.cat([finals[:last], torch.zeros_like(finals[last:])])
    o, here = handed_on("state", finals[last], context, o, here)
    return o, here


def complete(
    o: Float[Tensor, "b t h v"],
    transition_output: Float[Tensor, "b u h k"] | None,
    finals: Float[Tensor, "n h k w"],
    crossing: Crossing,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h k v"]]:
    """Outputs and final states, once it is known what the rank's first sequence began with.

    Args:
        o: outputs, those of a first sequence that began on another rank from a state of 0. [1, T, HV, V]
        transition_output: of that sequence's tokens, which come first; None where it begins here. [1, U, HV, K]
        finals: H and M of every sequence, as wide. [n, HV, K, V + K]
        crossing: of the call.

    Returns:
        [1, T, HV, V] and [n, HV, K, V]; a sequence that goes on on another rank has a final state of 0 here.
    """
    context, value = crossing.context, crossing.value
    last = context.num_sequences - 1
    states, transitions = finals[..., :value], finals[..., value:]
    begun = ExchangedState.apply(*map_passed_on(finals, value, context), o, crossing)
    if transition_output is not None:
        tokens = transition_output.shape[1]  # those of other sequences have nothing to do with the state that came
        completed = o[:, :tokens] + torch.einsum("bthk,hkv->bthv", transition_output, begun)
        o = torch.cat([completed, o[:, tokens:]], dim=1)
        states = torch.cat([states[:1] + transitions[:1] @ begun, states[1:]])
    if not context.is_last_rank:
        states = torch.cat([states[:last], torch.zeros_like(states[last:])])
    return _Attached.apply(o, begun), _Attached.apply(states, begun)

"""The scan of a rank's part before and after the exchange of states: its initial states, and the completed outputs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel.exchange import ExchangedState, StateExchange, map_to_send
from reference_torch.context_parallel.wavefront import receive_from_previous, send_to_next


class _AttachToGraph(torch.autograd.Function):
    """The identity of x, whose backward gives y a gradient of 0, so that every rank takes part in the exchange."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.shape = y.shape
        ctx.dtype = y.dtype
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_x, d_x.new_zeros(ctx.shape, dtype=ctx.dtype)


def with_transition_columns(initial_state: Tensor | None, context: FLACPContext, like: Tensor) -> Tensor | None:
    """Return the initial states of the scan: 0 and the identity for a sequence that begins on an earlier rank.

    Transition columns are explained in delta_rule/chunked.py.

    Args:
        initial_state: initial states of the rank's sequences; None: zeros. [n, HV, K, V]
        context: context of the rank.
        like: array with the shape and type of a state. [HV, K, V]

    Returns:
        initial_state if the first sequence begins on this rank. Otherwise states with transition columns
        [n, HV, K, V + K], or only that of the first sequence [1, HV, K, V + K] if initial_state is None.
    """
    if context.is_first_rank:
        return initial_state
    heads, key, _ = like.shape
    identity = torch.eye(key, dtype=like.dtype, device=like.device).expand(heads, -1, -1)
    first = torch.cat([torch.zeros_like(like), identity], dim=-1)[None]
    if initial_state is None:
        return first
    first = _AttachToGraph.apply(first, initial_state[:1])
    if len(initial_state) == 1:
        return first
    return torch.cat([first, F.pad(initial_state[1:], (0, key))])


def run_pipelined(
    initial_state: Tensor | None,
    like: Tensor,
    context: FLACPContext,
    run: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    anchor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a part after the previous rank: receive the first state from it, and send the last state to the next rank.

    Args:
        initial_state: see with_transition_columns. [n, HV, K, V]
        like: array with the shape and type of a state. [HV, K, V]
        context: context of the rank.
        run: function that returns outputs and final states from initial states. [n, HV, K, V]
        anchor: another argument of run that requires a gradient, if one does; autograd needs it to reach the received
            state in backward.

    Returns:
        Outputs and final states; the final state of a sequence that continues on the next rank is 0.
    """
    states = initial_state
    last = context.num_sequences - 1
    if not context.is_first_rank:
        received = receive_from_previous("state", like, like if anchor is None else anchor, context)[None]
        if states is None:
            states = torch.cat([received, like.new_zeros(last, *like.shape)])
        else:
            states = torch.cat([_AttachToGraph.apply(received, states[:1]), states[1:]])
    o, finals = run(states)
    if context.is_last_rank:
        return o, finals
    ended = torch.cat([finals[:last], torch.zeros_like(finals[last:])])
    o, ended = send_to_next("state", finals[last], context, o, ended)
    return o, ended


def complete(
    o: Float[Tensor, "b t h v"],
    transition_output: Float[Tensor, "b u h k"] | None,
    finals: Float[Tensor, "n h k w"],
    exchange: StateExchange,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h k v"]]:
    """Exchange states between ranks, and return the completed outputs and final states.

    Args:
        o: outputs of a scan from a state of 0 for a sequence that begins on an earlier rank. [1, T, HV, V]
        transition_output: transition columns R of the outputs of that sequence, the first U tokens; None if the first
            sequence begins on this rank. [1, U, HV, K]
        finals: final states S_local with transition columns M. [n, HV, K, V + K]
        exchange: exchange of the call.

    Returns:
        Outputs [1, T, HV, V] and final states [n, HV, K, V]; the final state of a sequence that continues on the next
        rank is 0.
    """
    context = exchange.context
    value = exchange.value
    last = context.num_sequences - 1
    states = finals[..., :value]
    transitions = finals[..., value:]
    received = ExchangedState.apply(*map_to_send(finals, value, context), o, exchange)
    if transition_output is not None:
        tokens = transition_output.shape[1]  # the tokens of other sequences do not depend on the received state
        completed = o[:, :tokens] + torch.einsum("bthk,hkv->bthv", transition_output, received)
        o = torch.cat([completed, o[:, tokens:]], dim=1)
        states = torch.cat([states[:1] + transitions[:1] @ received, states[1:]])
    if not context.is_last_rank:
        states = torch.cat([states[:last], torch.zeros_like(states[last:])])
    return _AttachToGraph.apply(o, received), _AttachToGraph.apply(states, received)

"""The delta rule by the shared Triton kernels: preparation of their arguments, and the exchange between ranks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.delta_rule import DeltaRuleOptions, chunk_tables
from diptych.plans.model.implementation import kernel_chunk_size
from diptych_kernels.delta_rule.autodiff_rules import BoundarySequences
from reference_torch.context_parallel.exchange import exchange_states, map_to_send
from reference_torch.delta_rule.chunked import Arguments
from reference_torch.delta_rule.gates import apply_norm_and_gate


def chunked_by_kernels(
    kernels: Any,
    arguments: Arguments,
    initial_state: Tensor | None,
    options: DeltaRuleOptions,
    cu_seqlens: np.ndarray | None,
    recompute: bool,
    context: FLACPContext | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and final states, computed by the kernels.

    ``kernels`` is the module from ops.kernel_backend. The other arguments are those of chunk_kda, already checked.
    """
    v = arguments.v
    q, k, g = apply_norm_and_gate(arguments.q, arguments.k, arguments.g, arguments.A_log, arguments.dt_bias, options)
    size = kernel_chunk_size(options.chunk_size)
    tables = chunk_tables(np.arange(len(q) + 1) * q.shape[1] if cu_seqlens is None else cu_seqlens, size)
    scale = options.scale_of(q.shape[-1])
    call: list[Any] = [q, k, v, g, arguments.beta, initial_state, tables, size, scale, recompute]
    if context is not None:
        exchange = KernelExchange(context, v.shape[-1])
        call += [exchange, _boundary_sequences(context, initial_state, tables.sequences, k, v)]
    return kernels.delta_rule(*call)


def _boundary_sequences(
    context: FLACPContext, initial_state: Tensor | None, sequences: np.ndarray, k: Tensor, v: Tensor
) -> BoundarySequences:
    """Return this rank's first and last sequence; it has no tokens if it starts (first) or ends (last) on this rank."""
    first = sequences[0] * (not context.is_first_rank)
    last = sequences[-1] * (not context.is_last_rank)
    dtype = torch.promote_types(v.dtype, torch.float32)
    initial = v.new_zeros(1, v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)
    if initial_state is not None and (context.is_first_rank or context.num_sequences > 1):
        initial = initial_state[-1:].detach()
    return BoundarySequences(initial, np.stack([first, last]), None)


class KernelExchange:
    """The exchange between ranks; see diptych_kernels.delta_rule.autodiff_rules.KernelStateExchange.

    The context holds this rank's roles, so the argument roles is None.
    """

    def __init__(self, context: FLACPContext, value: int) -> None:
        self.context = context
        self.value = value
        """Width V of the values."""

    def exchange_forward(self, maps: Tensor, roles: None) -> Tensor:
        """Return the initial state of the first sequence; see KernelStateExchange.exchange_forward."""
        del roles
        return exchange_states(*map_to_send(maps, self.value, self.context), self.context)

    def exchange_backward(self, maps: Tensor, d_received: Tensor, roles: None) -> Tensor:
        """Return the gradient of the final state of the last sequence; see KernelStateExchange.exchange_backward."""
        del roles
        d_received = torch.zeros_like(d_received) if self.context.is_first_rank else d_received
        return exchange_states(
            map_to_send(maps, self.value, self.context)[0].mT, d_received, self.context, reverse=True
        )

    def with_first(self, states: Tensor, first: Tensor | None, roles: None) -> Tensor:
        """Replace the first of the states if its sequence starts on another rank."""
        del roles
        if self.context.is_first_rank:
            return states
        return torch.cat([torch.zeros_like(states[:1]) if first is None else first[None], states[1:]])

    def with_last(self, states: Tensor, last: Tensor | None, roles: None) -> Tensor:
        """Replace the last of the states if its sequence continues on another rank."""
        del roles
        if self.context.is_last_rank:
            return states
        return torch.cat([states[:-1], torch.zeros_like(states[-1:]) if last is None else last[None]])

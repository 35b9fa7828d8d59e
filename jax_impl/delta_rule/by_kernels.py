"""The delta rule by the shared Triton kernels: preparation of their arguments, and the exchange between ranks."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.delta_rule import ChunkTables, DeltaRuleOptions, chunk_tables, most_chunks
from diptych.plans.model.implementation import kernel_chunk_size
from diptych_kernels.delta_rule.autodiff_rules import BoundarySequences
from jax_impl.context_parallel.exchange import Reach, StaticContext, exchange_over, reach_of, static_context
from jax_impl.delta_rule.chunked import Arguments
from jax_impl.delta_rule.gates import apply_norm_and_gate


def chunked_by_kernels(
    kernels: Any,
    arguments: Arguments,
    initial_state: Array | None,
    options: DeltaRuleOptions,
    cu_seqlens: Array | np.ndarray | None,
    recompute: bool,
    context: FLACPContext | None = None,
) -> tuple[Array, Array]:
    """Return outputs and final states, computed by the kernels.

    ``kernels`` is the module from ops.kernel_backend. The other arguments are those of chunk_kda, already checked.
    """
    q, k, v, g, beta, A_log, dt_bias = arguments
    q, k, g = apply_norm_and_gate(q, k, g, A_log, dt_bias, options)
    size = kernel_chunk_size(options.chunk_size)
    tables = _tables(cu_seqlens, len(q), q.shape[1], size)
    scale = options.scale_of(q.shape[-1])
    call: list[Any] = [q, k, v, g, beta, initial_state, tables, size, scale, recompute]
    if context is not None:
        exchange = KernelExchange(static_context(context), v.shape[-1])
        call += [exchange, _boundary_sequences(context, initial_state, tables.sequences, k, v)]
    return kernels.delta_rule(*call)


def _tables(cu_seqlens: Array | np.ndarray | None, rows: int, length: int, size: int) -> ChunkTables:
    """Return the tables of chunks; their length is an upper bound if the offsets are traced."""
    if isinstance(cu_seqlens, Tracer):
        return chunk_tables(cu_seqlens, size, most_chunks(length, len(cu_seqlens) - 1, size), jnp)
    return chunk_tables(np.arange(rows + 1) * length if cu_seqlens is None else np.asarray(cu_seqlens), size)


def _boundary_sequences(
    context: FLACPContext, initial_state: Array | None, sequences: Array, k: Array, v: Array
) -> BoundarySequences:
    """Return first and last sequence; a first one that begins here, or a last one that ends here, has no tokens."""
    last = context.num_sequences - 1
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    key = k.shape[-1]
    width = v.shape[-1]
    begins_here = context.is_first_rank | (last > 0)
    state = jnp.zeros((v.shape[2], key, width), dtype)
    if initial_state is not None:
        state = jnp.where(begins_here, lax.stop_gradient(initial_state)[last], 0)
    sequences = jnp.asarray(sequences)
    boundaries = [
        jnp.where(context.is_first_rank, 0, sequences[0]),
        jnp.where(context.is_last_rank, 0, sequences[last]),
    ]
    roles = _Roles(~context.is_first_rank, ~context.is_last_rank, jnp.asarray(last), *reach_of(context))
    roles = jnp.stack([jnp.asarray(role).astype(jnp.int32) for role in roles])
    return BoundarySequences(state[None], jnp.stack(boundaries), roles)


class _Roles(NamedTuple):
    """Where the boundary sequences of a rank begin and end; the kernels' backend passes it as one array [6] int32."""

    begins_earlier: Array
    """1 if the first sequence begins on an earlier rank. []"""
    ends_later: Array
    """1 if the last sequence continues on a later rank. []"""
    last: Array
    """Index of the last sequence. []"""
    before: Array
    """See Reach, as for the fields below. []"""
    after: Array
    goes_through: Array

    @property
    def reach(self) -> Reach:
        """The reach of the rank."""
        return Reach(self.before, self.after, self.goes_through > 0)


class KernelExchange(NamedTuple):
    """The exchange between ranks; see diptych_kernels.delta_rule.autodiff_rules.KernelStateExchange.

    ``roles`` [6] int32 holds the fields of _Roles.
    """

    context: StaticContext
    value: int
    """Width V of the values."""

    def exchange_forward(self, maps: Array, roles: Array) -> Array:
        """Return the initial state of the first sequence; see KernelStateExchange.exchange_forward."""
        named = _Roles(*roles)
        return exchange_over(*self._sent_map(maps, named), self.context, named.reach)

    def exchange_backward(self, maps: Array, d_received: Array, roles: Array) -> Array:
        """Return the gradient of the final state of the last sequence; see KernelStateExchange.exchange_backward."""
        named = _Roles(*roles)
        transition, _ = self._sent_map(maps, named)
        d_received = jnp.where(named.begins_earlier > 0, d_received, 0)
        return exchange_over(transition.mT, d_received, self.context, named.reach, reverse=True)

    def with_first(self, states: Array, first: Array | None, roles: Array) -> Array:
        """Replace the first state by ``first`` (None: 0) if its sequence starts on another rank."""
        named = _Roles(*roles)
        return states.at[0].set(jnp.where(named.begins_earlier > 0, 0 if first is None else first, states[0]))

    def with_last(self, states: Array, last: Array | None, roles: Array) -> Array:
        """Replace the last state by ``last`` (None: 0) if its sequence continues on another rank."""
        named = _Roles(*roles)
        new = jnp.where(named.ends_later > 0, 0 if last is None else last, states[named.last])
        return states.at[named.last].set(new)

    def _sent_map(self, maps: Array, roles: _Roles) -> tuple[Array, Array]:
        """Return M and S_local that this rank sends, with zeros for the parts that it does not send."""
        state = maps[0, ..., : self.value]
        transition = maps[0, ..., self.value :]
        return jnp.where(roles.reach.goes_through, transition, 0), jnp.where(roles.ends_later > 0, state, 0)

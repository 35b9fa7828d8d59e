"""The exchange of states between ranks: its algorithms and gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.context.exchange import check_joint_exchange, scan_steps
from diptych.plans.context.sequences import FLACPContext
from jax_impl.context_parallel.approximate import LowRank, low_rank, state_of_nearest


def exchange_states(
    transition: Float[Array, "h k k"], state: Float[Array, "h k v"], context: FLACPContext, reverse: bool = False
) -> Float[Array, "h k v"]:
    """Return the initial state S of this rank, by composing the maps S -> M S + S_local of the ranks before it.

    Args:
        transition: M; 0 if the final state does not depend on the initial state. [HV, K, K]
        state: S_local. [HV, K, V]
        context: context of the rank.
        reverse: compose the maps of the ranks after this rank, from the last.

    Returns:
        S; 0 on the first rank, or with reverse on the last. [HV, K, V]

    Raises:
        ValueError: the context has cp_exchange "pipelined".
    """
    return exchange_over(transition, state, static_context(context), reach_of(context), reverse)


class Reach(NamedTuple):
    """The ranks that share the first and the last sequence of a rank; see FLACPContext.

    These values select states. States of other sequences may not be finite, so they must not be multiplied by 0.
    """

    before: Array
    """Number of ranks before this rank that its initial state depends on. []"""
    after: Array
    """Number of ranks after this rank that the gradient of its final state depends on. []"""
    goes_through: Array
    """True if the final state depends on the initial state. []"""


def reach_of(context: FLACPContext) -> Reach:
    """Return the reach of a context."""
    return Reach(*(jnp.asarray(x) for x in (context.reach(), context.reach(reverse=True), context.goes_through)))


class StaticContext(NamedTuple):
    """The static part of FLACPContext."""

    group: str
    size: int
    exchange: str
    wire_dtype: str | None
    by_groups: bool
    truncate_ranks: int | None = None
    transition_rank: int | None = None


def static_context(context: FLACPContext) -> StaticContext:
    """Return the static part of a context."""
    return StaticContext(
        group=context.group,
        size=context.size,
        exchange=context.cp_exchange,
        wire_dtype=context.cp_wire_dtype,
        by_groups=context.by_groups,
        truncate_ranks=context.cp_truncate_ranks,
        transition_rank=context.cp_transition_rank,
    )


def exchange_over(
    transition: Array | LowRank, state: Array, context: StaticContext, reach: Reach, reverse: bool = False
) -> Array:
    """Run exchange_states from the static part of a context; with all_gather the transition may be a LowRank."""
    check_joint_exchange(context.exchange)
    if context.size == 1:
        return jnp.zeros_like(state)
    rank = lax.axis_index(context.group)
    run = {"all_gather": _all_gather, "ring": _ring, "scan": _prefix_scan}[context.exchange]
    return run(transition, state, context, reach, context.size - 1 - rank if reverse else rank, reverse)


def _all_gather(
    transition: Array | LowRank, state: Array, context: StaticContext, reach: Reach, position: Array, reverse: bool
) -> Array:
    """Gather the maps of all ranks, and compose those before this rank."""
    is_narrow = isinstance(transition, LowRank)
    packed = _gather(jnp.concatenate([state, transition.packed() if is_narrow else transition], axis=-1), context)
    if reverse:
        packed = packed[::-1]
    initial = jnp.zeros_like(state)
    width = state.shape[-1]
    first = position - (reach.after if reverse else reach.before)
    for index in range(context.size - 1):
        own = packed[index, ..., :width]
        map_ = packed[index, ..., width:]
        after = (LowRank.unpacked(map_).times(initial) if is_narrow else map_ @ initial) + own
        after = jnp.where(index == first, own, after)  # the sequence begins on this rank
        initial = jnp.where((first <= index) & (index < position), after, initial)
    return initial


def _ring(
    transition: Array, state: Array, context: StaticContext, reach: Reach, position: Array, reverse: bool
) -> Array:
    """Receive the initial state from the previous rank, and send M S + S_local to the next, one rank after another."""
    initial = jnp.zeros_like(state)
    for sender in range(context.size - 1):
        after = jnp.where(reach.goes_through, transition @ initial + state, state)
        received = permute(after, context, _pairs([(sender, sender + 1)], context.size, reverse))
        initial = jnp.where(position == sender + 1, received, initial)
    return initial


def _prefix_scan(
    transition: Array, state: Array, context: StaticContext, reach: Reach, position: Array, reverse: bool
) -> Array:
    """Compose the maps in about log2(size) steps; the distance between sender and receiver doubles (Hillis-Steele)."""
    for index, step in enumerate(scan_steps(context.size)):
        pairs = _pairs(step.pairs(context.size), context.size, reverse)
        received = permute(state, context, pairs)
        composed = received if step.is_last else permute(transition, context, pairs)
        if index == 0:  # each rank sends its own map to the next rank; the first rank receives zeros
            state = received
            transition = composed
            continue
        receives = position >= step.distance + step.first_sender
        receives &= step.distance < (reach.after if reverse else reach.before)
        state = jnp.where(receives, transition @ received + state, state)
        if not step.is_last:
            transition = jnp.where(receives, transition @ composed, transition)
    return state


def _pairs(pairs: list[tuple[int, int]], size: int, reverse: bool) -> list[tuple[int, int]]:
    """Return the ranks of senders and receivers from their positions, which count from the last rank if reverse."""
    return [(size - 1 - a, size - 1 - b) for a, b in pairs] if reverse else pairs


def sum_over_ranks(x: Array, context: FLACPContext) -> Array:
    """Return the sum over all ranks of an array that gets no gradient; all ranks have to call this function."""
    return lax.all_gather(x, context.group).sum(0).astype(x.dtype)


def permute(x: Array, context: StaticContext, pairs: list[tuple[int, int]]) -> Array:
    """Return the array of the sender, or 0 on a rank without one.

    Args:
        x: array of this rank.
        context: static part of the context.
        pairs: senders and receivers.
    """
    if not context.by_groups:
        return lax.ppermute(_on_wire(x, context), context.group, pairs).astype(x.dtype)
    senders = np.full(context.size, -1)
    senders[[receiver for _, receiver in pairs]] = [sender for sender, _ in pairs]
    sender = jnp.asarray(senders)[lax.axis_index(context.group)]
    return jnp.where(sender < 0, 0, _gather(x, context)[sender])


def _gather(x: Array, context: StaticContext) -> Array:
    """Gather the arrays of all ranks on every rank."""
    return lax.all_gather(_on_wire(x, context), context.group).astype(x.dtype)


def _on_wire(x: Array, context: StaticContext) -> Array:
    """Convert an array to the type in which it is sent."""
    return x if context.wire_dtype is None else x.astype(context.wire_dtype)


def run_exchange(
    transition: Array, state: Array, log_decay: Array | None, context: StaticContext, reach: Reach
) -> Array:
    """Run exchange_states, or the approximation that the context selects.

    Args:
        transition: M. [HV, K, K]
        state: S_local. [HV, K, V]
        log_decay: sum of the log decays of the part, for cp_transition_rank. [HV, K] or [HV, 1]
        context: static part of the context.
        reach: reach of this rank's state.
    """
    if context.truncate_ranks is None or context.size == 1:
        return _exchanged(transition, state, log_decay, reach, context)
    pairs = [(rank, rank + 1) for rank in range(context.size - 1)]
    rounds = min(context.truncate_ranks, context.size - 1)
    return state_of_nearest(transition, state, reach.goes_through, rounds, lambda x: permute(x, context, pairs))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _exchanged(transition: Array, state: Array, log_decay: Array | None, reach: Reach, context: StaticContext) -> Array:
    """Exchange states, with their gradients.

    The gradient of a rank's S_local is exchange_states in reverse, with M^T for M and the gradient of S for S_local.
    The gradient of its M is the gradient of S_local times S^T.
    """
    return _exchanged_forward(transition, state, log_decay, reach, context)[0]


Saved = tuple[Array | LowRank, Array, Array | None, Reach]
"""M as it was sent, the initial state of this rank, the log decay (without gradient), and the rank's reach."""


def _exchanged_forward(
    transition: Array, state: Array, log_decay: Array | None, reach: Reach, context: StaticContext
) -> tuple[Array, Saved]:
    """Exchange states, and save what the gradients need."""
    sent: Array | LowRank = transition
    if context.transition_rank is not None and log_decay is not None:
        sent = low_rank(transition, log_decay, context.transition_rank)
    initial = exchange_over(sent, state, context, reach, reverse=False)
    return initial, (sent, initial, log_decay, reach)


def _exchanged_backward(
    context: StaticContext, saved: Saved, d_initial: Array
) -> tuple[Array, Array, Array | None, None]:
    """Exchange gradients in reverse; see _exchanged."""
    sent, initial, log_decay, reach = saved
    d_state = exchange_over(sent.mT, d_initial, context, reach, reverse=True)
    return d_state @ initial.mT, d_state, None if log_decay is None else jnp.zeros_like(log_decay), None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


class StateExchange(NamedTuple):
    """The exchange of states of one call; XLA can overlap it with the computation of outputs."""

    context: FLACPContext
    value: int
    """Width V."""
    log_decay: Array | None = None
    """Sum of the log decays of the part, for cp_transition_rank. [HV, K] or [HV, 1]"""

"""How states go from rank to rank: the exchanges, and their gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.context.exchange import check_together, scan_steps
from diptych.plans.context.sequences import FLACPContext
from jax_impl.context_parallel.approximate import LowRank, low_rank, state_of_nearest


def exchange_states(
    transition: Float[Array, "h k k"], state: Float[Array, "h k v"], context: FLACPContext, reverse: bool = False
) -> Float[Array, "h k v"]:
    """The state each rank begins with, of S -> M S + H over the ranks before it.

    Args:
        transition: M; 0 where the state passed on does not depend on the one begun with. [HV, K, K]
        state: H. [HV, K, V]
        context: of the ranks.
        reverse: over the ranks after it, from the last.

    Returns:
        S, 0 on the first rank.
    """
    return exchange_over(transition, state, ranks_of(context), reach_of(context), reverse)


class Reach(NamedTuple):
    """What a rank knows of the sequences its state comes from and goes to; see FLACPContext.

    What a state does not depend on is selected away by these, not multiplied by 0: it may not be finite.
    """

    before: Array
    """Ranks before that the state begun with depends on. []"""
    after: Array
    """Ranks after that the gradient of the state passed on depends on. []"""
    goes_through: Array
    """Whether the state passed on depends on the one begun with. []"""


def reach_of(context: FLACPContext) -> Reach:
    """Of a context."""
    return Reach(*(jnp.asarray(x) for x in (context.reach(), context.reach(reverse=True), context.goes_through)))


class Ranks(NamedTuple):
    """What is known of them before the program runs; of FLACPContext."""

    group: str
    size: int
    exchange: str
    wire_dtype: str | None
    by_groups: bool
    truncate_ranks: int | None = None
    transition_rank: int | None = None


def ranks_of(context: FLACPContext) -> Ranks:
    """Of a context."""
    how = context.cp_exchange, context.cp_wire_dtype, context.by_groups
    return Ranks(context.group, context.size, *how, context.cp_truncate_ranks, context.cp_transition_rank)


def exchange_over(
    transition: Array | LowRank, state: Array, ranks: Ranks, reach: Reach, reverse: bool = False
) -> Array:
    """exchange_states, of ranks; gathered, maps may be of low rank."""
    check_together(ranks.exchange)
    if ranks.size == 1:
        return jnp.zeros_like(state)
    rank = lax.axis_index(ranks.group)
    run = {"all_gather": _gathered, "ring": _passed_on, "scan": _scanned}[ranks.exchange]
    return run(transition, state, ranks, reach, ranks.size - 1 - rank if reverse else rank, reverse)


def _gathered(
    transition: Array | LowRank, state: Array, ranks: Ranks, reach: Reach, place: Array, reverse: bool
) -> Array:
    is_narrow = isinstance(transition, LowRank)
    packed = _everywhere(jnp.concatenate([state, transition.packed() if is_narrow else transition], axis=-1), ranks)
    if reverse:
        packed = packed[::-1]
    found, width, first = jnp.zeros_like(state), state.shape[-1], place - (reach.after if reverse else reach.before)
    for number in range(ranks.size - 1):
        own, map_ = packed[number, ..., :width], packed[number, ..., width:]
        after = (LowRank.unpacked(map_).times(found) if is_narrow else map_ @ found) + own
        after = jnp.where(number == first, own, after)  # the sequence begins there
        found = jnp.where((first <= number) & (number < place), after, found)
    return found


def _passed_on(transition: Array, state: Array, ranks: Ranks, reach: Reach, place: Array, reverse: bool) -> Array:
    found = jnp.zeros_like(state)
    for sender in range(ranks.size - 1):
        after = jnp.where(reach.goes_through, transition @ found + state, state)
        came = permute(after, ranks, _pairs([(sender, sender + 1)], ranks.size, reverse))
        found = jnp.where(place == sender + 1, came, found)
    return found


def _scanned(transition: Array, state: Array, ranks: Ranks, reach: Reach, place: Array, reverse: bool) -> Array:
    for number, step in enumerate(scan_steps(ranks.size)):
        pairs = _pairs(step.pairs(ranks.size), ranks.size, reverse)
        came = permute(state, ranks, pairs)
        composed = came if step.is_last else permute(transition, ranks, pairs)
        if number == 0:  # everyone's own map goes one rank on; the first has none
            state, transition = came, composed
            continue
        receives = place >= step.distance + step.first_sender
        receives &= step.distance < (reach.after if reverse else reach.before)
        state = jnp.where(receives, transition @ came + state, state)
        if not step.is_last:
            transition = jnp.where(receives, transition @ composed, transition)
    return state


def _pairs(pairs: list[tuple[int, int]], size: int, reverse: bool) -> list[tuple[int, int]]:
    """Ranks of senders and receivers, which are counted from the first rank, or from the last."""
    return [(size - 1 - a, size - 1 - b) for a, b in pairs] if reverse else pairs


def permute(x: Array, ranks: Ranks, pairs: list[tuple[int, int]]) -> Array:
    """What comes from the sender; 0 where nothing does."""
    if not ranks.by_groups:
        return lax.ppermute(_on_wire(x, ranks), ranks.group, pairs).astype(x.dtype)
    senders = np.full(ranks.size, -1)
    senders[[receiver for _, receiver in pairs]] = [sender for sender, _ in pairs]
    sender = jnp.asarray(senders)[lax.axis_index(ranks.group)]
    return jnp.where(sender < 0, 0, _everywhere(x, ranks)[sender])


def _everywhere(x: Array, ranks: Ranks) -> Array:
    """Every rank's, on every rank."""
    return lax.all_gather(_on_wire(x, ranks), ranks.group).astype(x.dtype)


def _on_wire(x: Array, ranks: Ranks) -> Array:
    """As it is sent."""
    return x if ranks.wire_dtype is None else x.astype(ranks.wire_dtype)


def pass_states(transition: Array, state: Array, log_decay: Array | None, ranks: Ranks, reach: Reach) -> Array:
    """exchange_states, or what the context approximates it by.

    Args:
        transition, state: M [HV, K, K] and H [HV, K, V].
        log_decay: sum of the log decays of M's tokens, for a low rank. [HV, K] or [HV, 1]
        ranks, reach: of the context.
    """
    if ranks.truncate_ranks is None or ranks.size == 1:
        return _exchanged(transition, state, log_decay, reach, ranks)
    pairs = [(rank, rank + 1) for rank in range(ranks.size - 1)]
    rounds = min(ranks.truncate_ranks, ranks.size - 1)
    return state_of_nearest(transition, state, reach.goes_through, rounds, lambda x: permute(x, ranks, pairs))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _exchanged(transition: Array, state: Array, log_decay: Array | None, reach: Reach, ranks: Ranks) -> Array:
    """Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and of the gradients
    of S over the ranks after it, and that of its M is this times S^T."""
    return _exchanged_forward(transition, state, log_decay, reach, ranks)[0]


Kept = tuple[Array | LowRank, Array, Array | None, Reach]
"""M as it was sent, what was found, the log decay, which gets no gradient, and the rank's reach."""


def _exchanged_forward(
    transition: Array, state: Array, log_decay: Array | None, reach: Reach, ranks: Ranks
) -> tuple[Array, Kept]:
    sent: Array | LowRank = transition
    if ranks.transition_rank is not None and log_decay is not None:
        sent = low_rank(transition, log_decay, ranks.transition_rank)
    found = exchange_over(sent, state, ranks, reach, reverse=False)
    return found, (sent, found, log_decay, reach)


def _exchanged_backward(ranks: Ranks, kept: Kept, d_found: Array) -> tuple[Array, Array, Array | None, None]:
    sent, found, log_decay, reach = kept
    passed_back = exchange_over(sent.mT, d_found, ranks, reach, reverse=True)
    return passed_back @ found.mT, passed_back, None if log_decay is None else jnp.zeros_like(log_decay), None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


class Crossing(NamedTuple):
    """One exchange of a call. When it travels is the compiler's to say: outputs do not depend on it until the last."""

    context: FLACPContext
    value: int
    """Width V."""
    log_decay: Array | None = None
    """Sum of the log decays of the part, for a map of low rank. [HV, K] or [HV, 1]"""

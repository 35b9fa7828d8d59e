"""How states go from rank to rank: the exchanges, and their gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from plans.context import FLACPContext, scan_steps


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
    return exchange_over(transition, state, ranks_of(context), reverse)


class Ranks(NamedTuple):
    """What is known of them before the program runs; of FLACPContext."""

    group: str
    size: int
    exchange: str
    wire_dtype: str | None
    by_groups: bool


def ranks_of(context: FLACPContext) -> Ranks:
    """Of a context."""
    return Ranks(context.group, context.size, context.cp_exchange, context.cp_wire_dtype, context.by_groups)


def exchange_over(transition: Array, state: Array, ranks: Ranks, reverse: bool = False) -> Array:
    """exchange_states, of ranks."""
    if ranks.size == 1:
        return jnp.zeros_like(state)
    rank = lax.axis_index(ranks.group)
    run = {"all_gather": _gathered, "ring": _passed_on, "scan": _scanned}[ranks.exchange]
    return run(transition, state, ranks, ranks.size - 1 - rank if reverse else rank, reverse)


def _gathered(transition: Array, state: Array, ranks: Ranks, place: Array, reverse: bool) -> Array:
    packed = _everywhere(jnp.concatenate([state, transition], axis=-1), ranks)
    if reverse:
        packed = packed[::-1]
    found, width = jnp.zeros_like(state), state.shape[-1]
    for number in range(ranks.size - 1):
        after = packed[number, ..., width:] @ found + packed[number, ..., :width]
        found = jnp.where(number < place, after, found)
    return found


def _passed_on(transition: Array, state: Array, ranks: Ranks, place: Array, reverse: bool) -> Array:
    found = jnp.zeros_like(state)
    for sender in range(ranks.size - 1):
        came = permute(transition @ found + state, ranks, _pairs([(sender, sender + 1)], ranks.size, reverse))
        found = jnp.where(place == sender + 1, came, found)
    return found


def _scanned(transition: Array, state: Array, ranks: Ranks, place: Array, reverse: bool) -> Array:
    for number, step in enumerate(scan_steps(ranks.size)):
        pairs = _pairs(step.pairs(ranks.size), ranks.size, reverse)
        came = permute(state, ranks, pairs)
        composed = came if step.is_last else permute(transition, ranks, pairs)
        if number == 0:  # everyone's own map goes one rank on; the first has none
            state, transition = came, composed
            continue
        receives = place >= step.distance + step.first_sender
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


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def exchanged(transition: Array, state: Array, ranks: Ranks) -> Array:
    """exchange_states. Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and
    of the gradients of S over the ranks after it, and that of its M is this times S^T."""
    return exchange_over(transition, state, ranks, reverse=False)


def _exchanged_forward(transition: Array, state: Array, ranks: Ranks) -> tuple[Array, tuple[Array, Array]]:
    found = exchange_over(transition, state, ranks, reverse=False)
    return found, (transition, found)


def _exchanged_backward(ranks: Ranks, kept: tuple[Array, Array], d_found: Array) -> tuple[Array, Array]:
    transition, found = kept
    passed_back = exchange_over(transition.mT, d_found, ranks, reverse=True)
    return passed_back @ found.mT, passed_back


exchanged.defvjp(_exchanged_forward, _exchanged_backward)


class Crossing(NamedTuple):
    """One exchange of a call. When it travels is the compiler's to say: outputs do not depend on it until the last."""

    context: FLACPContext
    value: int
    """Width V."""

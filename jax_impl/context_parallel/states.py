"""Before an exchange and after it: what a scan begins with, and how it is completed."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jax_impl.context_parallel.exchange import Crossing, pass_states, ranks_of
from jax_impl.handing import hand_over
from plans.context import FLACPContext


def with_responses(initial_state: Array | None, context: FLACPContext, like: Array) -> Array:
    """What the rank's scan begins with: of a sequence that began on another rank 0 and the identity.

    Args:
        initial_state: of the rank's sequences; that of one which began on another rank is not looked at. [n, HV, K, V]
        context: of the ranks.
        like: a state's shape and type. [HV, K, V]

    Returns:
        H and M side by side. [n, HV, K, V + K]
    """
    heads, key, _ = like.shape
    states = initial_state
    if states is None:
        states = jnp.zeros((len(context.cu_seqlens) - 1, *like.shape), like.dtype)
    begun = jnp.where(context.is_first_rank, states[0], 0)
    identity = jnp.where(context.is_first_rank, 0, jnp.broadcast_to(jnp.eye(key, dtype=like.dtype), (heads, key, key)))
    states = jnp.pad(states, ((0, 0), (0, 0), (0, 0), (0, key)))
    return states.at[0].set(jnp.concatenate([begun, identity], axis=-1))


def handed_through(
    initial_state: Array | None,
    like: Array,
    context: FLACPContext,
    run: Callable[[Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """Outputs and final states, pipelined: the first sequence begins with the state that the rank before hands on.

    Args:
        initial_state: as with_responses'.
        like: a state's shape and type. [HV, K, V]
        context: of the ranks.
        run: outputs and final states of initial ones, [n, HV, K, V] each.

    Returns:
        The same; a sequence that goes on on another rank has a final state of 0 here.
    """
    last, goes_on = context.num_sequences - 1, ~context.is_last_rank
    states = initial_state
    if states is None:
        states = jnp.zeros((len(context.cu_seqlens) - 1, *like.shape), like.dtype)
    wire = like.dtype if context.cp_wire_dtype is None else jnp.dtype(context.cp_wire_dtype)

    def own(came: Array) -> tuple[Array, tuple[Array, Array]]:
        begun = jnp.where(context.is_first_rank, states[0], came.astype(like.dtype))
        o, finals = run(states.at[0].set(begun))
        state = jnp.where(goes_on, finals[last], 0)
        return state.astype(wire), (o, finals.at[last].set(jnp.where(goes_on, 0, finals[last])))

    return hand_over(like.shape, wire, own)


def complete(
    o: Float[Array, "b t h w"], finals: Float[Array, "n h k w"], crossing: Crossing
) -> tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Outputs and final states, once it is known what the rank's first sequence began with.

    Args:
        o: outputs from a state of 0 and, where the first sequence began on another rank, responses. [1, T, HV, V + K]
        finals: H and M of every sequence, as wide. [n, HV, K, V + K]
        crossing: of the call.

    Returns:
        [1, T, HV, V] and [n, HV, K, V]; a sequence that goes on on another rank has a final state of 0 here.
    """
    context, value, log_decay = crossing
    last, came, goes_on = context.num_sequences - 1, ~context.is_first_rank, ~context.is_last_rank
    states, transitions = finals[..., :value], finals[..., value:]
    transition = jnp.where(came & goes_on & (last == 0), transitions[0], 0)
    state = jnp.where(goes_on, states[last], 0)
    begun = pass_states(transition, state, log_decay, ranks_of(context))
    o = o[..., :value] + jnp.einsum("bthk,hkv->bthv", o[..., value:], begun)  # responses are 0 where nothing came
    states = states.at[0].add(transitions[0] @ begun)
    return o, states.at[last].set(jnp.where(goes_on, 0, states[last]))

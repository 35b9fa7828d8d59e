"""Before an exchange and after it: what a scan begins with, and how it is completed."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.context.sequences import FLACPContext
from jax_impl.carry import relay
from jax_impl.context_parallel.exchange import Crossing, pass_states, ranks_of, reach_of


def with_transition_columns(initial_state: Array | None, context: FLACPContext, like: Array) -> Array:
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
        initial_state: as with_transition_columns'.
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

    return relay(like.shape, wire, own)


def complete(
    o: Float[Array, "b t h v"],
    transition_output: Float[Array, "b u h k"] | None,
    finals: Float[Array, "n h k w"],
    crossing: Crossing,
) -> tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Outputs and final states, once it is known what the rank's first sequence began with.

    Args:
        o: outputs, those of a first sequence that began on another rank from a state of 0. [1, T, HV, V]
        transition_output: of tokens, from the part's first on; None: they do not depend on another rank. [1, U, HV, K]
        finals: H and M of every sequence, as wide. [n, HV, K, V + K]
        crossing: of the call.

    Returns:
        [1, T, HV, V] and [n, HV, K, V]; a sequence that goes on on another rank has a final state of 0 here.
    """
    context, value, log_decay = crossing
    last, came, goes_on = context.num_sequences - 1, ~context.is_first_rank, ~context.is_last_rank
    states, transitions = finals[..., :value], finals[..., value:]
    transition = jnp.where(context.goes_through, transitions[0], 0)
    state = jnp.where(goes_on, states[last], 0)
    begun = pass_states(transition, state, log_decay, ranks_of(context), reach_of(context))
    if transition_output is not None:
        tokens = transition_output.shape[1]
        # Of other sequences, which have nothing to do with the state that came, both are left out, not times 0.
        own = ((jnp.arange(tokens) < context.cu_seqlens[1]) & came)[:, None, None]
        more = jnp.einsum("bthk,hkv->bthv", jnp.where(own, transition_output, 0), begun)
        o = o.at[:, :tokens].add(jnp.where(own, more, 0))
    states = states.at[0].add(jnp.where(came, transitions[0] @ begun, 0))
    return o, states.at[last].set(jnp.where(goes_on, 0, states[last]))

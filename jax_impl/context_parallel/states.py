"""The scan of a rank's part before and after the exchange of states: its initial states, and the completed outputs."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.context.sequences import FLACPContext
from jax_impl.carry import relay
from jax_impl.context_parallel.exchange import StateExchange, reach_of, run_exchange, static_context


def with_transition_columns(initial_state: Array | None, context: FLACPContext, like: Array) -> Array:
    """Return the initial states of the scan: 0 and the identity for a sequence that begins on an earlier rank.

    Transition columns are explained in delta_rule/chunked.py.

    Args:
        initial_state: initial states of the rank's sequences; None: zeros. [n, HV, K, V]
        context: context of the rank.
        like: array with the shape and type of a state. [HV, K, V]

    Returns:
        States with transition columns. [n, HV, K, V + K]
    """
    heads, key, _ = like.shape
    states = initial_state
    if states is None:
        states = jnp.zeros((len(context.cu_seqlens) - 1, *like.shape), like.dtype)
    first = jnp.where(context.is_first_rank, states[0], 0)
    identity = jnp.where(context.is_first_rank, 0, jnp.broadcast_to(jnp.eye(key, dtype=like.dtype), (heads, key, key)))
    states = jnp.pad(states, ((0, 0), (0, 0), (0, 0), (0, key)))
    return states.at[0].set(jnp.concatenate([first, identity], axis=-1))


def run_pipelined(
    initial_state: Array | None,
    like: Array,
    context: FLACPContext,
    run: Callable[[Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """Run a part after the previous rank: receive the first state from it, and send the last state to the next rank.

    Args:
        initial_state: see with_transition_columns. [n, HV, K, V]
        like: array with the shape and type of a state. [HV, K, V]
        context: context of the rank.
        run: function that returns outputs and final states from initial states. [n, HV, K, V]

    Returns:
        Outputs and final states; the final state of a sequence that continues on the next rank is 0.
    """
    last = context.num_sequences - 1
    sends = ~context.is_last_rank
    states = initial_state
    if states is None:
        states = jnp.zeros((len(context.cu_seqlens) - 1, *like.shape), like.dtype)
    wire = like.dtype if context.cp_wire_dtype is None else jnp.dtype(context.cp_wire_dtype)

    def run_part(received: Array) -> tuple[Array, tuple[Array, Array]]:
        first = jnp.where(context.is_first_rank, states[0], received.astype(like.dtype))
        o, finals = run(states.at[0].set(first))
        state = jnp.where(sends, finals[last], 0)
        return state.astype(wire), (o, finals.at[last].set(jnp.where(sends, 0, finals[last])))

    return relay(like.shape, wire, run_part)


def complete(
    o: Float[Array, "b t h v"],
    transition_output: Float[Array, "b u h k"] | None,
    finals: Float[Array, "n h k w"],
    exchange: StateExchange,
) -> tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Exchange states between ranks, and return the completed outputs and final states.

    Args:
        o: outputs of a scan from a state of 0 for a sequence that begins on an earlier rank. [1, T, HV, V]
        transition_output: transition columns R of the outputs of the first U tokens; None if no output depends on
            another rank. [1, U, HV, K]
        finals: final states S_local with transition columns M. [n, HV, K, V + K]
        exchange: exchange of the call.

    Returns:
        Outputs [1, T, HV, V] and final states [n, HV, K, V]; the final state of a sequence that continues on the next
        rank is 0.
    """
    context, value, log_decay = exchange
    last = context.num_sequences - 1
    receives = ~context.is_first_rank
    sends = ~context.is_last_rank
    states = finals[..., :value]
    transitions = finals[..., value:]
    transition = jnp.where(context.goes_through, transitions[0], 0)
    state = jnp.where(sends, states[last], 0)
    received = run_exchange(transition, state, log_decay, static_context(context), reach_of(context))
    if transition_output is not None:
        tokens = transition_output.shape[1]
        # Other sequences do not depend on the received state. It may not be finite, so 0 is selected, not multiplied.
        own = ((jnp.arange(tokens) < context.cu_seqlens[1]) & receives)[:, None, None]
        more = jnp.einsum("bthk,hkv->bthv", jnp.where(own, transition_output, 0), received)
        o = o.at[:, :tokens].add(jnp.where(own, more, 0))
    states = states.at[0].add(jnp.where(receives, transitions[0] @ received, 0))
    return o, states.at[last].set(jnp.where(sends, 0, states[last]))

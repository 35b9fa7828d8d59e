"""The delta rule over sequences split over ranks: only states travel.

A rank runs its part of the sequences from a state of 0, and beside it what an initial state would add: to the outputs
R S, to the last state M S. Both come out of one scan, as further columns of values that are 0 and of a state that
begins as the identity. What a rank passes on is then M S + H; the ranks' maps compose, and once a rank knows the S it
begins with, one product completes its outputs. Backward, automatic differentiation asks for the gradient of S, which
is the same exchange from the other end, of M^T: see ``_exchanged``.

All of it runs under jax.shard_map (or jax.pmap): one program, in which ranks differ by numbers alone. Twin of
``reference_torch/context_parallel.py``. What a rank holds is decided in ``plans/context.py``.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float

from jax_impl.ops import masked_attention, short_convolution
from plans.context import FLACPContext, check_sequences, halo_sizes, local_sequences, scan_steps


def build_cp_context(
    cu_seqlens: Array | np.ndarray,
    group: str,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: np.ndarray | None = None,
    *,
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
) -> FLACPContext:
    """What each rank holds of sequences split over the devices along a mesh axis; inside jax.shard_map.

    Args:
        cu_seqlens: where all sequences begin, and the end of the last; the same on every rank. [N + 1] int32
        group: name of the mesh axis.
        conv1d_kernel_size: taps of a short convolution that will run on the part.
        cu_seqlens_cpu: the same, not traced; without it traced offsets are not looked at.
        cp_exchange: how states travel, one of plans.context.EXCHANGES.
        cp_wire_dtype: in which type; None: their own. One of plans.context.WIRE_DTYPES.

    Raises:
        ValueError: naming the argument, what was expected, what came. Nothing is sent.
    """
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    values = None if isinstance(known, Tracer) else np.asarray(known)
    size, rank = lax.axis_size(group), lax.axis_index(group)
    check_sequences(values, known.dtype.name, size, conv1d_kernel_size, cp_exchange, cp_wire_dtype)
    offsets = jnp.asarray(known)
    part: Any = offsets[-1] // size if values is None else int(values[-1]) // size
    local = local_sequences(offsets, rank, part, jnp)
    kernel = conv1d_kernel_size
    return FLACPContext(
        group=group,
        cu_seqlens=local.cu_seqlens,
        cu_seqlens_cpu=None,
        is_first_rank=local.pre_num_ranks == 0,
        is_last_rank=local.post_num_ranks == 0,
        pre_num_ranks=local.pre_num_ranks,
        post_num_ranks=local.post_num_ranks,
        num_sequences=local.num_sequences,
        first_sequence=local.first_sequence,
        rank=rank,
        size=size,
        part_length=None if values is None else part,
        pre_num_tokens=local.pre_num_tokens,
        conv1d_kernel_size=kernel,
        pre_num_conv_tokens=None if kernel is None else jnp.minimum(kernel - 1, local.pre_num_tokens),
        cp_exchange=cp_exchange,
        cp_wire_dtype=cp_wire_dtype,
    )


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
    return _exchange(transition, state, _ranks(context), reverse)


class _Ranks(NamedTuple):
    """What is known of them before the program runs; of FLACPContext."""

    group: str
    size: int
    exchange: str
    wire_dtype: str | None
    by_groups: bool


def _ranks(context: FLACPContext) -> _Ranks:
    return _Ranks(context.group, context.size, context.cp_exchange, context.cp_wire_dtype, context.by_groups)


def _exchange(transition: Array, state: Array, ranks: _Ranks, reverse: bool) -> Array:
    if ranks.size == 1:
        return jnp.zeros_like(state)
    rank = lax.axis_index(ranks.group)
    run = {"all_gather": _gathered, "ring": _passed_on, "scan": _scanned}[ranks.exchange]
    return run(transition, state, ranks, ranks.size - 1 - rank if reverse else rank, reverse)


def _gathered(transition: Array, state: Array, ranks: _Ranks, place: Array, reverse: bool) -> Array:
    packed = _everywhere(jnp.concatenate([state, transition], axis=-1), ranks)
    if reverse:
        packed = packed[::-1]
    found, width = jnp.zeros_like(state), state.shape[-1]
    for number in range(ranks.size - 1):
        after = packed[number, ..., width:] @ found + packed[number, ..., :width]
        found = jnp.where(number < place, after, found)
    return found


def _passed_on(transition: Array, state: Array, ranks: _Ranks, place: Array, reverse: bool) -> Array:
    found = jnp.zeros_like(state)
    for sender in range(ranks.size - 1):
        came = _permute(transition @ found + state, ranks, _pairs([(sender, sender + 1)], ranks.size, reverse))
        found = jnp.where(place == sender + 1, came, found)
    return found


def _scanned(transition: Array, state: Array, ranks: _Ranks, place: Array, reverse: bool) -> Array:
    for number, step in enumerate(scan_steps(ranks.size)):
        pairs = _pairs(step.pairs(ranks.size), ranks.size, reverse)
        came = _permute(state, ranks, pairs)
        composed = came if step.is_last else _permute(transition, ranks, pairs)
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


def _permute(x: Array, ranks: _Ranks, pairs: list[tuple[int, int]]) -> Array:
    """What comes from the sender; 0 where nothing does."""
    if not ranks.by_groups:
        return lax.ppermute(_on_wire(x, ranks), ranks.group, pairs).astype(x.dtype)
    senders = np.full(ranks.size, -1)
    senders[[receiver for _, receiver in pairs]] = [sender for sender, _ in pairs]
    sender = jnp.asarray(senders)[lax.axis_index(ranks.group)]
    return jnp.where(sender < 0, 0, _everywhere(x, ranks)[sender])


def _everywhere(x: Array, ranks: _Ranks) -> Array:
    """Every rank's, on every rank."""
    return lax.all_gather(_on_wire(x, ranks), ranks.group).astype(x.dtype)


def _on_wire(x: Array, ranks: _Ranks) -> Array:
    """As it is sent."""
    return x if ranks.wire_dtype is None else x.astype(ranks.wire_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchanged(transition: Array, state: Array, ranks: _Ranks) -> Array:
    """exchange_states. Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and
    of the gradients of S over the ranks after it, and that of its M is this times S^T."""
    return _exchange(transition, state, ranks, reverse=False)


def _exchanged_forward(transition: Array, state: Array, ranks: _Ranks) -> tuple[Array, tuple[Array, Array]]:
    found = _exchange(transition, state, ranks, reverse=False)
    return found, (transition, found)


def _exchanged_backward(ranks: _Ranks, kept: tuple[Array, Array], d_found: Array) -> tuple[Array, Array]:
    transition, found = kept
    passed_back = _exchange(transition.mT, d_found, ranks, reverse=True)
    return passed_back @ found.mT, passed_back


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def compress_h0(h0: Float[Array, "n h k v"] | None, context: FLACPContext) -> Float[Array, "m h k v"] | None:
    """Of the states a rank's sequences begin with the first, the only one that can come from another rank. [1, ...]"""
    return h0 if h0 is None else h0[:1]


def expand_h0(h0: Float[Array, "m h k v"] | None, context: FLACPContext) -> Float[Array, "n h k v"] | None:
    """The inverse of compress_h0, the other sequences beginning with 0. [n, ...]"""
    if h0 is None:
        return h0
    return jnp.zeros((len(context.cu_seqlens) - 1, *h0.shape[1:]), h0.dtype).at[:1].set(h0)


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


def complete(
    o: Float[Array, "b t h w"], finals: Float[Array, "n h k w"], value: int, context: FLACPContext
) -> tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Outputs and final states, once it is known what the rank's first sequence began with.

    Args:
        o: outputs from a state of 0 and, where the first sequence began on another rank, responses. [1, T, HV, V + K]
        finals: H and M of every sequence, as wide. [n, HV, K, V + K]
        value: width V.
        context: of the ranks.

    Returns:
        [1, T, HV, V] and [n, HV, K, V]; a sequence that goes on on another rank has a final state of 0 here.
    """
    last, came, goes_on = context.num_sequences - 1, ~context.is_first_rank, ~context.is_last_rank
    states, transitions = finals[..., :value], finals[..., value:]
    transition = jnp.where(came & goes_on & (last == 0), transitions[0], 0)
    state = jnp.where(goes_on, states[last], 0)
    begun: Array = _exchanged(transition, state, _ranks(context))
    o = o[..., :value] + jnp.einsum("bthk,hkv->bthv", o[..., value:], begun)  # responses are 0 where nothing came
    states = states.at[0].add(transitions[0] @ begun)
    return o, states.at[last].set(jnp.where(goes_on, 0, states[last]))


def cp_short_convolution(
    x: Float[Array, "b t c"], weight: Float[Array, "c w"], context: FLACPContext
) -> Float[Array, "b t c"]:
    """ops.short_convolution over this rank's part: what it reads before the part comes from the ranks there.

    Args:
        x: inputs of the part. [1, T, C]
        weight: taps. [C, W]
        context: of the ranks.
    """
    length, wanted = x.shape[1], weight.shape[1] - 1
    place, begin = _sequences(context, length)
    halo = []
    for distance, size in enumerate(halo_sizes(length, weight.shape[1]), 1):
        pairs = [(rank, rank + distance) for rank in range(context.size - distance)]
        halo.insert(0, _permute(x[:, length - size :], _ranks(context)._replace(wire_dtype=None), pairs))
    joined = jnp.concatenate([*halo, x], axis=1)
    return short_convolution(joined, weight, jnp.pad(place - begin, (wanted, 0)))[:, wanted:]


def cp_attention(
    q: Float[Array, "b t h d"], k: Float[Array, "b t g d"], v: Float[Array, "b t g d"], context: FLACPContext
) -> Float[Array, "b t h d"]:
    """ops.causal_attention of this rank's queries, to the keys and values of all ranks, each sequence by itself.

    Args:
        q, k, v: of the part. [1, T, H, d], [1, T, G, d]
        context: of the ranks.
    """
    place, begin = _sequences(context, q.shape[1])
    k, v = (lax.all_gather(x, context.group, axis=1, tiled=True) for x in (k, v))
    keys = jnp.arange(k.shape[1])
    return masked_attention(q, k, v, (keys >= begin[:, None]) & (keys <= place[:, None]))


def _sequences(context: FLACPContext, length: int) -> tuple[Array, Array]:
    """Where each token of the part lies among all, and where its sequence begins. [T]"""
    tokens = jnp.arange(length)
    own = jnp.searchsorted(context.cu_seqlens[1:], tokens, side="right")
    begin = context.cu_seqlens[own] - jnp.where(own == 0, context.pre_num_tokens, 0)
    return tokens + context.rank * length, begin + context.rank * length

"""Pipelined context parallelism: each rank is one microbatch behind the previous rank.

diptych/plans/schedule/wavefront.py defines the lock-step slots. In ``reference_torch/context_parallel/wavefront.py`` a
rank is one layer behind the previous rank; here all ranks run one program, so it is a whole microbatch. Backward is the
transposed loop, from the last slot and the last rank.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.plans.context.exchange import PIPELINED
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.schedule.wavefront import num_lockstep_slots
from diptych_kernels.mesh_axes import vary
from jax_impl.carry import with_carry


def is_pipelined(context: FLACPContext) -> bool:
    """Return True for the exchange "pipelined", in which a rank computes after the message of the previous rank."""
    return context.cp_exchange == PIPELINED


def over_microbatches(
    run: Callable[[Array], Any],
    num_microbatches: int,
    axis: str,
    axes: tuple[str, ...] = (),
    checkpoint: Callable[[Callable], Callable] | None = None,
) -> Any:
    """Run every microbatch on every rank, each rank one lock-step slot after the previous, inside jax.shard_map.

    Args:
        run: function from the number of a microbatch to this rank's results; it may use contexts with cp_exchange
            "pipelined".
        num_microbatches: m.
        axis: name of the mesh axis of the ranks.
        axes: names of all mesh axes along which the arrays that run reads vary; empty: axis.
        checkpoint: transformation of a slot such as jax.checkpoint, which decides what is saved for backward; None:
            save everything.

    Returns:
        Results of all microbatches. [m, ...]
    """
    rank = lax.axis_index(axis)
    size = lax.axis_size(axis)
    pairs = [(sender, sender + 1) for sender in range(size - 1)]
    first = jnp.zeros((), jnp.int32)
    sent = jax.eval_shape(lambda: with_carry(run, None)(first)[1])
    begin = tuple(vary(jnp.zeros(x.shape, x.dtype), axes or (axis,)) for x in sent)

    def slot(received: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], Any]:
        own = jnp.clip(number - rank, 0, num_microbatches - 1)
        is_read = own == number - rank  # results before the first and after the last microbatch are dropped
        result, sent = with_carry(run, received, is_read)(own)
        return tuple(lax.ppermute(x, axis, pairs) for x in sent), result

    slot = slot if checkpoint is None else checkpoint(slot)
    _, results = lax.scan(slot, begin, jnp.arange(num_lockstep_slots(size, num_microbatches), dtype=jnp.int32))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank, num_microbatches), results)

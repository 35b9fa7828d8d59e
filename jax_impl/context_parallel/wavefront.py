"""Microbatches that follow one another over ranks, a tick each; see diptych/plans/schedule/wavefront.py.

Twin of ``reference_torch/context_parallel/wavefront.py``, where a rank is a layer behind the one before; in one program
that all ranks run it is a whole microbatch. Backward is the transposed loop, from the last tick and the last rank.
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
from jax_impl.handing import handing


def is_pipelined(context: FLACPContext) -> bool:
    """Whether ranks hand on what they have before the next compute."""
    return context.cp_exchange == PIPELINED


def over_microbatches(
    run: Callable[[Array], Any],
    num_microbatches: int,
    axis: str,
    axes: tuple[str, ...] = (),
    checkpoint: Callable[[Callable], Callable] | None = None,
) -> Any:
    """Run every microbatch on every rank, one rank a tick after the other; inside jax.shard_map.

    Args:
        run: of the number of a microbatch, this rank's results; in it contexts of cp_exchange "pipelined" may be used.
        num_microbatches: m.
        axis: name of the mesh axis of the ranks.
        axes: of the whole mesh; all that run reads should differ along them.
        checkpoint: jax.checkpoint or such, of a tick: what is kept for backward; None: everything.

    Returns:
        Results [m, ...].
    """
    rank, size = lax.axis_index(axis), lax.axis_size(axis)
    pairs = [(place, place + 1) for place in range(size - 1)]
    first = jnp.zeros((), jnp.int32)
    sent = jax.eval_shape(lambda: handing(run, None)(first)[1])
    begin = tuple(vary(jnp.zeros(x.shape, x.dtype), axes or (axis,)) for x in sent)

    def tick(came: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], Any]:
        own = jnp.clip(number - rank, 0, num_microbatches - 1)  # before its first and after its last, nobody looks
        result, sent = handing(run, came)(own)
        return tuple(lax.ppermute(x, axis, pairs) for x in sent), result

    tick = tick if checkpoint is None else checkpoint(tick)
    _, results = lax.scan(tick, begin, jnp.arange(num_lockstep_slots(size, num_microbatches), dtype=jnp.int32))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank, num_microbatches), results)

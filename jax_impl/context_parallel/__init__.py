"""Context parallelism: the layers of a model over sequences that are split over ranks.

Delta rule: a rank runs its part of the sequences from a state of 0, and computes how an initial state S would change
the outputs (by A S) and the final state (by M S); see delta_rule/chunked.py. From an initial state S, a rank sends M S
+ S_local to the next rank. These maps compose, so ranks exchange only M and S_local. Once a rank knows S, one product
completes its outputs. The gradient of S needs the same exchange of M^T in the opposite direction: see
``exchange.run_exchange``.

All functions run under jax.shard_map or jax.pmap: all ranks run one program, and differ only in values of arrays.
Mirrors ``reference_torch/context_parallel/``. ``diptych/plans/context/sequences.py`` decides which tokens a rank holds.
"""

from jax_impl.context_parallel.contexts import build_cp_context, compress_h0, expand_h0
from jax_impl.context_parallel.exchange import StateExchange, exchange_states, sum_over_ranks
from jax_impl.context_parallel.layers import cp_attention, cp_short_convolution
from jax_impl.context_parallel.states import complete, with_transition_columns
from jax_impl.context_parallel.wavefront import over_microbatches

__all__ = [
    "build_cp_context",
    "compress_h0",
    "expand_h0",
    "exchange_states",
    "sum_over_ranks",
    "StateExchange",
    "with_transition_columns",
    "complete",
    "cp_short_convolution",
    "cp_attention",
    "over_microbatches",
]

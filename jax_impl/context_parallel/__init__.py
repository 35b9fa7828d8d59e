"""The delta rule over sequences split over ranks: only states travel.

A rank runs its part of the sequences from a state of 0, and beside it what an initial state would add: to the outputs
R S, to the last state M S. Both come out of one scan, as further columns of values that are 0 and of a state that
begins as the identity. What a rank passes on is then M S + H; the ranks' maps compose, and once a rank knows the S it
begins with, one product completes its outputs. Backward, automatic differentiation asks for the gradient of S, which
is the same exchange from the other end, of M^T: see ``exchange.pass_states``.

All of it runs under jax.shard_map (or jax.pmap): one program, in which ranks differ by numbers alone. Twin of
``reference_torch/context_parallel/``. What a rank holds is decided in ``diptych/plans/context/sequences.py``.
"""

from jax_impl.context_parallel.contexts import build_cp_context, compress_h0, expand_h0
from jax_impl.context_parallel.exchange import Crossing, exchange_states
from jax_impl.context_parallel.layers import cp_attention, cp_short_convolution
from jax_impl.context_parallel.states import complete, with_transition_columns
from jax_impl.context_parallel.wavefront import over_microbatches

__all__ = [
    "build_cp_context",
    "compress_h0",
    "expand_h0",
    "exchange_states",
    "Crossing",
    "with_transition_columns",
    "complete",
    "cp_short_convolution",
    "cp_attention",
    "over_microbatches",
]

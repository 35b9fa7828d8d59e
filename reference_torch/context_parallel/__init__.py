"""The delta rule over sequences split over ranks: only states travel.

A rank runs its part of the sequences from a state of 0, and beside it what an initial state would add: to the outputs
R S, to the last state M S. Both come out of one scan, as further columns of values that are 0 and of a state that
begins as the identity. What a rank passes on is then M S + H; the ranks' maps compose, and once a rank knows the S it
begins with, one product completes its outputs. Backward, automatic differentiation asks for the gradient of S, which
is the same exchange from the other end, of M^T: see ``ExchangedState``.

Twin of ``jax_impl/context_parallel/``. What a rank holds is decided in ``diptych/plans/context/sequences.py``.
"""

from reference_torch.context_parallel.contexts import build_cp_context, compress_h0, expand_h0
from reference_torch.context_parallel.exchange import Crossing, exchange_states
from reference_torch.context_parallel.layers import cp_attention, cp_short_convolution
from reference_torch.context_parallel.states import complete, with_transition_columns

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
]

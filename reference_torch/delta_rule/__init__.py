"""The gated delta rule: a state that decays, and is corrected by what it got wrong, token by token.

Per head, with state S [K, V], token t:

    S <- diag(exp(g_t)) S                  decay, one for all channels of k (GDN) or one for each (KDA)
    e  = beta_t (v_t - S^T k_t)            the error of the decayed state
    S <- S + k_t e^T
    o_t = scale * S^T q_t

``recurrent_*`` compute just that, a token at a time; ``chunk_*`` the same by matrix products over chunks of tokens,
with a backward of their own that keeps little more than the arguments. Twin of ``jax_impl/delta_rule``.

Reference: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, eq. 10; Kimi Team, "Kimi Linear",
arXiv 2510.26692, eq. 1.
"""

from reference_torch.delta_rule.api import (
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from reference_torch.delta_rule.gates import gdn_gate, kda_gate, l2norm

__all__ = [
    "recurrent_kda",
    "chunk_kda",
    "recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
    "gdn_gate",
    "kda_gate",
    "l2norm",
]

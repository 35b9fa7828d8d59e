"""The gated delta rule: each token decays the state, and corrects it by the error of its prediction.

For one head with state S [K, V], at token t:

    S <- diag(exp(g_t)) S                  decay: one per head (GDN) or one per channel of k (KDA)
    e  = beta_t (v_t - S^T k_t)            error of the decayed state's prediction, times the write strength beta_t
    S <- S + k_t e^T
    o_t = scale * S^T q_t

``recurrent_*`` compute this token by token. ``chunk_*`` compute the same by matrix products over chunks of tokens, and
save little more than the arguments for backward. Mirrors ``jax_impl/delta_rule``.

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

"""The preparation of projections for the delta rule: log decays in (-inf, 0], keys and queries of norm 1."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diptych.plans.model.delta_rule import L2_NORM_EPSILON, DeltaRuleOptions, check_lower_bound
from reference_torch.ops import at_least_float32

SOFTPLUS_LINEAR = 40.0
"""Above this threshold softplus(x) is equal to x in float64. PyTorch's default of 20 changes the tenth digit."""


def l2norm(x: Float[Tensor, "*b k"], epsilon: float = L2_NORM_EPSILON) -> Float[Tensor, "*b k"]:
    """Return ``x / sqrt(sum(x**2) + epsilon)``, with the sum over the last axis; zero stays zero.

    Args:
        x: queries or keys. [..., K]
        epsilon: added to the sum of squares.

    Returns:
        The normalised rows, computed in at least float32, in the type of x. [..., K]
    """
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + epsilon)).to(x.dtype)


def gdn_gate(
    a: Float[Tensor, "*b h"], A_log: Float[Tensor, " h"], dt_bias: Float[Tensor, " h"] | None = None
) -> Float[Tensor, "*b h"]:
    """Return the log decay of GDN, ``-exp(A_log) * softplus(a + dt_bias)``.

    Args:
        a: projection of the tokens. [..., HV]
        A_log: log of the decay rate. [HV]
        dt_bias: bias of the projection; None: 0. [HV]

    Returns:
        Log decay, natural log, <= 0, float32 (float64 for float64). [..., HV]
    """
    a = at_least_float32(a)
    if dt_bias is not None:
        a = a + dt_bias.to(a.dtype)
    return -A_log.to(a.dtype).exp() * F.softplus(a, threshold=SOFTPLUS_LINEAR)


def kda_gate(
    g: Float[Tensor, "*b h k"],
    A_log: Float[Tensor, " h"],
    dt_bias: Float[Tensor, " hk"] | None = None,
    lower_bound: float | int | None = None,
) -> Float[Tensor, "*b h k"]:
    """Return the log decay of KDA, ``-exp(A_log) * softplus(g + dt_bias)``.

    With lower_bound it is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.

    Args:
        g: projection of the tokens. [..., HV, K]
        A_log: log of the decay rate. [HV]
        dt_bias: bias of the projection; None: 0. [HV * K]
        lower_bound: lower bound of the log decay, in [-5, 0); None: unbounded.

    Returns:
        Log decay, natural log, <= 0, float32 (float64 for float64). [..., HV, K]

    Raises:
        ValueError: lower_bound outside [-5, 0).
    """
    g = at_least_float32(g)
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype).view(g.shape[-2:])
    rate = A_log.to(g.dtype).exp()[:, None]
    if lower_bound is None:
        return -rate * F.softplus(g, threshold=SOFTPLUS_LINEAR)
    check_lower_bound(lower_bound)
    return lower_bound * torch.sigmoid(rate * g)


def apply_norm_and_gate(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and g after the optional l2norm of q and k and the optional kda_gate of g."""
    if options.use_qk_l2norm_in_kernel:
        q = l2norm(q)
        k = l2norm(k)
    if options.use_gate_in_kernel:
        assert A_log is not None, "check_arguments requires A_log with use_gate_in_kernel"
        g = kda_gate(g, A_log, dt_bias, options.lower_bound)
    return q, k, g


def recurrence_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the recurrence: at least float32, normalised, scaled, gated, with HV heads of q and k.

    Returns:
        q, k [B, T, HV, K]; v [B, T, HV, V]; g [B, T, HV, K], for GDN [B, T, HV, 1]; beta [B, T, HV, 1].
    """
    scale = options.scale_of(q.shape[-1])
    q, k, v, g, beta = (at_least_float32(x) for x in (q, k, v, g, beta))
    q, k, g = apply_norm_and_gate(q, k, g, A_log, dt_bias, options)
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) if group > 1 else x for x in (q * scale, k))
    return q, k, v, g if options.per_channel else g[..., None], beta[..., None]

"""The preparation of projections for the delta rule: log decays in (-inf, 0], keys and queries of norm 1."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model.delta_rule import L2_NORM_EPSILON, DeltaRuleOptions, check_lower_bound
from jax_impl.ops import at_least_float32


def l2norm(x: Float[Array, "*b k"], epsilon: float = L2_NORM_EPSILON) -> Float[Array, "*b k"]:
    """Return ``x / sqrt(sum(x**2) + epsilon)``, with the sum over the last axis; zero stays zero.

    Args:
        x: queries or keys. [..., K]
        epsilon: added to the sum of squares.

    Returns:
        The normalised rows, computed in at least float32, in the type of x. [..., K]
    """
    wide = at_least_float32(x)
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + epsilon)).astype(x.dtype)


def gdn_gate(
    a: Float[Array, "*b h"], A_log: Float[Array, " h"], dt_bias: Float[Array, " h"] | None = None
) -> Float[Array, "*b h"]:
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
        a = a + dt_bias.astype(a.dtype)
    return -jnp.exp(A_log.astype(a.dtype)) * jax.nn.softplus(a)


def kda_gate(
    g: Float[Array, "*b h k"],
    A_log: Float[Array, " h"],
    dt_bias: Float[Array, " hk"] | None = None,
    lower_bound: float | int | None = None,
) -> Float[Array, "*b h k"]:
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
        g = g + dt_bias.astype(g.dtype).reshape(g.shape[-2:])
    rate = jnp.exp(A_log.astype(g.dtype))[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(g)
    check_lower_bound(lower_bound)
    return lower_bound * jax.nn.sigmoid(rate * g)


def apply_norm_and_gate(
    q: Array,
    k: Array,
    g: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    options: DeltaRuleOptions,
) -> tuple[Array, Array, Array]:
    """Return q, k and g after the optional l2norm of q and k and the optional kda_gate of g."""
    if options.use_qk_l2norm_in_kernel:
        q = l2norm(q)
        k = l2norm(k)
    if options.use_gate_in_kernel:
        assert A_log is not None, "check_arguments requires A_log with use_gate_in_kernel"
        g = kda_gate(g, A_log, dt_bias, options.lower_bound)
    return q, k, g


def recurrence_inputs(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    options: DeltaRuleOptions,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the inputs of the recurrence: at least float32, normalised, scaled, gated, with HV heads of q and k.

    Returns:
        q, k [B, T, HV, K]; v [B, T, HV, V]; g [B, T, HV, K], for GDN [B, T, HV, 1]; beta [B, T, HV, 1].
    """
    scale = options.scale_of(q.shape[-1])
    q, k, v, g, beta = (at_least_float32(x) for x in (q, k, v, g, beta))
    q, k, g = apply_norm_and_gate(q, k, g, A_log, dt_bias, options)
    group = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, group, 2) if group > 1 else x for x in (q * scale, k))
    return q, k, v, g if options.per_channel else g[..., None], beta[..., None]

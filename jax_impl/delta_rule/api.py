"""The public functions of the delta rule: they check their arguments and select the implementation."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from diptych.plans.context.sequences import FLACPContext, check_part, implementation_for
from diptych.plans.model.delta_rule import (
    CHUNK_SIZE,
    ArrayInfo,
    DeltaRuleOptions,
    check_arguments,
    refuse_unknown_keywords,
)
from jax_impl.context_parallel import StateExchange, complete, with_transition_columns
from jax_impl.context_parallel.states import run_pipelined
from jax_impl.context_parallel.wavefront import is_pipelined
from jax_impl.delta_rule.by_kernels import chunked_by_kernels
from jax_impl.delta_rule.chunked import Arguments, chunked
from jax_impl.delta_rule.gates import apply_norm_and_gate, recurrence_inputs
from jax_impl.delta_rule.recurrent import recurrent
from jax_impl.ops import kernel_backend


@refuse_unknown_keywords
def recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | np.ndarray | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | int | None = None,
) -> tuple[Array, Array | None]:
    """Run Kimi delta attention token by token; arguments and results are those of chunk_kda."""
    options = DeltaRuleOptions(True, scale, 1, use_qk_l2norm_in_kernel, use_gate_in_kernel, safe_gate, lower_bound)
    arguments = Arguments(q, k, v, g, beta, A_log, dt_bias)
    return _recurrent(arguments, initial_state, cu_seqlens, options, output_final_state)


@refuse_unknown_keywords
def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | np.ndarray | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | int | None = None,
    chunk_size: int = CHUNK_SIZE,
    cp_context: FLACPContext | None = None,
    disable_recompute: bool = False,
    impl: str = "auto",
) -> tuple[Array, Array | None]:
    """Run Kimi delta attention (arXiv 2510.26692, section 3) in chunks: the gated delta rule with a decay per channel.

    Args:
        q: queries. [B, T, H, K] float16, bfloat16, float32 or float64; k and v have the same type
        k: keys; with norms above 1 the rule can diverge, see use_qk_l2norm_in_kernel. [B, T, H, K]
        v: values; HV / H neighbouring heads share a head of q and k. [B, T, HV, V]
        g: log decay, natural log, <= 0; with use_gate_in_kernel the argument g of kda_gate. [B, T, HV, K]
        beta: write strength, in [0, 2]; with a key of norm 1, 1 corrects the error completely. [B, T, HV]
        scale: scale of the queries; None: K ** -0.5.
        initial_state: state before each sequence; None: zeros. [N, HV, K, V] float32 (float64 for float64)
        output_final_state: return the final states.
        cu_seqlens: offsets of the sequences packed in B = 1, and T; sequences may be empty. Traced offsets are not
            checked, and may cost chunks of padding. [N + 1] int32
        use_qk_l2norm_in_kernel: apply l2norm to q and k.
        A_log: see kda_gate. [HV]
        dt_bias: see kda_gate. [HV * K]
        use_gate_in_kernel: apply kda_gate to g.
        safe_gate: the caller guarantees log decays above -5; accepted for compatibility, without effect.
        lower_bound: see kda_gate.
        chunk_size: tokens per chunk, a power of two.
        cp_context: from build_cp_context; this rank then computes its part of the sequences, each with its initial
            state on its first rank and its final state on its last (0 elsewhere). Every rank has to compute the
            gradient if one does.
        disable_recompute: save intermediate values for backward instead of recomputing them.
        impl: see diptych.plans.model.implementation.

    Returns:
        Outputs [B, T, HV, V] in the type of v, and the final states, like initial_state, or None.

    Raises:
        ValueError: arguments do not fit together.
        UnknownArgumentError: a keyword is unknown.
    """
    gate = (use_gate_in_kernel, safe_gate, lower_bound)
    options = DeltaRuleOptions(True, scale, chunk_size, use_qk_l2norm_in_kernel, *gate)
    arguments = Arguments(q, k, v, g, beta, A_log, dt_bias)
    recompute = not disable_recompute
    return _chunked(arguments, initial_state, cu_seqlens, options, output_final_state, recompute, cp_context, impl)


@refuse_unknown_keywords
def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | np.ndarray | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Array, Array | None]:
    """Run the gated delta rule of GDN token by token; arguments and results are those of chunk_gated_delta_rule."""
    options = DeltaRuleOptions(False, scale, 1, use_qk_l2norm_in_kernel)
    arguments = Arguments(q, k, v, g, beta, None, None)
    return _recurrent(arguments, initial_state, cu_seqlens, options, output_final_state)


@refuse_unknown_keywords
def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | np.ndarray | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK_SIZE,
    cp_context: FLACPContext | None = None,
    disable_recompute: bool = False,
    impl: str = "auto",
) -> tuple[Array, Array | None]:
    """Run the gated delta rule of GDN in chunks, with one decay per head.

    Arguments, results and errors are those of chunk_kda, except g: log decay, natural log, <= 0. [B, T, HV]

    Reference: Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.
    """
    options = DeltaRuleOptions(False, scale, chunk_size, use_qk_l2norm_in_kernel)
    arguments = Arguments(q, k, v, g, beta, None, None)
    return _chunked(
        arguments, initial_state, cu_seqlens, options, output_final_state, not disable_recompute, cp_context, impl
    )


def _check(arguments: Arguments, initial: Array | None, cu_seqlens: Any, options: DeltaRuleOptions) -> None:
    """Check all arguments."""
    checked = arguments._asdict() | {"initial_state": initial, "cu_seqlens": cu_seqlens}
    infos = {name: _info(name, x) for name, x in checked.items()}
    info = infos["cu_seqlens"]
    if info is not None and not isinstance(cu_seqlens, Tracer):
        infos["cu_seqlens"] = info._replace(values=np.asarray(cu_seqlens))
    check_arguments(options, infos)


def _info(name: str, x: Array | np.ndarray | None) -> ArrayInfo | None:
    """Return shape and type of an argument for check_arguments, or None; reject what is not an array."""
    if x is None:
        return None
    if not isinstance(x, Array | np.ndarray):
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}")
    return ArrayInfo(tuple(x.shape), str(x.dtype))


def _recurrent(
    arguments: Arguments,
    initial: Array | None,
    cu_seqlens: Array | np.ndarray | None,
    options: DeltaRuleOptions,
    output_final_state: bool,
) -> tuple[Array, Array | None]:
    """Check the arguments and run the recurrence token by token."""
    _check(arguments, initial, cu_seqlens, options)
    o, finals = recurrent(
        *recurrence_inputs(*arguments, options), initial, None if cu_seqlens is None else jnp.asarray(cu_seqlens)
    )
    return o.astype(arguments.v.dtype), finals if output_final_state else None


def _chunked(
    arguments: Arguments,
    initial: Array | None,
    cu_seqlens: Array | np.ndarray | None,
    options: DeltaRuleOptions,
    output_final_state: bool,
    recompute: bool,
    context: FLACPContext | None,
    impl: str,
) -> tuple[Array, Array | None]:
    """Check the arguments, and run the rule in chunks by the kernels, by JAX, or over the ranks of a context."""
    if context is not None:
        check_part(context, tuple(getattr(arguments.q, "shape", ())))
        if cu_seqlens is not None and cu_seqlens is not context.cu_seqlens:
            raise ValueError("cu_seqlens: expected None or cp_context.cu_seqlens, got another array")
        cu_seqlens = context.cu_seqlens
    _check(arguments, initial, cu_seqlens, options)
    options = options.for_length(arguments.q.shape[1])
    impl = implementation_for(impl, context)
    kernels = kernel_backend(impl, arguments.q)

    def run(initial: Array | None, context: FLACPContext | None = None) -> tuple[Array, Array]:
        if kernels is not None:
            return chunked_by_kernels(kernels, arguments, initial, options, cu_seqlens, recompute, context)
        if context is None:
            return chunked(arguments, initial, options, cu_seqlens, recompute)
        return _over_ranks(arguments, initial, options, recompute, context)

    if context is not None and is_pipelined(context):  # run then treats the part as whole sequences
        o, finals = run_pipelined(initial, _state_like(arguments), context, run)
    else:
        o, finals = run(initial, context)
    return o, finals if output_final_state else None


def _over_ranks(
    arguments: Arguments,
    initial: Array | None,
    options: DeltaRuleOptions,
    recompute: bool,
    context: FLACPContext,
) -> tuple[Array, Array]:
    """Run the rule over this rank's part of the sequences."""
    v = arguments.v
    like = _state_like(arguments)
    _, key, value = like.shape
    o, finals = chunked(
        arguments,
        with_transition_columns(initial, context, like),
        options,
        context.cu_seqlens,
        recompute,
        num_transition_columns=key,
    )
    o, finals = complete(
        o[..., :value], o[..., value:], finals, StateExchange(context, value, _log_decay(arguments, options, context))
    )
    return o.astype(v.dtype), finals


def _state_like(arguments: Arguments) -> Array:
    """Return a state of zeros [HV, K, V]."""
    q = arguments.q
    v = arguments.v
    return jnp.zeros((v.shape[2], q.shape[3], v.shape[3]), jnp.promote_types(q.dtype, jnp.float32))


def _log_decay(arguments: Arguments, options: DeltaRuleOptions, context: FLACPContext) -> Array | None:
    """Return the sum of log decays over the part, [HV, K] or [HV, 1], for a low-rank transition."""
    if context.cp_transition_rank is None:
        return None
    q, k, _, g, _, A_log, dt_bias = arguments
    _, _, g = apply_norm_and_gate(q, k, g, A_log, dt_bias, options)
    total = g[0].sum(0, dtype=jnp.promote_types(q.dtype, jnp.float32))
    return lax.stop_gradient(total if total.ndim == 2 else total[:, None])

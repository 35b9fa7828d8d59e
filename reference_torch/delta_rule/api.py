"""The public functions of the delta rule: they check their arguments and select the implementation."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext, check_part, implementation_for
from diptych.plans.model.delta_rule import (
    CHUNK_SIZE,
    ArrayInfo,
    DeltaRuleOptions,
    accumulation_dtype,
    check_arguments,
    refuse_unknown_keywords,
)
from reference_torch.autograd import is_transformed, refuse_transformed, without_autocast
from reference_torch.context_parallel import StateExchange, complete, with_transition_columns
from reference_torch.context_parallel.exchange import context_for
from reference_torch.context_parallel.states import run_pipelined
from reference_torch.context_parallel.wavefront import is_pipelined
from reference_torch.delta_rule.by_kernels import chunked_by_kernels
from reference_torch.delta_rule.chunked import Arguments, chunked
from reference_torch.delta_rule.gates import apply_norm_and_gate, recurrence_inputs
from reference_torch.delta_rule.recurrent import recurrent
from reference_torch.ops import at_least_float32, kernel_backend


@refuse_unknown_keywords
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi delta attention token by token; arguments and results are those of chunk_kda."""
    options = DeltaRuleOptions(True, scale, 1, use_qk_l2norm_in_kernel, use_gate_in_kernel, safe_gate, lower_bound)
    arguments = Arguments(q, k, v, g, beta, A_log, dt_bias)
    return _recurrent(arguments, initial_state, cu_seqlens, options, output_final_state)


@refuse_unknown_keywords
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | int | None = None,
    chunk_size: int = CHUNK_SIZE,
    cp_context: FLACPContext | None = None,
    disable_recompute: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
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
        cu_seqlens: offsets of the sequences packed in B = 1, and T; sequences may be empty. The host reads them, and
            waits if they are on a GPU. [N + 1] int32
        use_qk_l2norm_in_kernel: apply l2norm to q and k.
        A_log: see kda_gate. [HV]
        dt_bias: see kda_gate. [HV * K]
        use_gate_in_kernel: apply kda_gate to g.
        safe_gate: the caller guarantees log decays above -5; accepted for compatibility, without effect.
        lower_bound: see kda_gate.
        chunk_size: tokens per chunk, a power of two.
        cp_context: from build_cp_context; this rank then computes its part of the sequences, each with its initial
            state on its first rank and its final state on its last (0 elsewhere). Every rank has to call backward.
        disable_recompute: save intermediate values for backward instead of recomputing them.
        impl: see diptych.plans.model.implementation.

    Returns:
        Outputs [B, T, HV, V] in the type of v, and the final states, like initial_state, or None.

    Raises:
        ValueError: arguments do not fit together.
        UnknownArgumentError: a keyword is unknown.
        NotImplementedError: torch.func transforms an argument.
    """
    gate = (use_gate_in_kernel, safe_gate, lower_bound)
    options = DeltaRuleOptions(True, scale, chunk_size, use_qk_l2norm_in_kernel, *gate)
    arguments = Arguments(q, k, v, g, beta, A_log, dt_bias)
    recompute = not disable_recompute
    return _chunked(arguments, initial_state, cu_seqlens, options, output_final_state, recompute, cp_context, impl)


@refuse_unknown_keywords
def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule of GDN token by token; arguments and results are those of chunk_gated_delta_rule."""
    options = DeltaRuleOptions(False, scale, 1, use_qk_l2norm_in_kernel)
    arguments = Arguments(q, k, v, g, beta, None, None)
    return _recurrent(arguments, initial_state, cu_seqlens, options, output_final_state)


@refuse_unknown_keywords
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK_SIZE,
    cp_context: FLACPContext | None = None,
    disable_recompute: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule of GDN in chunks, with one decay per head.

    Arguments, results and errors are those of chunk_kda, except g: log decay, natural log, <= 0. [B, T, HV]

    Reference: Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.
    """
    options = DeltaRuleOptions(False, scale, chunk_size, use_qk_l2norm_in_kernel)
    arguments = Arguments(q, k, v, g, beta, None, None)
    return _chunked(
        arguments, initial_state, cu_seqlens, options, output_final_state, not disable_recompute, cp_context, impl
    )


def _check(
    arguments: Arguments, initial: Tensor | None, cu_seqlens: Tensor | np.ndarray | None, options: DeltaRuleOptions
) -> np.ndarray | None:
    """Check all arguments, and return cu_seqlens on the host."""
    checked = arguments._asdict() | {"initial_state": initial}
    infos = {name: _info(name, x) for name, x in checked.items()}
    if isinstance(cu_seqlens, np.ndarray):  # from cp_context
        check_arguments(options, infos | {"cu_seqlens": ArrayInfo(cu_seqlens.shape, cu_seqlens.dtype.name, cu_seqlens)})
        return cu_seqlens
    info = _info("cu_seqlens", cu_seqlens)
    check_arguments(options, infos | {"cu_seqlens": info})
    if cu_seqlens is None or info is None:
        return None
    values = _values_of(cu_seqlens)
    check_arguments(options, infos | {"cu_seqlens": info._replace(values=values)})
    return values


def _values_of(cu_seqlens: Tensor) -> np.ndarray:
    """Return the values of offsets on the host.

    Raises:
        ValueError: the tensor has no values, because it is on the meta device or transformed.
    """
    if cu_seqlens.is_meta or is_transformed(cu_seqlens):
        actual = "one on the meta device" if cu_seqlens.is_meta else "one that torch.func transforms"
        raise ValueError(f"cu_seqlens: expected a tensor whose values can be read, got {actual}")
    return np.array(cu_seqlens.tolist(), str(cu_seqlens.dtype).removeprefix("torch."))


def _info(name: str, x: Tensor | None) -> ArrayInfo | None:
    """Return shape and type of an argument for check_arguments, or None; reject other objects than tensors."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
    return ArrayInfo(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _recurrent(
    arguments: Arguments,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments and run the recurrence token by token."""
    cu_seqlens_cpu = _check(arguments, initial, cu_seqlens, options)
    with without_autocast(arguments.q.device.type):  # the arguments determine the types
        inputs = recurrence_inputs(*arguments, options)
        o, finals = recurrent(*inputs, initial, None if cu_seqlens_cpu is None else cu_seqlens_cpu.tolist())
    return o.to(arguments.v.dtype), finals if output_final_state else None


def _chunked(*call: Any) -> tuple[Tensor, Tensor | None]:
    """Run _chunked_eagerly, outside of any torch.compile graph, because the host reads the offsets of sequences."""
    if torch.compiler.is_compiling():
        import torch._dynamo as dynamo  # only graph_break has a message that fullgraph=True shows

        dynamo.graph_break(
            msg="chunk_kda and chunk_gated_delta_rule read offsets on the host; leave fullgraph=True out"
        )
        eagerly: Any = torch.compiler.disable(_chunked_eagerly)
        return eagerly(*call)
    return _chunked_eagerly(*call)


def _chunked_eagerly(
    arguments: Arguments,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
    output_final_state: bool,
    recompute: bool,
    context: FLACPContext | None,
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, and run the rule in chunks by the kernels, by PyTorch, or over the ranks of a context."""
    name = "chunk_kda" if options.per_channel else "chunk_gated_delta_rule"
    refuse_transformed(name, f"call {name.replace('chunk', 'recurrent')}, or torch.autograd", *arguments, initial)
    q = arguments.q
    if context is not None:
        check_part(context, tuple(getattr(q, "shape", ())), _offsets_to_compare(context, cu_seqlens))
        context = context_for(context, q)
    cu_seqlens_cpu = _check(arguments, initial, cu_seqlens if context is None else context.cu_seqlens_cpu, options)
    options = options.for_length(q.shape[1])
    impl = implementation_for(impl, context)
    kernels = kernel_backend(impl, q)

    def run(initial: Tensor | None, context: FLACPContext | None = None) -> tuple[Tensor, Tensor]:
        if kernels is not None:
            return chunked_by_kernels(kernels, arguments, initial, options, cu_seqlens_cpu, recompute, context)
        if context is None:
            o, _, finals = chunked(arguments, initial, options, cu_seqlens_cpu, recompute)
            return o, finals
        return _over_ranks(arguments, initial, options, recompute, context)

    with without_autocast(q.device.type):  # the arguments determine the types
        if context is not None and is_pipelined(context):  # run then treats the part as whole sequences
            anchor = next((x for x in (*arguments, initial) if x is not None and x.requires_grad), q)
            o, finals = run_pipelined(initial, _state_like(arguments), context, run, anchor)
        else:
            o, finals = run(initial, context)
    return o, finals if output_final_state else None


def _offsets_to_compare(context: FLACPContext, cu_seqlens: Tensor | None) -> np.ndarray | None:
    """Return the values of cu_seqlens for comparison with the context; None for None or the context's own tensor."""
    if cu_seqlens is None or cu_seqlens is getattr(context, "cu_seqlens", None):
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: expected a tensor, got {type(cu_seqlens).__name__}")
    return _values_of(cu_seqlens)


def _over_ranks(
    arguments: Arguments,
    initial: Tensor | None,
    options: DeltaRuleOptions,
    recompute: bool,
    context: FLACPContext,
) -> tuple[Tensor, Tensor]:
    """Run the rule over this rank's part of the sequences."""
    v = arguments.v
    like = _state_like(arguments)
    _, key, value = like.shape
    exchange = StateExchange(context, value, _log_decay(arguments, options, context))
    chunked_results = chunked(
        arguments,
        with_transition_columns(initial, context, like),
        options,
        context.cu_seqlens_cpu,
        recompute,
        0 if context.is_first_rank else key,
        exchange,
    )
    o, finals = complete(*chunked_results, exchange)
    return o.to(v.dtype), finals


def _state_like(arguments: Arguments) -> Tensor:
    """Return a state of zeros [HV, K, V]."""
    q = arguments.q
    v = arguments.v
    dtype = getattr(torch, accumulation_dtype(str(q.dtype).removeprefix("torch.")))
    return q.new_zeros(v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


def _log_decay(arguments: Arguments, options: DeltaRuleOptions, context: FLACPContext) -> Tensor | None:
    """Return the sum of log decays over the part, [HV, K] or [HV, 1], for a low-rank transition."""
    if context.cp_transition_rank is None:
        return None
    q, k, _, g, _, A_log, dt_bias = arguments
    with torch.no_grad():
        _, _, g = apply_norm_and_gate(q, k, g, A_log, dt_bias, options)
        total = at_least_float32(g[0]).sum(0)
    return total if total.ndim == 2 else total[:, None]

"""What the delta rule does not take is named."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych.plans.model.delta_rule import ArrayInfo, DeltaRuleOptions, check_arguments
from tests.backends import BACKENDS, backend_module
from tests.linear_attention.support import make_case


def wrong(**changes) -> dict[str, Any]:
    case = make_case(length=10, heads=2, group=2, key=3, width=4, dtype=np.float32)
    return {**case.arrays, **changes}


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD = {
    "q's axes": (wrong(q=zeros(10, 2, 3)), r"q: expected shape \[B, T, H, K\] without empty axes, got \[10, 2, 3\]"),
    "no token": (wrong(q=zeros(1, 0, 2, 3)), r"q: expected shape .* without empty axes, got \[1, 0, 2, 3\]"),
    "k": (wrong(k=zeros(1, 10, 2, 4)), r"k: expected shape \[B, T, H, K\] = \[1, 10, 2, 3\], got \[1, 10, 2, 4\]"),
    "heads": (wrong(v=zeros(1, 10, 3, 4)), r"v: expected a multiple of q's 2 heads, got 3"),
    "v": (wrong(v=zeros(1, 9, 4, 4)), r"v: expected shape \[B, T, HV, V\] = \[1, 10, 4, 4\], got \[1, 9, 4, 4\]"),
    "g": (wrong(g=zeros(1, 10, 4)), r"g: expected shape \[B, T, HV, K\] = \[1, 10, 4, 3\], got \[1, 10, 4\]"),
    "beta": (wrong(beta=zeros(1, 10, 2)), r"beta: expected shape \[B, T, HV\] = \[1, 10, 4\], got \[1, 10, 2\]"),
    "state": (wrong(initial_state=zeros(1, 4, 4, 3)), r"initial_state: expected shape .* = \[1, 4, 3, 4\], got"),
    "integer q": (wrong(q=zeros(1, 10, 2, 3, dtype=np.int32)), "q: expected float16, bfloat16, .* got int32"),
    "wide v": (wrong(v=zeros(1, 10, 4, 4, dtype=np.float64)), "v: expected float32, the type of q, got float64"),
    "wide g": (wrong(g=zeros(1, 10, 4, 3, dtype=np.float64)), "g: expected float32 with float32 q, got float64"),
    "narrow state": (
        wrong(initial_state=zeros(1, 4, 3, 4, dtype=np.float16)),
        "initial_state: expected float32 with float32 q, got float16",
    ),
    "offsets' type": (wrong(cu_seqlens=zeros(2, dtype=np.int16)), "cu_seqlens: expected int32, got int16"),
    "offsets' start": (wrong(cu_seqlens=np.int32([1, 10])), "cu_seqlens: expected to begin at 0, got 1"),
    "offsets' end": (wrong(cu_seqlens=np.int32([0, 9])), "cu_seqlens: expected to end at T = 10, got 9"),
    "offsets' order": (
        wrong(cu_seqlens=np.int32([0, 7, 4, 10])),
        "cu_seqlens: expected offsets that never decrease, got 7 before 4 at 1",
    ),
    "one offset": (
        wrong(cu_seqlens=np.int32([0])),
        r"cu_seqlens: expected shape \[N \+ 1\] of at least \[2\], got \[1\]",
    ),
    "keyword": (
        wrong(head_first=True),
        "head_first: expected a keyword out of q, k, v, g, beta, scale.*got 'head_first'",
    ),
    "scale": (wrong(scale=float("inf")), "scale: expected a finite number, got inf"),
    "bound": (wrong(use_gate_in_kernel=True, A_log=zeros(4), lower_bound=-6.0), r"lower_bound: .* \[-5, 0\), got -6.0"),
    "bound 0": (wrong(use_gate_in_kernel=True, A_log=zeros(4), lower_bound=0), r"lower_bound: .* \[-5, 0\), got 0"),
    "bound alone": (wrong(lower_bound=-1.0), "lower_bound: expected None without use_gate_in_kernel, got -1.0"),
    "no bound": (
        wrong(use_gate_in_kernel=True, A_log=zeros(4), safe_gate=True),
        "lower_bound: .*with safe_gate, got None",
    ),
    "no A_log": (wrong(use_gate_in_kernel=True), r"A_log: expected an array \[HV\] with use_gate_in_kernel, got None"),
    "A_log alone": (wrong(A_log=zeros(4)), "A_log: expected None without use_gate_in_kernel, got an array"),
    "dt_bias": (
        wrong(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(4)),
        r"dt_bias: expected shape \[HV \* K\] = \[12\], got \[4\]",
    ),
    "chunks": (wrong(chunk_size=48), "chunk_size: expected a power of two, got 48"),
    "impl": (wrong(impl="cuda"), "impl: expected one of .*, got 'cuda'"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(backend, name):
    arguments, message = BAD[name]
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    arguments = {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    if name in ("offsets' type", "offsets' start", "offsets' end", "offsets' order", "one offset"):
        arguments.pop("initial_state")
    rule = backend_module(backend, "delta_rule")
    with pytest.raises(ValueError, match=message):
        rule.chunk_kda(**arguments)
    if name not in ("chunks", "impl"):
        with pytest.raises(ValueError, match=message.replace("scale.*", ".*")):
            rule.recurrent_kda(**arguments)


@pytest.mark.parametrize("missing", ["q", "k", "v", "g", "beta"])
def test_an_array_that_is_missing_is_named(missing):
    """Asked of plans: while tests run, types of the backends' arguments are refused before."""
    given = {name: ArrayInfo((1, 2, 3, 4), "float32") for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=f"{missing}: expected an array, got None"):
        check_arguments(DeltaRuleOptions(per_channel=True), given | {missing: None})


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_of_gdn_is_named(backend):
    rule = backend_module(backend, "delta_rule")
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    arguments = {n: convert(x) for n, x in wrong().items()}
    for function in (rule.recurrent_gated_delta_rule, rule.chunk_gated_delta_rule):
        with pytest.raises(ValueError, match=r"g: expected shape \[B, T, HV\] = \[1, 10, 4\], got \[1, 10, 4, 3\]"):
            function(**arguments)
        with pytest.raises(ValueError, match=r"A_log: expected a keyword out of q, .*, got 'A_log'"):
            function(**arguments, A_log=None)
    arguments = {n: convert(np.repeat(x, 2, 0)) for n, x in wrong(g=zeros(1, 10, 4)).items() if n != "initial_state"}
    with pytest.raises(
        ValueError, match="cu_seqlens: expected B = 1, with the sequences one after the other, got B = 2"
    ):
        rule.chunk_gated_delta_rule(**arguments, cu_seqlens=convert(np.int32([0, 10])))
    with pytest.raises(ValueError, match=r"impl: expected one of .*'triton'.*, got 'cuda'"):
        rule.chunk_gated_delta_rule(**arguments, impl="cuda")

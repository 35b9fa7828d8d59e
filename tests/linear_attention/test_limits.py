"""Where the delta rule meets what surrounds it: autocast, narrow parameters, second derivatives, many sequences."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych.plans.model.delta_rule import DeltaRuleOptions
from tests.backends import backend_module
from tests.linear_attention.support import RULES, make_case
from tests.linear_attention.test_accuracy_and_memory import accuracy

RULE = backend_module("torch", "delta_rule")


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_gradients_of_a_narrow_gate_are_summed_wide(backend, monkeypatch):
    """A sum of bfloat16 numbers in bfloat16 stands still once it is 256 times as large as each."""
    monkeypatch.setattr(backend_module(backend, "delta_rule.chunked"), "SEGMENT_SIZE", 4)
    length, heads = 2000, 2
    positive = np.abs(make_case(length=length, heads=heads, key=2, width=2).arrays["q"])
    given = {"q": positive, "k": positive, "v": np.ones_like(positive), "g": 0 * positive, "beta": positive[..., 0]}
    gate = {"A_log": np.zeros(heads), "dt_bias": np.zeros(heads * 2)}
    offsets = np.arange(0, length + 1, 4, dtype=np.int32)
    found = {}
    for name in ("float32", "bfloat16"):
        if backend == "torch":
            dtype = getattr(torch, name)
            arrays = {n: torch.from_numpy(x).to(torch.bfloat16) for n, x in given.items()}
            parameters = {n: torch.from_numpy(x).to(dtype).requires_grad_() for n, x in gate.items()}
            options = {"use_gate_in_kernel": True, "cu_seqlens": torch.from_numpy(offsets), "chunk_size": 4}
            RULE.chunk_kda(**arrays, **parameters, **options)[0].float().sum().backward()
            found[name] = [p.grad.double().numpy() for p in parameters.values()]
        else:
            arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in given.items()}
            parameters = {n: jnp.asarray(x, name) for n, x in gate.items()}
            options = {"use_gate_in_kernel": True, "cu_seqlens": offsets, "chunk_size": 4}

            def loss(parameters, arrays=arrays, options=options):
                rule = backend_module("jax", "delta_rule").chunk_kda
                return rule(**arrays, **parameters, **options)[0].astype(jnp.float32).sum()

            found[name] = [np.asarray(g, np.float64) for g in jax.jit(jax.grad(loss))(parameters).values()]
    for narrow, wide in zip(found["bfloat16"], found["float32"], strict=True):
        assert accuracy(narrow, wide, 0) < 1e-2


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_autocast_changes_nothing(rule, keep):
    """Also backward within it, where that is all our own."""
    case = make_case(rule, length=70, dtype=np.float32)
    results = []
    for enabled, form in itertools.product((False, True), ("chunk", "recurrent")):
        arrays = {n: torch.from_numpy(x).requires_grad_() for n, x in case.arrays.items()}
        options = {"disable_recompute": keep} if form == "chunk" else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = getattr(RULE, f"{form}_{rule}")(**arrays, output_final_state=True, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled and form == "chunk" and not keep):
            gradients = torch.autograd.grad([x.sum() for x in outputs], list(arrays.values()))
        results.append([*outputs, *gradients])
    for plain, cast in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, cast, strict=True))


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_derivative_is_refused_rather_than_wrong(keep):
    case = make_case(length=20)
    arrays = {n: torch.from_numpy(x).requires_grad_() for n, x in case.arrays.items()}
    o, _ = RULE.chunk_kda(**arrays, disable_recompute=keep)
    with pytest.raises(RuntimeError, match=r"expected to be differentiated once, got create_graph=True"):
        torch.autograd.grad(o.sum(), arrays["q"], create_graph=True)
    o, _ = RULE.recurrent_kda(**arrays)
    (gradient,) = torch.autograd.grad(o.sum(), arrays["q"], create_graph=True)
    assert gradient.requires_grad


@pytest.mark.parametrize(
    ("length", "asked", "taken"), [(1, 64, 1), (5, 4096, 8), (64, 64, 64), (65, 64, 64), (9, 4, 4)]
)
def test_chunks_are_no_longer_than_the_tokens_need(length, asked, taken):
    assert DeltaRuleOptions(True, chunk_size=asked).for_length(length).chunk_size == taken


@pytest.mark.parametrize("options", [{"chunk_size": 64.0}, {"chunk_size": True}, {"scale": "a"}])
def test_options_of_other_types_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}: expected .*got {next(iter(options.values()))!r}"):
        DeltaRuleOptions.__post_init__(type("Options", (), {"scale": None, "chunk_size": 64, **options}))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_time_grows_no_faster_than_the_number_of_sequences(backend):
    """With initial states, in forward and backward; four times as many take less than eight times as long."""

    def seconds(count: int) -> float:
        case = make_case(
            length=2 * count, heads=1, key=8, width=8, offsets=[*range(0, 2 * count + 1, 2)], dtype=np.float32
        )
        arrays = dict(case.arrays)
        offsets = arrays.pop("cu_seqlens")
        if backend == "torch":
            arrays = {n: torch.from_numpy(x).requires_grad_() for n, x in arrays.items()}
            run = lambda: RULE.chunk_kda(**arrays, cu_seqlens=torch.from_numpy(offsets))[0].sum().backward()  # noqa: E731
        else:
            rule = backend_module("jax", "delta_rule").chunk_kda
            gradient = jax.jit(jax.grad(lambda x, cu: rule(**x, cu_seqlens=cu)[0].sum()))
            run = lambda: jax.block_until_ready(gradient(arrays, offsets))  # noqa: E731
        run()
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert seconds(4000) < 8 * seconds(1000)

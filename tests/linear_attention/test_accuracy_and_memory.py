"""The delta rule at its limits: long sequences in float32, strong gates, what is saved, many heads."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych.plans.model.delta_rule import SAVED_BY_REFERENCE
from tests.backends import TORCH_DAILY, TORCH_FIRST, assert_close, backend_module, normal
from tests.linear_attention.support import RULES, TOLERANCE, Case, make_case, run


def accuracy(actual: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """Norm-wise, relative to the expected, or to floor where that has vanished."""
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), floor))


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strength", [0.001, 1.0, 50.0])
def test_float32_stays_accurate_over_8192_tokens(backend, rule, strength):
    """Errors against float64: outputs and states 1e-4, gradients 1e-3."""
    case = make_case(rule, length=8192, key=32, width=32, strength=strength)
    case.arrays["beta"] /= 2
    expected = run("torch", "chunk", case)
    narrow = Case(rule, {name: x.astype(np.float32) for name, x in case.arrays.items()}, {})
    results = run(backend, "chunk", narrow)
    largest = max(np.linalg.norm(x) for x in expected)
    for place, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
        assert actual.dtype == np.float32
        assert accuracy(actual, wanted, 1e-6 * largest) <= (1e-4 if place < 2 else 1e-3), place


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["strong decay", "equal keys", "equal keys, twice corrected", "nothing corrected"])
def test_nothing_overflows(backend, rule, what):
    case = make_case(rule, length=128, key=16, width=16, dtype=np.float32)
    case.arrays["g"] = np.full_like(case.arrays["g"], -50 if what == "strong decay" else 0)
    case.arrays["beta"] = np.full_like(
        case.arrays["beta"], {"nothing corrected": 0, "equal keys, twice corrected": 2}.get(what, 1)
    )
    if "equal keys" in what:
        case.arrays["k"] = np.broadcast_to(case.arrays["k"][:, :1], case.arrays["k"].shape).copy()
    wide = Case(rule, {name: x.astype(np.float64) for name, x in case.arrays.items()}, {})
    results = zip(run(backend, "chunk", case), run("torch", "recurrent", wide), strict=True)
    for place, (actual, expected) in enumerate(results):
        assert np.isfinite(actual).all(), place
        assert accuracy(actual, expected, 1e-4) <= (1e-4 if place < 2 else 1e-3), place


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("rule", RULES)
def test_a_strong_decay_costs_later_weak_ones_no_digits(backend, rule):
    """Sums of decays, not differences of sums: after a decay of -2000 a chunk knows one of -0.01 to 6 digits."""
    case = make_case(rule, length=64, key=8, width=8, strength=0.02, dtype=np.float32)
    case.arrays["g"][:, :40] = -50
    wide = Case(rule, {name: x.astype(np.float64) for name, x in case.arrays.items()}, {})
    results = zip(run(backend, "chunk", case)[:2], run("torch", "recurrent", wide)[:2], strict=True)
    assert max(accuracy(actual, expected, 0) for actual, expected in results) < 2e-6


def saved_by_torch(case: Case, **options) -> list[torch.Tensor]:
    """What autograd keeps for the backward of a chunked call."""
    saved: list[torch.Tensor] = []
    arrays = {n: torch.from_numpy(x) for n, x in case.arrays.items()}
    arrays = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in arrays.items()}
    function = getattr(backend_module("torch", "delta_rule"), f"chunk_{case.rule}")

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(**arrays, **case.options, **options)
    return saved


def size_of(tensors) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def test_torch_saves_its_arguments_and_a_state_a_segment():
    case = make_case(length=1200, key=4, width=3, gate=True)
    shapes = [case.arrays[name].shape for name in SAVED_BY_REFERENCE[:-2]]
    initial, begins = (1, 2, 4, 3), (2, 2, 4, 3)  # of one sequence; of the second and third segment
    assert [tuple(x.shape) for x in saved_by_torch(case)] == [initial, *shapes, begins]


def test_jax_saves_its_arguments_and_a_state_a_segment():
    case = make_case(length=1200, key=4, width=3, gate=True)
    function = backend_module("jax", "delta_rule").chunk_kda
    program = jax.make_jaxpr(lambda a: jax.vjp(lambda a: function(**a, **case.options)[0], a)[1])(case.arrays)
    saved = Counter(v.aval.shape for v in program.jaxpr.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
    wanted = Counter(case.arrays[name].shape for name in SAVED_BY_REFERENCE[:-2]) + Counter(
        [(1, 2, 4, 3), (2, 2, 4, 3)]
    )
    assert saved == wanted


@pytest.mark.parametrize("rule", RULES)
def test_what_is_saved_is_a_fifth_of_what_autodiff_keeps(rule):
    """The other four fifths are what disable_recompute keeps, which is autodiff through the chunked forward."""
    case = make_case(rule, length=2048, key=32, width=32, state=False, dtype=np.float32)
    assert size_of(saved_by_torch(case)) <= 0.2 * size_of(saved_by_torch(case, disable_recompute=True))


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_the_use_in_its_source_runs_as_written(backend):
    """Seed 002's example: keywords, bfloat16 and all, on one rank."""
    draw = np.random.default_rng(0)
    q, k, v, g = (draw.standard_normal((1, 96, 2, 8)) for _ in range(4))
    beta = draw.uniform(size=(1, 96, 2))
    A_log, dt_bias = draw.standard_normal(2), draw.standard_normal(16)
    if backend == "torch":
        q, k, v, g, beta = (torch.tensor(x).bfloat16() for x in (q, k, v, g, beta))
        A_log, dt_bias, offsets = (
            torch.tensor(A_log).float(),
            torch.tensor(dt_bias).float(),
            torch.tensor([0, 96]).int(),
        )
    else:
        q, k, v, g, beta = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, g, beta))
        A_log, dt_bias, offsets = jnp.float32(A_log), jnp.float32(dt_bias), jnp.int32([0, 96])
    rule = backend_module(backend, "delta_rule")
    o, final_state = rule.chunk_kda(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        lower_bound=-5,
        cu_seqlens=offsets,
        cp_context=None,
    )
    assert final_state is None
    assert o.dtype == q.dtype
    gated = rule.kda_gate(g, A_log, dt_bias, -5)
    assert str(gated.dtype).endswith("float32")
    wide = [
        x.astype(np.float64) if backend == "jax" else x.double()
        for x in (rule.l2norm(q), rule.l2norm(k), v, gated, beta)
    ]
    expected = rule.recurrent_kda(*wide)[0]
    o, expected = (np.asarray(x.astype(jnp.float64) if backend == "jax" else x.double()) for x in (o, expected))
    assert accuracy(o, expected, 0) < 1e-2


@pytest.mark.parametrize("backend", TORCH_FIRST)
def test_more_heads_of_sequences_than_a_grid_has_places(backend):
    """65,536 and more: a launch grid's second axis is no limit."""
    case = make_case(batch=8200, length=3, heads=8, key=1, width=1)
    first = {n: x[-1:] for n, x in case.arrays.items()}
    results, expected = (run(backend, "chunk", Case("kda", a, {}), chunk_size=4)[:2] for a in (case.arrays, first))
    assert_close([x[-1:] for x in results], expected, 1e-12)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_one_of_two_results_may_be_all_that_is_used(which, keep):
    case = make_case(length=20)
    rule = backend_module("torch", "delta_rule")
    found = []
    for function, options in ((rule.recurrent_kda, {}), (rule.chunk_kda, {"chunk_size": 8, "disable_recompute": keep})):
        arrays = {n: torch.tensor(x, requires_grad=True) for n, x in case.arrays.items()}
        result = function(**arrays, output_final_state=True, **options)[which]
        gradients = torch.autograd.grad(
            result, list(arrays.values()), torch.from_numpy(normal(0, *result.shape)), allow_unused=True
        )
        found.append(
            [np.zeros(x.shape) if g is None else g.numpy() for g, x in zip(gradients, arrays.values(), strict=True)]
        )
    assert_close(found[1], found[0], TOLERANCE)

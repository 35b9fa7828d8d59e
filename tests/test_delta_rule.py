"""The gated delta rule: chunked against recurrent, PyTorch against JAX, and what no form may do."""

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.delta_rule import SAVED, ArrayInfo, DeltaRuleOptions, check_arguments, cut_into_chunks, most_chunks
from tests.backends import (
    BACKENDS,
    TORCH_DAILY,
    TORCH_FIRST,
    _Unoptimised,
    assert_close,
    normal,
    room,
    value_and_gradients,
)

RULES = ("kda", "gated_delta_rule")
TOLERANCE = 1e-10


class Case(NamedTuple):
    """Arrays by the name of the argument, and the options of a call."""

    rule: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make_case(
    rule: str = "kda",
    batch: int = 1,
    length: int = 50,
    heads: int = 2,
    group: int = 1,
    key: int = 5,
    width: int = 3,
    offsets: list[int] | None = None,
    strength: float = 1.0,
    seed: int = 0,
    state: bool = True,
    gate: bool = False,
    dtype=np.float64,
    **options,
) -> Case:
    """Random arguments; decays from about 0 to -strength, beta from 0 to 2."""
    draw = np.random.default_rng(seed)
    value_heads = heads * group
    per_head = (batch, length, value_heads)
    decay = per_head + ((key,) if rule == "kda" else ())
    g = -strength * draw.uniform(size=decay) ** draw.choice([1, 8], size=decay)
    arrays = {
        "q": unit(draw.standard_normal((batch, length, heads, key))),
        "k": unit(draw.standard_normal((batch, length, heads, key))),
        "v": draw.standard_normal((batch, length, value_heads, width)),
        "g": draw.standard_normal(decay) if gate else g,
        "beta": 2 * draw.uniform(size=per_head) * draw.choice([0, 1, 1, 1], size=per_head),
    }
    if state:
        sequences = batch if offsets is None else len(offsets) - 1
        arrays["initial_state"] = draw.standard_normal((sequences, value_heads, key, width))
    if gate:
        arrays |= {"A_log": draw.standard_normal(value_heads), "dt_bias": draw.standard_normal(value_heads * key)}
        options |= {"use_gate_in_kernel": True}
    if offsets is not None:
        arrays["cu_seqlens"] = np.array(offsets, np.int32)
    return Case(rule, {n: x if n == "cu_seqlens" else x.astype(dtype) for n, x in arrays.items()}, options)


def run(backend: str, form: str, case: Case, seed: int = 0, **more) -> list[np.ndarray]:
    """Outputs, final states, and gradients of every argument, under random cotangents."""
    function = getattr(room(backend, "delta_rule"), f"{form}_{case.rule}")
    names = list(case.arrays)

    def call(*values):
        return function(**dict(zip(names, values, strict=True)), output_final_state=True, **case.options, **more)

    outputs, gradients = value_and_gradients(backend, call, list(case.arrays.values()), seed)
    return [*outputs, *gradients]


@st.composite
def cases(draw) -> tuple[Case, list[str]]:
    """A case, and what is hard about it."""
    rule, gate = draw(st.sampled_from(RULES)), False
    sizes = st.integers(1, 9)
    length = draw(st.one_of(st.integers(1, 40), st.integers(41, 300)))
    offsets = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, length), max_size=6))
        offsets = [0, *sorted(inner), length]
    if rule == "kda":
        gate = draw(st.booleans())
    options: dict[str, Any] = {}
    if gate and draw(st.booleans()):
        options["lower_bound"] = draw(st.sampled_from([-5, -0.5]))
    if draw(st.booleans()):
        options["use_qk_l2norm_in_kernel"] = True
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([1.0, -0.3]))
    strength = draw(st.sampled_from([0.0, 0.01, 1.0, 50.0]))
    batch = 1 if offsets else draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    hard = {
        "an empty sequence": offsets is not None and len(set(offsets)) < len(offsets),
        "no decay": strength == 0 and not gate,
        "strong decay": strength == 50 and not gate,
        "shared heads": group > 1,
        "a gate": gate,
    }
    case = make_case(
        rule,
        batch,
        length,
        draw(st.integers(1, 2)),
        group,
        draw(sizes),
        draw(sizes),
        offsets,
        strength,
        draw(st.integers(0, 99)),
        draw(st.booleans()),
        gate,
        **options,
    )
    return case, [name for name, is_there in hard.items() if is_there]


def test_chunked_is_recurrent_in_torch(monkeypatch):
    """At every length, width, group, packing and strength of decay, with segments of one chunk and of several."""
    from reference_torch.delta_rule import chunked

    drawn = Counter()

    @given(
        drawn_case=cases(),
        chunk_size=st.sampled_from([1, 4, 16, 64, 128]),
        keep=st.booleans(),
        segment=st.sampled_from([1, 64]),
    )
    def check(drawn_case, chunk_size, keep, segment):
        case, hard = drawn_case
        drawn.update(hard)
        drawn["several segments"] += not keep and case.arrays["q"].shape[1] > max(chunk_size, segment)
        drawn["all kept"] += keep
        expected = run("torch", "recurrent", case)
        monkeypatch.setattr(chunked, "SEGMENT_SIZE", segment)
        assert_close(run("torch", "chunk", case, chunk_size=chunk_size, disable_recompute=keep), expected, TOLERANCE)

    check()
    if settings().max_examples >= 25:
        hard = {
            "an empty sequence",
            "no decay",
            "strong decay",
            "shared heads",
            "a gate",
            "several segments",
            "all kept",
        }
        assert {name for name in hard if drawn[name]} == hard


BUCKETS = {
    "batch": {"batch": 2, "length": 37, "group": 2, "key": 5, "width": 7},
    "packed": {"length": 70, "offsets": [0, 0, 13, 48, 48, 69, 70, 70], "group": 2},
    "one token": {"length": 1, "key": 1, "width": 1},
    "gate": {"length": 40, "gate": True, "lower_bound": -5, "safe_gate": True, "use_qk_l2norm_in_kernel": True},
    "zeros": {"length": 33, "state": False, "scale": 0.7},
}


MARKS = {"gate": [pytest.mark.thorough]}
MARKS |= {name: [pytest.mark.slow] for name in ("batch", "one token", "zeros")}


def compiled(form: str, like: Case, **more):
    """A function of cases like this one to what ``run`` returns, in JAX, for any number of them compiled once."""
    function = getattr(room("jax", "delta_rule"), f"{form}_{like.rule}")

    def call(arrays, fixed):
        return function(**arrays, **fixed, output_final_state=True, **like.options, **more)

    @jax.jit
    def both(arrays, fixed, cotangents):
        results, pull_back = jax.vjp(lambda arrays: call(arrays, fixed), arrays)
        return [*results, *pull_back(cotangents)[0].values()]

    def compute(case: Case, seed: int = 0) -> list[np.ndarray]:
        arrays = dict(case.arrays)
        fixed = {"cu_seqlens": arrays.pop("cu_seqlens")} if "cu_seqlens" in arrays else {}
        shapes = jax.eval_shape(call, arrays, fixed)
        cotangents = tuple(normal(seed + place, *x.shape) for place, x in enumerate(shapes))
        results = dict(zip(["o", "state", *sorted(arrays)], both(arrays, fixed, cotangents), strict=True))
        return [np.asarray(results[name]) for name in ("o", "state", *arrays)]

    return compute


@pytest.mark.parametrize(
    ("rule", "bucket"),
    [
        pytest.param(rule, name, marks=pytest.mark.slow if (rule, name) == ("kda", "packed") else MARKS.get(name, []))
        for rule in RULES
        for name in BUCKETS
        if (rule, name) != ("gated_delta_rule", "gate")
    ],
)
def test_jax_is_torch(rule, bucket):
    """Recurrent and chunked, data by data, in shapes that are compiled once."""
    options = BUCKETS[bucket]
    count = max(4, settings().max_examples // 5)
    drawn = [make_case(rule, **options, strength=(0.0, 0.1, 1.0, 50.0)[n % 4], seed=n) for n in range(count)]
    forms = [compiled("recurrent", drawn[0])]
    forms += [compiled("chunk", drawn[0], chunk_size=16, disable_recompute=keep) for keep in (False, True)]
    for seed, case in enumerate(drawn):
        expected = run("torch", "recurrent", case, seed)
        for form in forms:
            with _Unoptimised():
                assert_close(form(case, seed), expected, TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("keep", [False, True])
def test_jax_is_torch_by_segments(keep, monkeypatch):
    """Several segments, the last of which is not full."""
    from jax_impl.delta_rule import chunked

    monkeypatch.setattr(chunked, "SEGMENT_SIZE", 32)
    case = make_case(length=100, offsets=[0, 0, 45, 99, 100])
    assert_close(
        run("jax", "chunk", case, chunk_size=16, disable_recompute=keep), run("torch", "recurrent", case), 1e-10
    )


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_known_offsets_make_no_padding_and_compute_the_same(rule):
    """Where jit does not trace cu_seqlens, chunks are counted."""
    case = make_case(rule, length=64, offsets=[0, 32, 64])
    function = getattr(room("jax", "delta_rule"), f"chunk_{rule}")
    offsets = case.arrays.pop("cu_seqlens")
    o, state = jax.jit(lambda a: function(**a, cu_seqlens=offsets, chunk_size=16, output_final_state=True))(case.arrays)
    expected = run("torch", "recurrent", Case(rule, case.arrays | {"cu_seqlens": offsets}, {}))
    assert_close([np.asarray(o), np.asarray(state)], expected[:2], TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_those_of_finite_differences(rule, keep):
    case = make_case(rule, length=7, heads=1, group=2, key=3, width=2)
    function = getattr(room("torch", "delta_rule"), f"chunk_{rule}")

    def call(*values):
        arrays = dict(zip(case.arrays, values, strict=True))
        return function(**arrays, output_final_state=True, chunk_size=4, disable_recompute=keep)

    assert torch.autograd.gradcheck(call, [torch.tensor(x, requires_grad=True) for x in case.arrays.values()])


@pytest.mark.parametrize("backend", TORCH_FIRST)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strength", [1.0, 50.0])
def test_no_output_depends_on_later_tokens(backend, rule, strength):
    """To the last bit: whatever comes later, and however strongly it decays."""
    function = getattr(room(backend, "delta_rule"), f"chunk_{rule}")
    case = make_case(rule, length=90, strength=strength, dtype=np.float32, key=16, width=8)
    other = make_case(rule, length=90, strength=50.0, dtype=np.float32, key=16, width=8, seed=1)

    def outputs(arrays):
        if backend == "torch":
            return function(**{n: torch.from_numpy(x) for n, x in arrays.items()}, chunk_size=64)[0].numpy()
        return np.asarray(jitted(arrays))

    jitted = jax.jit(lambda arrays: function(**arrays, chunk_size=64)[0])
    whole = outputs(case.arrays)
    tokens = {name: x for name, x in case.arrays.items() if name != "initial_state"}
    for kept in (1, 8, 15, 16, 33, 64, 71):
        mixed = {n: np.concatenate([x[:, :kept], other.arrays[n][:, kept:]], 1) for n, x in tokens.items()}
        changed = outputs({**mixed, "initial_state": case.arrays["initial_state"]})
        assert (changed[:, :kept] == whole[:, :kept]).all(), kept
        assert (changed[:, kept:] != whole[:, kept:]).any(), kept


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_can_be_split_anywhere_and_its_state_passed_on(backend, rule):
    function = getattr(room(backend, "delta_rule"), f"chunk_{rule}")
    case = make_case(rule, length=40, batch=2)
    state = case.arrays.pop("initial_state")
    convert = torch.from_numpy if backend == "torch" else jnp.asarray

    def part(state, start, stop):
        arrays = {n: convert(x[:, start:stop]) for n, x in case.arrays.items()}
        return function(**arrays, initial_state=state, output_final_state=True, chunk_size=16)

    whole, final = part(convert(state), 0, 40)
    for cut in (17,) if backend == "jax" else range(1, 40):
        first, between = part(convert(state), 0, cut)
        second, last = part(between, cut, 40)
        joined = np.concatenate([np.asarray(first), np.asarray(second)], 1)
        assert_close([joined, np.asarray(last)], [np.asarray(whole), np.asarray(final)], 1e-12)


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
    function = getattr(room("torch", "delta_rule"), f"chunk_{case.rule}")

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
    shapes = [case.arrays[name].shape for name in SAVED[:-2]]
    states = [(1, 2, 4, 3), (2, 2, 4, 3)]  # the initial one of one sequence, and of the second and third segment
    assert [tuple(x.shape) for x in saved_by_torch(case)] == [*shapes, *states]


def test_jax_saves_its_arguments_and_a_state_a_segment():
    case = make_case(length=1200, key=4, width=3, gate=True)
    function = room("jax", "delta_rule").chunk_kda
    program = jax.make_jaxpr(lambda a: jax.vjp(lambda a: function(**a, **case.options)[0], a)[1])(case.arrays)
    kept = Counter(v.aval.shape for v in program.jaxpr.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))
    wanted = Counter(case.arrays[name].shape for name in SAVED[:-2]) + Counter([(1, 2, 4, 3), (2, 2, 4, 3)])
    assert kept == wanted


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
    rule = room(backend, "delta_rule")
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
    rule = room("torch", "delta_rule")
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_and_norm(backend):
    rule = room(backend, "delta_rule")
    x, a = normal(0, 2, 3, 4, 5) * 10, normal(1, 2, 3, 4) * 10
    A_log, bias, biases = normal(2, 4), normal(3, 4), normal(4, 20)
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    softplus = lambda x: np.logaddexp(x, 0)  # noqa: E731
    rate, biased = np.exp(A_log), x + biases.reshape(4, 5)
    pairs = [
        (rule.l2norm(convert(x)), x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)),
        (rule.l2norm(convert(0 * x)), 0 * x),
        (rule.gdn_gate(convert(a), convert(A_log), convert(bias)), -rate * softplus(a + bias)),
        (rule.gdn_gate(convert(a), convert(A_log)), -rate * softplus(a)),
        (rule.kda_gate(convert(x), convert(A_log)), -rate[:, None] * softplus(x)),
        (rule.kda_gate(convert(x), convert(A_log), convert(biases)), -rate[:, None] * softplus(biased)),
        (
            rule.kda_gate(convert(x), convert(A_log), convert(biases), -3.0),
            -3 / (1 + np.exp(-rate[:, None] * biased)),
        ),
    ]
    for actual, expected in pairs:
        assert_close([np.asarray(actual)], [expected], 1e-14)
    with pytest.raises(ValueError, match=r"lower_bound: expected a number in \[-5, 0\), got 1.0"):
        rule.kda_gate(convert(x), convert(A_log), None, 1.0)


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
    "wide v": (wrong(v=zeros(1, 10, 4, 4, dtype=np.float64)), "v: expected float32, as q is, got float64"),
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
    rule = room(backend, "delta_rule")
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
    rule = room(backend, "delta_rule")
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


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    chunk_size=st.sampled_from([1, 4, 8]),
)
def test_every_token_has_one_slot_in_a_chunk_of_its_sequence(lengths, chunk_size):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    length = int(offsets[-1])
    cuts = cut_into_chunks(offsets, length, chunk_size)
    assert (cuts.token[cuts.slot] == np.arange(length)).all()
    assert cuts.filled.sum() == cuts.filled[cuts.slot].sum() == length
    owners = np.repeat(np.arange(len(lengths)), lengths)
    assert (cuts.sequence[cuts.slot // chunk_size] == owners).all()
    assert len(cuts.sequence) == sum(-(-n // chunk_size) for n in lengths)
    most = most_chunks(length, len(lengths), chunk_size)
    assert len(cuts.sequence) <= most
    padded = cut_into_chunks(offsets, length, chunk_size, most)
    assert (padded.slot == cuts.slot).all()
    assert (padded.sequence[: len(cuts.sequence)] == cuts.sequence).all()
    assert padded.filled.sum() == length

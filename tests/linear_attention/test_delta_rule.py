"""The gated delta rule: chunked against recurrent, PyTorch against JAX, finite differences, causality, states."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans.model.delta_rule import cut_into_chunks, most_chunks
from tests.backends import BACKENDS, TORCH_DAILY, TORCH_FIRST, assert_close, backend_module, draws_are_fixed, normal
from tests.linear_attention.support import RULES, TOLERANCE, Case, cases, make_case, run


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
    if draws_are_fixed():
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
    function = getattr(backend_module("jax", "delta_rule"), f"{form}_{like.rule}")

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
    function = getattr(backend_module("jax", "delta_rule"), f"chunk_{rule}")
    offsets = case.arrays.pop("cu_seqlens")
    o, state = jax.jit(lambda a: function(**a, cu_seqlens=offsets, chunk_size=16, output_final_state=True))(case.arrays)
    expected = run("torch", "recurrent", Case(rule, case.arrays | {"cu_seqlens": offsets}, {}))
    assert_close([np.asarray(o), np.asarray(state)], expected[:2], TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_those_of_finite_differences(rule, keep):
    case = make_case(rule, length=7, heads=1, group=2, key=3, width=2)
    function = getattr(backend_module("torch", "delta_rule"), f"chunk_{rule}")

    def call(*values):
        arrays = dict(zip(case.arrays, values, strict=True))
        return function(**arrays, output_final_state=True, chunk_size=4, disable_recompute=keep)

    assert torch.autograd.gradcheck(call, [torch.tensor(x, requires_grad=True) for x in case.arrays.values()])


@pytest.mark.parametrize("backend", TORCH_FIRST)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strength", [1.0, 50.0])
def test_no_output_depends_on_later_tokens(backend, rule, strength):
    """Bitwise equal, whatever comes later, and however strongly it decays."""
    function = getattr(backend_module(backend, "delta_rule"), f"chunk_{rule}")
    case = make_case(rule, length=90, strength=strength, dtype=np.float32, key=16, width=8)
    other = make_case(rule, length=90, strength=50.0, dtype=np.float32, key=16, width=8, seed=1)

    def outputs(arrays):
        if backend == "torch":
            return function(**{n: torch.from_numpy(x) for n, x in arrays.items()}, chunk_size=64)[0].numpy()
        return np.asarray(jitted(arrays))

    jitted = jax.jit(lambda arrays: function(**arrays, chunk_size=64)[0])
    whole = outputs(case.arrays)
    tokens = {name: x for name, x in case.arrays.items() if name != "initial_state"}
    for length in (1, 8, 15, 16, 33, 64, 71):
        mixed = {n: np.concatenate([x[:, :length], other.arrays[n][:, length:]], 1) for n, x in tokens.items()}
        changed = outputs({**mixed, "initial_state": case.arrays["initial_state"]})
        assert (changed[:, :length] == whole[:, :length]).all(), length
        assert (changed[:, length:] != whole[:, length:]).any(), length


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_can_be_split_anywhere_and_its_state_passed_on(backend, rule):
    function = getattr(backend_module(backend, "delta_rule"), f"chunk_{rule}")
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_and_norm(backend):
    rule = backend_module(backend, "delta_rule")
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


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    chunk_size=st.sampled_from([1, 4, 8]),
)
def test_every_token_has_one_slot_in_a_chunk_of_its_sequence(lengths, chunk_size):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    length = int(offsets[-1])
    cuts = cut_into_chunks(offsets, length, chunk_size)
    assert (cuts.token_of_slot[cuts.slot_of_token] == np.arange(length)).all()
    assert cuts.is_filled.sum() == cuts.is_filled[cuts.slot_of_token].sum() == length
    owners = np.repeat(np.arange(len(lengths)), lengths)
    assert (cuts.sequence_ids[cuts.slot_of_token // chunk_size] == owners).all()
    assert len(cuts.sequence_ids) == sum(-(-n // chunk_size) for n in lengths)
    most = most_chunks(length, len(lengths), chunk_size)
    assert len(cuts.sequence_ids) <= most
    padded = cut_into_chunks(offsets, length, chunk_size, most)
    assert (padded.slot_of_token == cuts.slot_of_token).all()
    assert (padded.sequence_ids[: len(cuts.sequence_ids)] == cuts.sequence_ids).all()
    assert padded.is_filled.sum() == length

"""Operations: each against an oracle in plain numpy or loops, and the backends against each other."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parity.tolerances import OPERATION
from tests.backends import BACKENDS, assert_close, backend_module, call, normal, value_and_gradients


def attention_by_loops(q, k, v, allowed):
    """One head, one query at a time."""
    out = np.zeros_like(q)
    batch, length, heads, width = q.shape
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // k.shape[2])
            for t in range(length):
                seen = [s for s in range(t + 1) if allowed[b, t, s]]
                if not seen:
                    continue
                scores = np.array([q[b, t, h] @ k[b, s, group] / math.sqrt(width) for s in seen])
                weights = np.exp(scores - scores.max())
                out[b, t, h] = sum(w * v[b, s, group] for w, s in zip(weights / weights.sum(), seen, strict=True))
    return out


ATTENTION_SHAPES = [(2, 7, 4, 2, 6), (1, 1, 2, 2, 4), (2, 5, 6, 1, 2), (1, 16, 3, 3, 8)]  # B, T, H, G, d


@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["causal_attention", "fused_attention"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_against_loops(backend, name, shape, masked):
    batch, length, heads, groups, width = shape
    q, k, v = normal(0, batch, length, heads, width), *normal(1, 2, batch, length, groups, width)
    allowed = np.random.default_rng(2).random((batch, length, length)) < (0.5 if masked else 2.0)
    allowed[:, 0] &= not masked  # the first token may attend to nothing at all
    attend = getattr(backend_module(backend, "ops"), name)
    out = call(backend, attend, q, k, v, *([allowed] if masked else []))
    assert_close([out], [attention_by_loops(q, k, v, allowed)], 1e-14)
    if masked:
        np.testing.assert_array_equal(out[:, 0], 0.0)


@pytest.mark.parametrize("shape", [(0, 3, 2, 4, 4), (2, 0, 2, 4, 4), (2, 3, 0, 4, 4), (2, 3, 2, 4, 0)])  # B, T, H, d, e
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["causal_attention", "fused_attention"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_nothing_is_empty(backend, name, shape, masked):
    batch, length, heads, width, value_width = shape
    q, k = np.zeros((batch, length, heads, width)), np.zeros((batch, length, 1, width))
    mask = [np.ones((batch, length, length), bool)] if masked else []
    out = call(
        backend, getattr(backend_module(backend, "ops"), name), q, k, np.zeros((batch, length, 1, value_width)), *mask
    )
    assert out.shape == (batch, length, heads, value_width)


@pytest.mark.parametrize("name", ["causal_attention", "fused_attention"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_causal_to_the_last_bit(backend, name):
    q, k, v = normal(0, 3, 2, 9, 4, 6)
    attend = getattr(backend_module(backend, "ops"), name)
    before = call(backend, attend, q, k, v)
    for x in (q, k, v):
        x[:, 5:] += 1.0
    after = call(backend, attend, q, k, v)
    np.testing.assert_array_equal(after[:, :5], before[:, :5])
    assert (after[:, 5:] != before[:, 5:]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_an_allowed_token_are_0_in_float16(backend):
    """The score of a token that is not allowed is -40, which added to the smallest float16 would be infinite."""
    q, k, v = (np.full((1, 3, 1, 4), sign * size, np.float16) for sign, size in ((-1, 4), (1, 5), (1, 1)))
    allowed = np.tril(np.ones((1, 3, 3), bool))
    allowed[0, 1] = False
    found = call(backend, backend_module(backend, "ops").causal_attention, q, k, v, allowed)
    assert np.array_equal(found[0, :, 0, 0], [1, 0, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_embedding_turns_pairs(backend):
    x, base = normal(0, 2, 5, 3, 8), 100.0
    positions = np.array([0, 3, 4, 10, 1000])
    out = call(backend, lambda x, p: backend_module(backend, "ops").rotary_embedding(x, p, base), x, positions)
    pairs = x[..., :4] + 1j * x[..., 4:]
    angle = positions[:, None, None] * base ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angle)
    assert_close([out], [np.concatenate([turned.real, turned.imag], -1)], 1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_scores_depend_on_distance_only(backend):
    rotate = backend_module(backend, "ops").rotary_embedding
    q, k = normal(0, 2, 1, 1, 1, 8)

    def score(a, b):
        turned = [call(backend, lambda x, p: rotate(x, p, 1e4), x, np.array([at])) for x, at in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-11)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def _erf(x):
    return np.vectorize(math.erf)(x)


ORACLES = {
    "linear": (lambda x, w, b: x @ w.T + b, [(2, 3, 5), (7, 5), (7,)]),
    "rms_norm": (lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w, [(2, 3, 5), (5,)]),
    "gelu": (lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))), [(2, 3, 5)]),
    "swiglu": (lambda x: x[..., :3] / (1 + np.exp(-x[..., :3])) * x[..., 3:], [(2, 3, 6)]),
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operation_against_numpy(backend, name):
    oracle, shapes = ORACLES[name]
    inputs = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    function = getattr(backend_module(backend, "ops"), name)
    extra = (1e-5,) if name == "rms_norm" else ()
    out = call(backend, lambda *arrays: function(*arrays, *extra), *inputs)
    assert_close([out], [oracle(*inputs)], OPERATION["float64"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_against_numpy(backend):
    logits, targets = 30 * normal(0, 2, 5, 11), np.random.default_rng(1).integers(0, 11, (2, 5)).astype(np.int32)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, targets[..., None], -1).mean()
    out = call(backend, backend_module(backend, "ops").cross_entropy, logits, targets)
    assert float(out) == pytest.approx(expected, rel=1e-13)


ATTENTIONS = ["causal_attention", "masked_causal_attention", "fused_attention", "masked_fused_attention"]


@pytest.mark.thorough
def test_backends_agree_on_values_and_gradients():
    drawn = Counter()

    @example("cross_entropy", (1, 1, 2, 2, 4), 1, 30.0, np.float64)
    @given(
        name=st.sampled_from([*ORACLES, *ATTENTIONS, "rotary_embedding", "cross_entropy"]),
        shape=st.sampled_from(ATTENTION_SHAPES),
        seed=st.integers(0, 2**20),
        scale=st.sampled_from([1e-3, 1.0, 30.0]),
        dtype=st.sampled_from([np.float64, np.float32]),
    )
    def check(name, shape, seed, scale, dtype):
        batch, length, heads, groups, width = shape
        drawn[name] += 1
        random = np.random.default_rng(seed)
        extra = {"rms_norm": (1e-5,), "rotary_embedding": (1e4,)}.get(name, ())
        if name in ORACLES:
            inputs = [scale * normal(seed + i, *s, dtype=dtype) for i, s in enumerate(ORACLES[name][1])]
        elif name == "rotary_embedding":
            inputs = [normal(seed, batch, length, heads, width, dtype=dtype), np.arange(length)]
        elif name == "cross_entropy":
            targets = random.integers(0, width, (batch, length)).astype(np.int32)
            inputs = [scale * normal(seed, batch, length, width, dtype=dtype), targets]
        else:
            inputs = [normal(seed, batch, length, heads, width, dtype=dtype)]
            inputs += [*normal(seed + 1, 2, batch, length, groups, width, dtype=dtype)]
            inputs += [random.random((batch, length, length)) < 0.6] if name.startswith("masked") else []
        results = []
        for backend in BACKENDS:
            function = getattr(backend_module(backend, "ops"), name.removeprefix("masked_"))
            values, gradients = value_and_gradients(backend, lambda *a, f=function: f(*a, *extra), inputs, seed)
            if name == "cross_entropy":
                # Its gradient, p - 1 at the target, is rounded as p and 1 are: where p is all but 1, p is compared.
                certain = normal(seed) / targets.size * np.eye(width)[targets]
                gradients = [gradient + certain.astype(dtype) for gradient in gradients]
            elif name in ATTENTIONS:
                # A token that sees one key has gradients of 0 for its query and key, the rounded difference of terms
                # of order 1; so these gradients are compared beside a 1.
                gradients = [gradient + dtype(1) for gradient in gradients[:2]] + list(gradients[2:])
            results.append((values, gradients))
        for torch_side, jax_side in zip(*results, strict=True):
            assert_close(jax_side, torch_side, OPERATION[np.dtype(dtype).name] * (4 if scale > 1 else 1))

    check()
    assert len(drawn) >= 4, drawn
    assert len(set(drawn) & set(ATTENTIONS)) >= 2, drawn

"""Philox: the published vectors, and bit-equality of numpy, PyTorch and JAX; dropout masks; initial values."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.model.parameters import ParameterSpec, initial_value, parameter_specs
from diptych.plans.model.philox import DATA_SITE, attention_site, dropout_keep, mlp_site, philox_4x32
from tests.backends import BACKENDS, TORCH_DAILY, backend_module

WORD = st.integers(0, 2**32 - 1)

VECTORS = [  # key, counter, result: the known-answer vectors of Salmon et al.'s Random123 library
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), VECTORS)
def test_published_vectors(key, counter, expected):
    assert tuple(philox_4x32(key, counter)) == expected


@given(key=st.tuples(WORD, WORD), words=st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=8))
def test_backends_agree_bit_for_bit(key, words):
    counter = tuple(np.array(words, dtype=np.uint32).T)
    expected = philox_4x32(key, counter)
    torch_words = backend_module("torch", "ops").philox_4x32(
        key, tuple(torch.from_numpy(c.astype(np.int64)) for c in counter)
    )
    jax_words = backend_module("jax", "ops").philox_4x32(key, counter)
    np.testing.assert_array_equal(torch.stack(torch_words).numpy(), expected)
    np.testing.assert_array_equal(np.stack(jax_words), expected)


def dropped(backend: str, x: np.ndarray, rate: float, seed: int, site: int, step: int, samples, positions, length):
    ops = backend_module(backend, "ops")
    wrap = torch.from_numpy if backend == "torch" else jnp.asarray
    state = ops.dropout_state(seed, step, wrap(samples), wrap(positions), length)
    return np.asarray(ops.dropout(wrap(x), rate, state, site))


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_dropout_is_the_numpy_mask(backend):
    drawn = Counter()
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 140), st.integers(1, 4), st.integers(1, 9))
    if backend == "jax":  # which compiles for each
        shapes = st.sampled_from([(1, 1, 1, 1), (3, 140, 4, 9), (2, 50, 2, 3), (1, 129, 1, 8)])

    @given(
        seed=WORD,
        step=WORD,
        site=st.integers(0, 4000),
        rate=st.floats(0.01, 0.99),
        shape=shapes,
        sample=st.sampled_from([0, 5, 2**20, 2**32 // 140, 2**31 - 9, 2**33, 2**40 + 1]),
        length=st.sampled_from([140, 4096, 2**20 - 3]),
    )
    @example(1, 2, 3, 0.5, (1, 140, 2, 3), 2**32 // 140, 140)
    @example(1, 2, 3, 0.5, (3, 140, 4, 9), 2**33, 4096)
    def check(seed, step, site, rate, shape, sample, length):
        batch, tokens, streams, width = shape
        samples, positions = sample + np.arange(batch), np.arange(tokens)
        rows = samples[:, None].astype(object) * length + positions
        drawn["rows beyond 32 bits"] += int(rows.max() >= 2**32)
        drawn["low word overflows within a sequence"] += int((rows // 2**32 != rows[:, :1] // 2**32).any())
        drawn["width no multiple of 4"] += int(streams * width % 4 != 0)
        drawn["several tiles of rows"] += int(batch * tokens > 128)
        keep = dropout_keep((seed, site), rows.astype(np.uint64), streams * width, step, rate).reshape(shape)
        x = np.random.default_rng(seed).standard_normal(shape)
        out = dropped(backend, x, rate, seed, site, step, samples, positions, length)
        np.testing.assert_array_equal(out != 0.0, keep)
        np.testing.assert_allclose(out, np.where(keep, x / (1 - rate), 0.0), rtol=1e-14)

    check()
    assert len(drawn) == 4, drawn
    assert all(drawn.values()), drawn


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_does_not_depend_on_how_the_batch_is_cut(backend):
    x = np.random.default_rng(0).standard_normal((4, 12, 2, 6))
    whole = dropped(backend, x, 0.3, 7, 1, 5, np.arange(4), np.arange(12), 12)
    part = dropped(backend, x[2:, 3:9], 0.3, 7, 1, 5, np.arange(2, 4), np.arange(3, 9), 12)
    np.testing.assert_array_equal(part, whole[2:, 3:9])


@pytest.mark.parametrize("changed", ["seed", "site", "step"])
def test_every_part_of_the_counter_matters(changed):
    base = {"key": (1, 2), "step": 3}
    other = {"seed": {"key": (9, 2), "step": 3}, "site": {"key": (1, 9), "step": 3}, "step": {"key": (1, 2), "step": 9}}
    masks = [dropout_keep(rows=np.arange(64), width=64, rate=0.5, **given) for given in (base, other[changed])]
    assert abs(np.mean(masks[0] == masks[1]) - 0.5) < 0.05


def test_rate_is_met():
    keep = dropout_keep((3, 4), np.arange(1000), 1000, 0, 0.2)
    assert abs(keep.mean() - 0.8) < 5 * np.sqrt(0.16 / keep.size)
    assert abs(np.corrcoef(keep[:, :-1].ravel(), keep[:, 1:].ravel())[0, 1]) < 5e-3


@pytest.mark.parametrize(("dtype", "sample"), [("int64", 2**33), ("int64", 2**62 + 7), ("int64", -3), ("int32", -3)])
@pytest.mark.parametrize("by_token", [False, True])
def test_rows_are_numbered_modulo_two_to_the_64_in_both_backends(dtype, sample, by_token):
    samples, positions = np.array([sample, sample + 1], dtype), np.array([0, 5, 2**40], np.int64)
    samples = np.repeat(samples[:, None], 3, 1) if by_token else samples
    rows = samples.reshape(2, -1).astype(object) * (2**32 - 1) + positions
    for backend, wrap in (("torch", torch.from_numpy), ("jax", jnp.asarray)):
        state = backend_module(backend, "ops").dropout_state(0, 0, wrap(samples), wrap(positions), 2**32 - 1)
        np.testing.assert_array_equal(np.asarray(state.row_low, np.int64), (rows % 2**32).astype(np.int64))
        np.testing.assert_array_equal(np.asarray(state.row_high, np.int64), (rows // 2**32 % 2**32).astype(np.int64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rate_zero_changes_nothing(backend):
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    np.testing.assert_array_equal(dropped(backend, x, 0.0, 0, 0, 0, np.arange(2), np.arange(3), 3), x)


def test_sites_are_distinct():
    sites = [site(layer) for layer in range(100) for site in (attention_site, mlp_site)]
    assert len(set(sites)) == 200
    assert DATA_SITE not in sites


def test_initial_values_depend_on_seed_and_name_alone():
    spec = ParameterSpec((5, 7), std=0.5)
    value = initial_value(0, "a", spec)
    np.testing.assert_array_equal(value, initial_value(0, "a", spec))
    assert (value != initial_value(0, "b", spec)).all()
    assert (value != initial_value(1, "a", spec)).all()
    wide = initial_value(0, "c", ParameterSpec((400, 400), mean=1.0, std=0.5))
    assert wide.mean() == pytest.approx(1.0, abs=0.01)
    assert wide.std() == pytest.approx(0.5, abs=0.01)
    np.testing.assert_array_equal(initial_value(0, "d", ParameterSpec((3,), mean=2.0)), [2.0, 2.0, 2.0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_have_the_planned_names_shapes_and_values(backend, tied):
    config = TransformerConfig(
        hidden_size=16,
        num_layers=12,  # more than 10: names must not be sorted as text
        num_attention_heads=4,
        num_query_groups=2,
        enable_hyper_connections=True,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not tied,
        layer_pattern="attention,attention+gelu+no-mlp-hc",
        params_dtype="float64",
    )
    specs = parameter_specs(config)
    model = backend_module(backend, "transformer").GPTModel(config)
    if backend == "torch":
        found = {name: p.detach().numpy() for name, p in model.named_parameters()}
    else:
        from flax import nnx

        found = {".".join(path): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert found.keys() == specs.keys()
    for name, spec in specs.items():
        np.testing.assert_array_equal(found[name], initial_value(config.seed, name, spec))


def test_a_state_that_changed_since_forward_is_refused_by_backward():
    """A mask of other rows would give a gradient that no output had."""
    ops = backend_module("torch", "ops")
    x = torch.ones(2, 3, 8, requires_grad=True)
    state = ops.dropout_state(1, 2, torch.arange(2), torch.arange(3), 3)
    out = ops.dropout(x, 0.5, state, 4)
    state.row_low.add_(1)
    with pytest.raises(
        RuntimeError, match="state: expected the rows that forward dropped by, got rows changed in place"
    ):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch.func.jvp's own
def test_dropout_under_transformations_of_torch_func():
    """Of x, of the rows, or of both: the masks are those of a loop."""
    ops = backend_module("torch", "ops")
    x = torch.randn(4, 2, 130, 3, 3, dtype=torch.float64)
    states = [ops.dropout_state(1, 2, 2 * n + torch.arange(2), torch.arange(130), 130) for n in range(4)]
    lows, highs = torch.stack([s.row_low for s in states]), torch.stack([s.row_high for s in states])

    def dropped(x, low, high):
        return ops.dropout(x, 0.5, states[0]._replace(row_low=low, row_high=high), 4)

    wanted = torch.stack([ops.dropout(one, 0.5, state, 4) for one, state in zip(x, states, strict=True)])
    torch.testing.assert_close(torch.func.vmap(dropped)(x, lows, highs), wanted, rtol=0, atol=0)
    same = torch.stack([ops.dropout(x[0], 0.5, state, 4) for state in states])
    mapped = torch.func.vmap(dropped, (None, 0, 0))(x[0], lows, highs)
    torch.testing.assert_close(mapped, same, rtol=0, atol=0)
    gradient = torch.func.vmap(torch.func.grad(lambda *args: dropped(*args).square().sum() / 2))(x, lows, highs)
    torch.testing.assert_close(gradient, 2 * wanted, rtol=0, atol=0)
    out, tangent = torch.func.jvp(lambda x: dropped(x, lows[0], highs[0]), (x[0],), (2 * x[0],))
    torch.testing.assert_close((out, tangent), (wanted[0], 2 * wanted[0]), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_of_nothing(backend):
    for shape in ((2, 3, 0), (0, 3, 4), (2, 0, 4)):
        out = dropped(backend, np.zeros(shape), 0.5, 0, 0, 0, np.arange(shape[0]), np.arange(shape[1]), 3)
        assert out.shape == shape

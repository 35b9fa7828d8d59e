"""mHC against oracles that share no code with it: the equations token by token, a plain network,
finite differences, and symmetries.
"""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from parity.compare import relative_difference
from parity.tolerances import OPERATION
from tests.backends import BACKENDS, assert_close, backend_module, call, normal, value_and_gradients

ORDERS = ("row", "column")


def sinkhorn_by_definition(logits: np.ndarray, iterations: int, last: str) -> np.ndarray:
    """Alternate normalisations of exp(logits), matrix by matrix, in longdouble."""
    flat = logits.reshape(-1, *logits.shape[-2:]).astype(np.longdouble)
    out = []
    for h in flat:
        matrix = np.exp(h - h.max())
        for _ in range(iterations):
            for axis in (0, 1) if last == "row" else (1, 0):
                matrix = matrix / matrix.sum(axis, keepdims=True)
        out.append(matrix)
    return np.array(out).reshape(logits.shape)


def final_matrix_backward(logits: np.ndarray, grad: np.ndarray, iterations: int, last: str) -> np.ndarray:
    """The broken variant: differentiate as if Sinkhorn had converged, from the final matrix alone."""
    final = sinkhorn_by_definition(logits, iterations, last).astype(np.float64)
    out = np.empty_like(logits)
    size = logits.shape[-1]
    for index in np.ndindex(*logits.shape[:-2]):
        p, g = final[index], grad[index]
        system = np.block([[np.diag(p.sum(1)), p], [p.T, np.diag(p.sum(0))]])
        right = np.concatenate([(p * g).sum(1), (p * g).sum(0)])
        u = np.linalg.lstsq(system, right, rcond=None)[0]
        out[index] = p * (g - u[:size, None] - u[None, size:])
    return out


def directional_derivative(logits, grad, direction, iterations, last) -> float:
    """<grad, dP/dlogits . direction> by central differences in longdouble."""
    h = np.longdouble(1e-6)
    ends = [sinkhorn_by_definition(logits.astype(np.longdouble) + s * h * direction, iterations, last) for s in (1, -1)]
    return float((grad * (ends[0] - ends[1])).sum() / (2 * h))


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_is_doubly_stochastic(backend, dtype, last):
    """To 1e-6 at logit std 1: every matrix on the side normalised last; on the other side in the mean
    and for 98 of 100 matrices after 20 iterations (the slowest of 100,000 is 2e-3 off), for all after 200.
    """
    logits = normal(0, 2000, 4, 4, dtype=dtype)
    axes = (-1, -2) if last == "row" else (-2, -1)
    for iterations, share in ((20, 0.98), (200, 1.0)):
        sinkhorn = partial(backend_module(backend, "hyper_connections").sinkhorn, iterations=iterations, last=last)
        matrix = call(backend, sinkhorn, logits)
        assert matrix.dtype == dtype
        assert (matrix > 0).all()
        exact, other = (np.abs(matrix.sum(axis, dtype=np.float64) - 1).max(-1) for axis in axes)
        assert exact.max() < 1e-6
        assert other.mean() < 1e-6
        assert (other < 1e-6).mean() >= share


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_ends_with_the_exact_side(backend, last):
    logits = 3 * normal(0, 200, 4, 4)
    matrix = call(backend, lambda x: backend_module(backend, "hyper_connections").sinkhorn(x, 3, last), logits)
    errors = {"row": np.abs(matrix.sum(-1) - 1).max(), "column": np.abs(matrix.sum(-2) - 1).max()}
    exact, other = errors.pop(last), next(iter(errors.values()))
    assert exact < 1e-7 < 1e-2 < other


@pytest.mark.parametrize("shape", [(4, 4), (3, 1, 1), (2, 5, 2, 2), (7, 8, 8), (0, 4, 4)])
@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_against_definition(backend, last, shape):
    logits = 2 * normal(0, *shape)
    matrix = call(backend, lambda x: backend_module(backend, "hyper_connections").sinkhorn(x, 7, last), logits)
    np.testing.assert_allclose(matrix, sinkhorn_by_definition(logits, 7, last).astype(float), rtol=1e-12)


def gradient_error(gradient, logits, grad, iterations, last) -> float:
    """Largest error of a gradient along a few directions, against finite differences, relative."""
    errors = []
    for seed in range(4):
        direction = normal(100 + seed, *logits.shape)
        expected = directional_derivative(logits, grad, direction, iterations, last)
        errors.append(abs((gradient * direction).sum() - expected) / np.linalg.norm(gradient))
    return max(errors)


@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("std", [1.0, 4.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_gradient_against_finite_differences(backend, std, last):
    logits, iterations = std * normal(1, 6, 4, 4), 20
    sinkhorn = backend_module(backend, "hyper_connections").sinkhorn
    _, (gradient,) = value_and_gradients(backend, lambda x: sinkhorn(x, iterations, last), [logits], seed=3)
    cotangent = normal(3, 6, 4, 4)
    assert gradient_error(gradient, logits, cotangent, iterations, last) < 2e-7


def test_a_backward_from_the_final_matrix_alone_is_caught():
    cotangent = normal(3, 6, 4, 4)
    converged, unfinished = normal(1, 6, 4, 4), 4 * normal(1, 6, 4, 4)
    for logits, caught in ((converged, False), (unfinished, True)):
        broken = final_matrix_backward(logits, cotangent, 20, "row")
        assert (gradient_error(broken, logits, cotangent, 20, "row") > 1e-3) == caught


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_survives_extreme_logits(backend):
    logits = np.zeros((3, 4, 4), np.float32)
    logits[0, 0, 0], logits[1, 2], logits[2, :, 1] = 200.0, -200.0, 300.0
    sinkhorn = backend_module(backend, "hyper_connections").sinkhorn
    (matrix,), (gradient,) = value_and_gradients(backend, sinkhorn, [logits])
    assert np.isfinite(matrix).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_below_the_floor_have_no_gradient(backend):
    """A row 75 below the others: its share of every column, 1e-33, is replaced by the floor, a constant."""
    logits = normal(0, 4, 4)
    logits[2] -= 75.0
    _, (gradient,) = value_and_gradients(backend, backend_module(backend, "hyper_connections").sinkhorn, [logits])
    assert np.abs(gradient[2]).max() < 1e-20
    assert np.abs(gradient[[0, 1, 3]]).min() > 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinkhorn_bad_input(backend):
    sinkhorn = backend_module(backend, "hyper_connections").sinkhorn
    with pytest.raises(ValueError, match="iterations: expected at least 1, got 0"):
        call(backend, lambda x: sinkhorn(x, 0), normal(0, 4, 4))
    with pytest.raises(ValueError, match="last: expected 'row' or 'column', got 'both'"):
        call(backend, lambda x: sinkhorn(x, 20, "both"), normal(0, 4, 4))


def mhc_by_definition(x, phi, alpha, bias, y, iterations, last):
    """The paper's equations for one token after another."""
    batch, length, streams, width = x.shape
    aggregated, following = np.zeros((batch, length, width)), np.zeros_like(x)
    sigmoid = lambda h: 1 / (1 + np.exp(-h))  # noqa: E731
    for b in range(batch):
        for t in range(length):
            flat = x[b, t].reshape(-1)
            h = flat / np.sqrt((flat**2).mean() + 1e-5) @ phi
            h = h * np.repeat(alpha, [streams, streams, streams**2]) + bias
            h_pre, h_post = sigmoid(h[:streams]), 2 * sigmoid(h[streams : 2 * streams])
            h_res = sinkhorn_by_definition(h[2 * streams :].reshape(streams, streams), iterations, last)
            for s in range(streams):
                aggregated[b, t] += h_pre[s] * x[b, t, s]
                following[b, t, s] = h_post[s] * y[b, t] + sum(h_res[s, j] * x[b, t, j] for j in range(streams))
    return aggregated, following


def mhc_inputs(shape, seed, dtype=np.float64):
    batch, length, streams, width = shape
    coefficients = streams * (streams + 2)
    return [
        normal(seed, *shape, dtype=dtype),
        normal(seed + 1, streams * width, coefficients, dtype=dtype) / np.sqrt(streams * width).astype(dtype),
        normal(seed + 2, 3, dtype=dtype),
        normal(seed + 3, coefficients, dtype=dtype),
        normal(seed + 4, batch, length, width, dtype=dtype),
    ]


def mhc_step(backend, iterations, last):
    """(x, phi, alpha, bias, y) -> (aggregated, x_next), through the public functions."""
    connections = backend_module(backend, "hyper_connections")

    def step(x, phi, alpha, bias, y):
        h_pre, h_post, h_res = connections.compute_mappings(x, phi, alpha, bias, iterations=iterations, last=last)
        return connections.aggregate(x, h_pre), connections.write_streams(x, h_res, y, None, h_post)

    return step


MHC_SHAPES = [(2, 3, 4, 8), (1, 5, 1, 3), (2, 2, 3, 5), (1, 7, 8, 1), (3, 1, 2, 9)]


@pytest.mark.parametrize("shape", MHC_SHAPES)
@pytest.mark.parametrize("last", ORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mhc_against_the_equations(backend, last, shape):
    inputs = mhc_inputs(shape, 0)
    out = call(backend, mhc_step(backend, 6, last), *inputs)
    assert_close(out, mhc_by_definition(*inputs, 6, last), 1e-13)


@pytest.mark.thorough
def test_backends_agree_on_mhc_and_all_its_gradients():
    drawn = Counter()

    @given(
        shape=st.sampled_from(MHC_SHAPES),
        last=st.sampled_from(ORDERS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from([np.float64, np.float32]),
    )
    def check(shape, last, seed, dtype):
        drawn[shape[2]] += 1
        inputs = mhc_inputs(shape, seed, dtype)
        results = [value_and_gradients(b, mhc_step(b, 20, last), inputs, seed) for b in BACKENDS]
        tolerance = 1e-12 if dtype == np.float64 else 1e-5
        for torch_side, jax_side in zip(*results, strict=True):
            assert_close(jax_side, torch_side, tolerance)

    check()
    assert sum(drawn[streams] for streams in drawn if streams >= 2) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_the_streams_commutes(backend):
    shape, order = (2, 3, 4, 8), np.array([2, 0, 3, 1])
    x, phi, alpha, bias, y = mhc_inputs(shape, 0)
    streams, width = shape[2:]
    columns = np.concatenate([order, streams + order, 2 * streams + (order[:, None] * streams + order).ravel()])
    rows = (order[:, None] * width + np.arange(width)).ravel()
    step = mhc_step(backend, 20, "row")
    aggregated, following = call(backend, step, x, phi, alpha, bias, y)
    permuted = call(backend, step, x[:, :, order], phi[rows][:, columns], alpha, bias[columns], y)
    assert_close(permuted, (aggregated, following[:, :, order]), 1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_then_added_equals_added_at_once(backend):
    connections = backend_module(backend, "hyper_connections")
    mixed, x, bias, h_post = normal(0, 2, 3, 4, 5), normal(1, 2, 3, 5), normal(2, 5), normal(3, 2, 3, 4)
    at_once = value_and_gradients(
        backend, lambda mixed, *rest: connections.write_streams(mixed, None, *rest), [mixed, x, bias, h_post]
    )
    in_turn = value_and_gradients(
        backend, lambda m, x, b, h: m + connections.apply_h_post(x, b, h), [mixed, x, bias, h_post]
    )
    for one, other in zip(at_once, in_turn, strict=True):
        assert_close(one, other, OPERATION["float64"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_module_signatures_of_the_seed(backend):
    config = TransformerConfig(
        hidden_size=8, num_layers=1, num_attention_heads=2, enable_hyper_connections=True, params_dtype="float64"
    )
    connections = backend_module(backend, "hyper_connections")
    module = connections.HyperConnectionModule(config, layer_number=0)
    x, y, bias = normal(0, 2, 3, 4, 8), normal(1, 2, 3, 8), normal(2, 8)

    def run(x, y, bias):
        aggregated, mixed, h_post = module(x, x, training=True)
        h_pre, same_h_post, h_res = module.compute_mappings(x)
        expanded, no_bias = module.apply_h_post((y, bias), h_post)
        assert no_bias is None
        following = module.apply_h_post_dropout_add((y, bias), h_post, mixed, None, 0)
        again = module.aggregate(x, h_pre), module.apply_h_res(h_res, x), same_h_post
        contracted = module.output_contract(module.input_expand(y, 4), 4)
        return aggregated, mixed, h_post, *again, expanded + mixed, following, contracted

    if backend == "torch":
        import torch

        with torch.no_grad():
            out = call(backend, run, x, y, bias)
    else:
        out = call(backend, run, x, y, bias)
    assert_close(out[:3], out[3:6], 1e-15)
    assert_close(out[6:7], out[7:8], 1e-14)
    assert_close(out[8:], [y], 1e-15)
    with pytest.raises(ValueError, match="n: expected the number of streams of x, 4, got 3"):
        call(backend, lambda x: module.output_contract(x, 3), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_of_different_layers_start_differently(backend):
    config = TransformerConfig(hidden_size=8, num_layers=2, num_attention_heads=2, enable_hyper_connections=True)
    first, again, second = (
        backend_module(backend, "hyper_connections").HyperConnectionModule(config, n) for n in (0, 0, 1)
    )
    values = [np.asarray(m.phi.detach() if backend == "torch" else m.phi[...]) for m in (first, again, second)]
    np.testing.assert_array_equal(values[0], values[1])
    assert (values[0] != values[2]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_logits_are_iterated_in_float32(backend):
    import jax.numpy as jnp
    import torch

    logits, sinkhorn = normal(0, 50, 4, 4), backend_module(backend, "hyper_connections").sinkhorn
    logits[0, 2] = -100.0
    if backend == "torch":
        matrix = sinkhorn(torch.from_numpy(logits).half())
        assert matrix.dtype == torch.float16
    else:
        matrix = sinkhorn(jnp.asarray(logits, jnp.float16))
        assert matrix.dtype == jnp.float16
    sums = np.asarray(matrix).astype(np.float64).sum(-1)
    assert np.abs(sums - 1).max() < 4 * 2.0**-11  # four entries, each rounded once


def test_torch_function_transforms_reach_sinkhorn():
    import torch

    sinkhorn, logits = backend_module("torch", "hyper_connections").sinkhorn, torch.from_numpy(normal(0, 3, 4, 4))
    per_matrix = torch.func.vmap(torch.func.grad(lambda x: sinkhorn(x)[0, 1]))(logits)
    one = torch.func.grad(lambda x: sinkhorn(x)[0, 1])(logits[2])
    torch.testing.assert_close(per_matrix[2], one, rtol=1e-12, atol=1e-14)


def test_coefficients_stay_float32_for_float32_streams():
    for backend in BACKENDS:
        inputs = mhc_inputs((1, 2, 4, 8), 0, np.float32)
        coefficients = call(backend, backend_module(backend, "hyper_connections").compute_mappings, *inputs[:4])
        assert {c.dtype for c in coefficients} == {np.dtype(np.float32)}
    assert relative_difference(coefficients[2].sum(-1), np.ones((1, 2, 4))) < 1e-6


def jax_sublayer(x, phi, alpha, bias, h_res):
    """The sum of what a hyper-connection around tanh returns, mixed once more by given matrices."""
    import jax.numpy as jnp

    functions = backend_module("jax", "hyper_connections")
    h_pre, h_post, own = functions.compute_mappings(x, phi, alpha, bias)
    mixed = functions.apply_h_res(h_res, functions.apply_h_res(own, x))
    return jnp.sin(functions.write_streams(mixed, None, jnp.tanh(functions.aggregate(x, h_pre)), None, h_post)).sum()


def test_jax_sums_the_gradients_of_what_is_the_same_on_all_ranks_and_for_all_samples():
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    x, *shared = map(jnp.asarray, (*mhc_inputs((2, 3, 4, 8), 0, np.float64)[:4], normal(5, 2, 3, 4, 4)))
    wanted = jax.jit(jax.grad(jax_sublayer, (0, 1, 2, 3, 4)))(x, *shared)

    def of_ranks(x, *shared):
        mesh = Mesh(np.array(jax.devices()[:1]), ("ranks",))
        by = (P("ranks"), P(), P(), P(), P("ranks"))
        return jax.shard_map(
            lambda *own: jax.lax.psum(jax_sublayer(*own), "ranks"), mesh=mesh, in_specs=by, out_specs=P()
        )(x, *shared)

    assert_close(jax.jit(jax.grad(of_ranks, (0, 1, 2, 3, 4)))(x, *shared), wanted, 1e-12)

    def of_samples(x, *shared):
        return jax.vmap(jax_sublayer, (0, None, None, None, None))(jnp.stack([x, x]), *shared).sum()

    assert_close(jax.jit(jax.grad(of_samples, (1, 2, 3, 4)))(x, *shared), [2 * g for g in wanted[1:]], 1e-12)

"""Delayed scaling of FP8: histories advance once per optimizer step, by what its backwards have observed."""

from collections import deque
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans import amax_history as plan
from diptych.plans import fp8
from diptych.plans.checkpoint import initial_weights
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.training import NonFiniteLossError
from jax_impl import amax_history as in_jax
from jax_impl import fp8 as jax_fp8
from parity.compare import relative_difference
from reference_torch import amax_history as in_torch
from reference_torch import fp8 as torch_fp8
from reference_torch.recompute.region import in_replay
from tests.backends import BACKENDS, normal, tiny_corpus, trainers
from tests.composition import with_history
from tests.test_fp8 import DELAYED, LAYERS, bits

LENGTH = 3
CONFIG = replace(LAYERS, vocab_size=256, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=LENGTH)
SMALL = replace(CONFIG, num_layers=1, layer_pattern="attention", enable_hyper_connections=False)
TRAIN = TrainConfig(train_iters=8, global_batch_size=4, micro_batch_size=2, eval_iters=1)
LARGEST = st.sampled_from([0.0, 1e-42, np.nan, np.inf, 1.0, 2.0, float(np.nextafter(np.float32(2), 0))]) | st.floats(
    2.0**-100, 2.0**100, width=32
)


def scale_of(history: deque, quantization: fp8.Quantization) -> np.float32:
    """The scale from a list of the largest entries of each step, without histories of exponents."""
    known = [amax for amax in history if np.isfinite(amax) and amax >= np.finfo(np.float32).tiny]
    if not known:
        return np.float32(1)
    bound = 2.0 ** (np.floor(np.log2(max(known))) + 1)
    return np.float32(np.clip(2.0 ** np.floor(np.log2(quantization.largest)) / bound, 2.0**-126, 2.0**126))


def exponents_of(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.int32) >> plan.MANTISSA_BITS


DELAYED_SCALES_IN_JAX = jax.jit(in_jax.delayed_scales, static_argnums=(1, 2))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.lists(st.tuples(LARGEST, LARGEST, LARGEST), min_size=1, max_size=3), max_size=6))
def test_scales_are_those_of_the_largest_entries_of_the_last_steps(steps):
    """Of several microbatches each; NumPy, PyTorch and JAX."""
    history = np.zeros(plan.SHAPE, np.float32)
    entries = [deque(maxlen=LENGTH) for _ in DELAYED]
    places = np.arange(plan.EXPONENTS)
    for microbatches in steps:
        observed = sum(plan.observed(exponents_of(largest), places) for largest in microbatches)
        history = plan.advanced(history, observed, LENGTH)
        for each, column in zip(entries, zip(*microbatches, strict=True), strict=True):
            finite = [x for x in column if np.isfinite(x)]
            each.append(max(finite, default=0.0))
        expected = [scale_of(each, quantization) for each, quantization in zip(entries, DELAYED, strict=True)]
        for found in (
            plan.scales(history, DELAYED, 3) * np.array([1, 1, 3], np.float32),
            in_torch.delayed_scales(torch.from_numpy(history), DELAYED, 1).numpy(),
            np.asarray(DELAYED_SCALES_IN_JAX(history, DELAYED, 1)),
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("factor", [1, 3, 8])
def test_backward_observes_the_exponents_of_the_three_arrays(factor):
    x, w, g = normal(0, 3, 5, dtype=np.float32), normal(1, 4, 5, dtype=np.float32), normal(2, 3, 4, dtype=np.float32)
    history = np.zeros(plan.SHAPE, np.float32)
    history[0, 0, 0, 100] = 1
    y = x @ w.T
    of_history = torch.from_numpy(history).requires_grad_()
    of_y = torch.from_numpy(y).requires_grad_()
    out = in_torch.observe(of_y, torch.from_numpy(x), torch.from_numpy(w), of_history, factor)
    out.backward(torch.from_numpy(g))

    @jax.jit
    def observe(y, history, g):
        theirs, pull_back = jax.vjp(
            lambda y, h: in_jax.observe(y, jnp.asarray(x), jnp.asarray(w), h, factor), y, history
        )
        return theirs, pull_back(g)

    theirs, of_jax = observe(y, history, g)
    expected = np.zeros((3, 256))
    for row, (array, over) in enumerate(((x, 1), (w, 1), (g, factor))):
        expected[row, 127 + int(np.floor(np.log2(np.abs(array).max() / over)))] = 1
    assert of_history.grad is not None
    for found in (of_history.grad.numpy(), np.asarray(of_jax[1])):
        np.testing.assert_array_equal(found.reshape(3, 256), expected)
    np.testing.assert_array_equal(out.detach().numpy(), y)
    np.testing.assert_array_equal(theirs, y)
    np.testing.assert_array_equal(of_jax[0], g)


def test_the_largest_weight_is_observed_as_it_is_multiplied():
    """Rounded to the type of the input, 1.9999 is 2, which has another exponent."""
    x, y, history = np.ones((1, 1), "bfloat16"), np.ones((1, 1), "bfloat16"), np.zeros(plan.SHAPE, np.float32)
    w = np.full((1, 1), 1.9999, np.float32)
    of_history = torch.from_numpy(history).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    in_torch.observe(ones, ones, torch.from_numpy(w), of_history, 1).sum().backward()
    of_jax = jax.grad(lambda h: in_jax.observe(jnp.asarray(y), jnp.asarray(x), jnp.asarray(w), h, 1).sum())(
        jnp.asarray(history)
    )
    assert of_history.grad is not None
    for found in (of_history.grad.numpy(), np.asarray(of_jax)):
        assert found.reshape(3, 256).argmax(1).tolist() == [127, 128, 127]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_given_scales(dtype):
    """NumPy, PyTorch and JAX; some entries are clipped."""
    x = (normal(0, 6, 40, dtype=np.float32) * 30).astype(dtype)
    w, g = normal(1, 30, 40, dtype=np.float32), normal(2, 6, 30, dtype=np.float32).astype(dtype)
    scales = np.array([16.0, 64.0, 2.0**14], np.float32)
    wide, of_g, rounded = x.astype(np.float32), g.astype(np.float32), w.astype(dtype).astype(np.float32)
    assert (np.abs(wide) * 16 > 448).any()
    expected = (
        fp8.matrix_product(wide, rounded, DELAYED.inputs, DELAYED.weights, (scales[0], scales[1])),
        fp8.matrix_product(of_g, rounded.T, DELAYED.gradients, DELAYED.weights, (scales[2], scales[1])),
        fp8.matrix_product(of_g.T, wide.T, DELAYED.gradients, DELAYED.inputs, (scales[2], scales[0])),
    )
    of_x = torch.from_numpy(wide).to(getattr(torch, dtype)).requires_grad_()
    of_w = torch.from_numpy(w).requires_grad_()
    y = torch_fp8.fp8_linear(of_x, of_w, DELAYED, torch.from_numpy(scales))
    y.backward(torch.from_numpy(of_g).to(y.dtype))

    @jax.jit
    def in_jax(x, w, g):
        y, pull_back = jax.vjp(lambda x, w: jax_fp8.fp8_linear(x, w, DELAYED, jnp.asarray(scales)), x, w)
        return y, *pull_back(g)

    of_jax = in_jax(x, w, g)
    for ours, other, right in zip((y, of_x.grad, of_w.grad), of_jax, expected, strict=True):
        assert ours is not None
        for found in (ours.detach().float().numpy(), np.asarray(other).astype(np.float32)):
            assert np.linalg.norm(found - right) <= (1e-6 if dtype == "float32" else 4e-3) * np.linalg.norm(right)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_clipped_and_infinite_entries(wrong):
    """Numbers above the largest are clipped; an array that is not finite becomes NaN."""
    x = np.array([[wrong, -1.0, 2.0]], np.float32)
    values = fp8.quantize(x, DELAYED.inputs, np.float32(16))[0]
    expected = [[448.0, -16.0, 32.0]] if np.isfinite(wrong) else [[np.nan] * 3]
    np.testing.assert_array_equal(values.astype(np.float32), expected)
    for found in (
        torch_fp8.quantize(torch.from_numpy(x), DELAYED.inputs, torch.tensor(16.0))[0],
        jax_fp8.quantize(jnp.asarray(x), DELAYED.inputs, jnp.float32(16.0))[0],
    ):
        np.testing.assert_array_equal(bits(found), bits(values))


@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_scales_are_named():
    current = fp8.product_recipe("e4m3", "current")
    for linear, array in ((torch_fp8.fp8_linear, torch.ones), (jax_fp8.fp8_linear, jnp.ones)):
        with pytest.raises(ValueError, match=r"scales: expected three with has_given_scale=True, got None"):
            linear(array((5, 3)), array((4, 3)), DELAYED)
        with pytest.raises(ValueError, match=r"scales: expected None with has_given_scale=False, got some"):
            linear(array((5, 3)), array((4, 3)), current, array(3))
        with pytest.raises(ValueError, match=r"scales: expected shape \(3,\) float32, got \(2,\) float"):
            linear(array((5, 3)), array((4, 3)), DELAYED, array(2))


def trainer_of(backend: str, config: TransformerConfig):
    return dict(zip(BACKENDS, trainers(config, TRAIN), strict=True))[backend]


def histories(trainer) -> dict[str, np.ndarray]:
    return {name: value for name, value in trainer.parameters().items() if plan.is_history(value.shape)}


def steps_of(trainer, count: int = 2) -> dict[str, np.ndarray]:
    """Take steps, and between them whatever must not change a history."""
    for step in range(count):
        trainer.train_step(step)
        before = histories(trainer)
        trainer.validation_loss()
        trainer.loss_and_gradients(tiny_corpus().batch(0, 4, SMALL.seq_length))
        for name, value in histories(trainer).items():
            np.testing.assert_array_equal(value, before[name])
    return histories(trainer)


RECOMPUTE = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
]


def assert_advances_once(backend: str) -> None:
    """Recompute, which runs forwards twice, leaves the histories of a run without it, with one new entry a step."""
    made = [trainer_of(backend, replace(SMALL, **mode)) for mode in ({}, *RECOMPUTE)]
    found = [steps_of(trainer) for trainer in made]
    assert found[0].keys() == {n for n, s in parameter_specs(SMALL).items() if plan.is_history(s.shape)} != set()
    for name, value in found[0].items():
        assert value.max() == LENGTH, name
        assert {*np.unique(value)} <= {0, LENGTH - 1, LENGTH}, name
        for other in found[1:]:
            np.testing.assert_array_equal(other[name], value, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_history_advances_once_per_step(backend):
    assert_advances_once(backend)


@pytest.mark.parametrize("mode", RECOMPUTE, ids=["full", "selective"])
def test_a_history_that_advances_in_a_replay_is_noticed(mode):
    """A seeded bug of PyTorch. A function that JAX repeats cannot change a history, which is a value of the step."""
    right = in_torch.observe

    def aging(y, x, weight, history, factor):
        if in_replay():
            history.data.copy_((history.data - 1).clamp(min=0))
        return right(y, x, weight, history, factor)

    with mock.patch("reference_torch.modules.observe", aging):
        steps_of(trainer_of("torch", SMALL))
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            steps_of(trainer_of("torch", replace(SMALL, **mode)))


def test_both_backends_take_the_same_scales_and_gradients():
    """With histories of plausible exponents."""
    config = replace(SMALL, num_layers=2, layer_pattern="gdn,attention")
    found = []
    for trainer in trainers(config, TRAIN):
        trainer.set_parameters(with_history(trainer.parameters()))
        batch = tiny_corpus().batch(0, 4, SMALL.seq_length)
        found.append((trainer.loss_and_gradients(batch), trainer.train_step(0), histories(trainer)))
    ((loss, ours), step, own), ((loss_in_jax, theirs), step_in_jax, other) = found
    assert loss == pytest.approx(loss_in_jax, abs=1e-6)
    assert step.grad_norm == pytest.approx(step_in_jax.grad_norm, rel=1e-5)
    assert max(relative_difference(ours[name], theirs[name]) for name in ours) <= 1e-4
    for name, value in own.items():
        np.testing.assert_array_equal(value, other[name], name)


def test_an_infinite_loss_changes_no_history():
    for trainer in trainers(SMALL, TRAIN):
        trainer.train_step(0)
        before = histories(trainer)
        weights = trainer.parameters()
        broken = {name: np.full_like(x, np.nan) if name == "embedding.weight" else x for name, x in weights.items()}
        trainer.set_parameters(broken)
        with pytest.raises(NonFiniteLossError):
            trainer.train_step(1)
        for name, value in histories(trainer).items():
            np.testing.assert_array_equal(value, before[name])


def test_histories_are_saved_and_resumed_in_the_other_backend(tmp_path):
    for backend, other in (BACKENDS, BACKENDS[::-1]):
        first = trainer_of(backend, SMALL)
        for step in range(2):
            first.train_step(step)
        folder = tmp_path / backend
        first.save(folder)
        saved = histories(first)
        losses = []
        for each in (backend, other):
            resumed = trainer_of(each, SMALL)
            step = resumed.resume(folder)
            for name, value in histories(resumed).items():
                np.testing.assert_array_equal(value, saved[name])
            losses.append(resumed.train_step(step).loss)
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_weights_begin_runs_with_other_histories(tmp_path):
    """Without FP8, and back: histories are left out, or empty."""
    with_histories, without = SMALL, replace(SMALL, fp8=None, fp8_recipe="current", fp8_amax_history_len=16)
    for backend in BACKENDS:
        trainer = trainer_of(backend, with_histories)
        trainer.train_step(0)
        path = trainer.save(tmp_path / backend)
        plain = trainer_of(backend, without)
        plain.load_weights(path)
        weights = plain.parameters()
        assert weights.keys() == parameter_specs(without).keys()
        back = initial_weights(weights, with_histories)
        assert back.keys() == parameter_specs(with_histories).keys()
        assert not any(back[name].any() for name in histories(trainer))
        again = trainer_of(backend, with_histories)
        again.load_weights(path)
        for name, value in histories(trainer).items():
            np.testing.assert_array_equal(again.parameters()[name], value)


@pytest.mark.parametrize("change", ["tokens", "exception"])
def test_gradients_of_sums_are_those_of_means(change):
    """A loss per token multiplies gradients by 28 tokens, and scales are divided by that, also after an exception."""
    config = replace(SMALL, seq_length=7)
    batch = tiny_corpus().batch(0, 4, 7)
    found = []
    for per_token in (False, True):
        trainer = trainer_of("torch", replace(config, calculate_per_token_loss=per_token))
        trainer.set_parameters(with_history(trainer.parameters()))
        if change == "exception":
            wrong = batch._replace(tokens=np.full_like(batch.tokens, 999)).part(0, 3)
            with pytest.raises(IndexError):
                trainer.loss_and_gradients(wrong)
        gradients = trainer.loss_and_gradients(batch)[1]
        trainer.train_step(0)
        found.append((gradients, histories(trainer)))
    (gradients, own), (summed, other) = found
    assert max(relative_difference(summed[name], gradients[name]) for name in gradients) <= 1e-4
    for name, value in own.items():
        np.testing.assert_array_equal(value, other[name], name)


def test_a_history_that_an_optimizer_has_updated_is_noticed():
    for trainer, backend in zip(trainers(SMALL, TRAIN), ("torch", "jax"), strict=True):
        weights = trainer.parameters()
        trainer.set_parameters({n: x - 1e-3 if plan.is_history(x.shape) else x for n, x in weights.items()})
        expected = NonFiniteLossError if backend == "jax" else ValueError
        with pytest.raises(expected, match="give histories to HistoryAdamW" if backend == "torch" else "finite"):
            trainer.train_step(0)

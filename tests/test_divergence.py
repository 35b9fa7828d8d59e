"""Where and why the backends drift: what is measured is what is meant."""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_impl.ops
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.training import learning_rate
from jax_impl.train import Trainer as JaxTrainer
from parity import divergence
from parity.compare import relative_difference
from parity.divergence import (
    OperationError,
    Trajectory,
    adamw,
    compare_operation,
    computing_in,
    drift,
    flat,
    initial_parameters,
    layer_values,
    one_ulp,
    operation_errors,
    operation_pair,
    run_torch,
    state_of,
    trajectory,
)
from parity.rounding import EPSILON
from parity.tolerances import GRADIENT
from reference_torch.forward_context import ForwardContext
from reference_torch.train import Trainer as TorchTrainer
from reference_torch.transformer import GPTModel
from tests.backends import BACKENDS, normal, tiny_corpus

CONFIG = TransformerConfig(
    hidden_size=8,
    num_layers=2,
    num_attention_heads=2,
    seq_length=8,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=2,
    vocab_size=128,
    init_method_std=0.3,
)
PLAIN = replace(CONFIG, num_layers=1, enable_hyper_connections=False, untie_embeddings_and_output_weights=True)
TRAIN = TrainConfig(train_iters=4, global_batch_size=2, lr_warmup_iters=1, lr=1e-2, eval_iters=1)
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["mhc", "plain"])
@pytest.mark.parametrize("dtype", EPSILON)
def test_layer_values_end_in_the_models_logits(config, dtype):
    config = computing_in(config, dtype)
    values = layer_values("torch", config, initial_parameters(config), TOKENS)
    with torch.no_grad():
        logits = GPTModel(config)(torch.from_numpy(TOKENS), training=False)
    assert len(values) == config.num_layers + 2
    assert {str(value.dtype) for value in values[:-1]} == {dtype}
    if dtype != "float64":  # whose initial values are not rounded to float32
        np.testing.assert_array_equal(values[-1], logits.numpy())
    assert relative_difference(values[-1], logits.numpy()) < 1e-6


def test_layer_values_are_the_same_in_both_backends():
    config = computing_in(CONFIG, "float64")
    ours, theirs = (layer_values(backend, config, initial_parameters(config), TOKENS) for backend in BACKENDS)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == np.float64
        assert relative_difference(a, b) < GRADIENT["float64"]


def test_types():
    assert {dtype: computing_in(CONFIG, dtype).compute_dtype for dtype in EPSILON} == {
        dtype: dtype for dtype in EPSILON
    }
    for dtype, epsilon in EPSILON.items():
        assert float(ml_dtypes.finfo(np.dtype(dtype)).eps) == epsilon
    with pytest.raises(ValueError, match="dtype: expected one of bfloat16, float32, float64, got 'float16'"):
        computing_in(CONFIG, "float16")


def test_initial_parameters_are_the_models_own():
    values = dict(GPTModel(CONFIG).named_parameters())
    for name, value in initial_parameters(CONFIG).items():
        np.testing.assert_array_equal(value, values[name].detach().numpy())
    assert (initial_parameters(CONFIG, 1)["embedding.weight"] != initial_parameters(CONFIG)["embedding.weight"]).all()


@pytest.mark.parametrize("dtype", EPSILON)
def test_one_ulp_is_the_next_number_of_what_the_model_computes_in(dtype):
    config, name, start = (
        computing_in(CONFIG, dtype),
        "decoder.layers.0.mlp.linear_fc1.weight",
        initial_parameters(CONFIG),
    )
    nudged = one_ulp(start, config, name)
    assert {value.dtype for value in nudged.values()} == {np.dtype(config.params_dtype)}
    before, after = (values[name].ravel()[:1].astype(dtype) for values in (start, nudged))
    assert after == np.nextafter(before, np.array(np.inf, before.dtype))
    nudged[name].ravel()[:1] = start[name].ravel()[:1]
    np.testing.assert_array_equal(flat(nudged), flat(start))


def test_one_ulp_names_an_unknown_parameter():
    with pytest.raises(ValueError, match="name: expected one of the 26 parameters, got 'weight'"):
        one_ulp(initial_parameters(CONFIG), CONFIG, "weight")


@pytest.mark.parametrize("make", [TorchTrainer, JaxTrainer], ids=BACKENDS)
def test_trajectory_is_a_new_trainers(make):
    """From the values given, with moments of 0, on the corpus given, however the trainer was used before."""
    start, corpus = initial_parameters(PLAIN, 1), replace(tiny_corpus(), seed=3)
    new, used = make(PLAIN, TRAIN, corpus), make(PLAIN, TRAIN, tiny_corpus())
    new.set_parameters(start)
    losses = [new.train_step(step).loss for step in range(3)]
    trajectory(used, initial_parameters(PLAIN), tiny_corpus(), 2)
    seen = trajectory(used, start, corpus, 3)
    assert seen.losses.tolist() == losses
    assert seen.parameters.shape[0] == 3
    np.testing.assert_array_equal(seen.parameters[-1], flat(new.parameters()))
    assert (seen.parameters[0] != seen.parameters[1]).any()


def test_drift_is_by_step():
    a, b = (Trajectory(np.array(x), np.zeros(2)) for x in ([[3.0, 4.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 2.0]]))
    assert drift(a, b).tolist() == [0.0, 0.5]


def test_state_is_what_the_trainer_holds():
    trainer = TorchTrainer(CONFIG, replace(TRAIN, clip_grad=0.0), tiny_corpus())
    _, gradients = trainer.loss_and_gradients(tiny_corpus().batch(0, 2, CONFIG.seq_length))
    trainer.train_step(0)
    state = state_of(trainer)
    np.testing.assert_array_equal(flat(state["model."]), flat(trainer.parameters()))
    assert relative_difference(flat(state["first_moment."]), flat(gradients) * (1 - TRAIN.adam_beta1)) < 1e-6
    assert relative_difference(flat(state["second_moment."]), flat(gradients) ** 2 * (1 - TRAIN.adam_beta2)) < 1e-6


def test_bfloat16_goes_into_torch_and_back():
    array = normal(0, 3, 4).astype(ml_dtypes.bfloat16)
    widened, same = run_torch(lambda x: (x.float(), x), array.T)
    np.testing.assert_array_equal(widened, array.T.astype(np.float32))
    assert same.dtype == array.dtype
    np.testing.assert_array_equal(same, array.T)


@pytest.mark.parametrize("dtype", EPSILON)
def test_operations_are_compared_in_last_places(dtype):
    """One backend exact, the other off by 3 ulp everywhere in one of two results."""
    x = np.full(8, 1.0, dtype)

    def in_torch(x, nothing):
        assert nothing is None
        return x, 2 * x

    def in_jax(x, nothing):
        assert nothing is None
        return x * jnp.asarray(1 + 3 * EPSILON[dtype], x.dtype), 2 * x

    error, results = compare_operation("it", (in_torch, in_jax), x, None)
    share = 3 / np.sqrt(5)  # the results' norms are as 1 to 2
    assert error[:1] + error[2:3] + error[4:] == ("it", 0.0, 0.5)
    assert error.between == pytest.approx(share, rel=0.05)
    assert error.jax == pytest.approx(share, rel=0.05)
    assert [str(result.dtype) for result in results] == [dtype, dtype]
    halved, _ = compare_operation("it", (in_torch, in_jax), x, None, dtype="bfloat16")
    assert halved.between == pytest.approx(error.between * EPSILON[dtype] / EPSILON["bfloat16"])


def test_truth_is_float64():
    x = normal(0, 64, 64, dtype=np.float32)
    error, _ = compare_operation("norm", operation_pair("ops.rms_norm", epsilon=0.5), x, np.ones(64, np.float32))
    exact = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.5)
    (ours,) = run_torch(operation_pair("ops.rms_norm", epsilon=0.5)[0], x, np.ones(64, np.float32))
    assert error.torch == pytest.approx(relative_difference(ours, exact) / EPSILON["float32"], rel=1e-4)


NAMES = [
    *("mHC mappings", "Sinkhorn", "aggregate", "norm", "product, q k v", "rotary", "attention"),
    *("product, attention out", "mHC write", "product, MLP in", "activation", "product, MLP out"),
    *("product, head", "loss", "AdamW"),
]


def test_a_wrong_operation_is_named_and_spoils_no_other(monkeypatch):
    trainer = TorchTrainer(computing_in(CONFIG, "float64"), TRAIN, tiny_corpus())
    trainer.train_step(0)
    batch = tiny_corpus().batch(1, 2, CONFIG.seq_length)
    errors = operation_errors(trainer, batch)
    assert [error.name for error in errors] == NAMES
    assert max(max(error[1:4]) for error in errors) < 10
    assert all(error.torch == 0.0 for error in errors), "PyTorch in float64 is the truth itself"
    right = jax_impl.ops.swiglu
    monkeypatch.setattr(jax_impl.ops, "swiglu", lambda x: right(x[..., ::-1]))
    errors = operation_errors(trainer, batch)
    assert [error.name for error in errors if error.jax > 10] == ["activation"]


def test_operations_are_given_what_the_model_computes(monkeypatch):
    config = computing_in(CONFIG, "float64")
    trainer, batch = TorchTrainer(config, TRAIN, tiny_corpus()), tiny_corpus().batch(1, 2, CONFIG.seq_length)
    trainer.train_step(0)
    given, gave = {}, {}

    def watched(name, functions, *inputs, dtype):
        given[name] = inputs
        gave[name] = run_torch(functions[0], *inputs)
        return OperationError(name, 0.0, 0.0, 0.0, 0.0), gave[name]

    monkeypatch.setattr(divergence, "compare_operation", watched)
    operation_errors(trainer, batch)
    layer, values = trainer.model.decoder.layers["1"], layer_values("torch", config, trainer.parameters(), batch.tokens)
    np.testing.assert_array_equal(given["mHC mappings"][0], values[1])
    assert relative_difference(gave["Sinkhorn"][0], gave["mHC mappings"][2]) < GRADIENT["float64"]
    layer.mlp.linear_fc2.weight.data.zero_()  # so that it writes what its attention did, mixed once more
    layer.mlp_hyper_connection.phi.data.zero_()
    with torch.no_grad():
        context = ForwardContext(torch.arange(CONFIG.seq_length))
        written = layer(torch.from_numpy(values[1]), context)
    mixed = np.broadcast_to(written.mean(-2, keepdim=True).numpy(), written.shape)
    np.testing.assert_allclose(gave["mHC write"][0].mean(-2), mixed[..., 0, :], rtol=1e-10)
    assert given["loss"][0].shape == (2, CONFIG.seq_length, CONFIG.vocab_size)


def test_operations_of_a_model_without_hyper_connections_are_refused():
    trainer = TorchTrainer(PLAIN, TRAIN, tiny_corpus())
    with pytest.raises(ValueError, match="expected a model with hyper-connections, got none"):
        operation_errors(trainer, tiny_corpus().batch(0, 2, 8))


def test_adamw_is_the_trainers():
    """The update of a second step, with moments, decay and a learning rate that has changed."""
    config, train = computing_in(PLAIN, "float64"), replace(TRAIN, clip_grad=0.0)
    trainer = TorchTrainer(config, train, tiny_corpus())
    trainer.train_step(0)
    assert learning_rate(train, 0) != learning_rate(train, 2)
    trainer.train_step(1)
    name, state = "decoder.layers.0.mlp.linear_fc2.weight", state_of(trainer)
    gradient = trainer.loss_and_gradients(tiny_corpus().batch(2, 2, 8), 2)[1][name]
    trainer.train_step(2)
    error, (updated,) = compare_operation("AdamW", adamw(train, 2), gradient, *(part[name] for part in state.values()))
    np.testing.assert_array_equal(updated, trainer.parameters()[name])
    assert error.jax < 2


def test_layer_values_take_xla_options():
    with pytest.raises(Exception, match="no_such_option"):
        layer_values("jax", PLAIN, initial_parameters(PLAIN), TOKENS, {"no_such_option": 1})

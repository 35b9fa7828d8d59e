"""Training: the optimisation against PyTorch's plain pieces, and the backends against each other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.training import NonFiniteLossError, StepResult, check_finite, has_weight_decay, learning_rate
from parity.compare import Comparison, GradientDifference, StepPair, compare, gradient_norms, relative_difference
from parity.tolerances import LOSS, PARAMETERS
from tests.backends import BACKENDS, TORCH_DAILY, backend_module, tiny_corpus, trainers

pytestmark = pytest.mark.usefixtures("few_rounds")

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    seq_length=12,
    enable_hyper_connections=True,
    num_residual_streams=3,
    hidden_dropout=0.1,
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=20, global_batch_size=4, lr=3e-3, min_lr=3e-4, lr_warmup_iters=5, eval_iters=2)


def test_learning_rate_follows_its_definition():
    train = TrainConfig(train_iters=101, lr=1.0, min_lr=0.1, lr_warmup_iters=10)
    rates = [learning_rate(train, step) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert (np.diff(rates[10:]) < 0).all()
    assert learning_rate(replace(train, lr_warmup_iters=0), 0) == 1.0
    assert learning_rate(replace(train, lr_warmup_iters=200), 100) == pytest.approx(101 / 200)
    assert learning_rate(replace(train, train_iters=11), 10) == pytest.approx(0.1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "clip"),
    [(backend, clip) for backend in BACKENDS for clip in (0.05, *([1.0, 0.0] if backend == "torch" else []))]
    + [pytest.param("jax", clip, marks=pytest.mark.slow) for clip in (1.0, 0.0)],
)
def test_twenty_steps_are_adamw_by_hand(backend, clip):
    """The update written out in numpy: clipping, both moments, decoupled decay of matrices, the schedule."""
    train = replace(TRAIN, clip_grad=clip)
    trainer = dict(zip(BACKENDS, trainers(CONFIG, train), strict=True))[backend]
    by_hand = trainer.parameters()
    first, second = ({n: np.zeros_like(p) for n, p in by_hand.items()} for _ in range(2))
    oracle = trainers(CONFIG, train)[0]
    for step in range(20):
        result = trainer.train_step(step)
        oracle.set_parameters(by_hand)
        batch = oracle.corpus.batch(step, train.global_batch_size, CONFIG.seq_length)
        loss, gradients = oracle.loss_and_gradients(batch, step)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert result.loss == pytest.approx(loss, rel=1e-11)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, p in by_hand.items():
            g = gradients[name] * scale
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            update = first[name] / (1 - 0.9 ** (step + 1))
            update = update / (np.sqrt(second[name] / (1 - 0.95 ** (step + 1))) + 1e-8)
            decay = 0.1 if p.ndim >= 2 else 0.0
            by_hand[name] = p - learning_rate(train, step) * (update + decay * p)
    assert (norm > clip) or clip == 1.0, "clipping was never in force"
    for name, p in trainer.parameters().items():
        assert relative_difference(p, by_hand[name]) <= PARAMETERS["float64"], name


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("torch", 1),
        ("torch", 2),
        pytest.param("jax", 1, marks=pytest.mark.slow),
        pytest.param("jax", 2, marks=pytest.mark.slow),
    ],
)
def test_microbatches_add_up_to_the_batch(backend, size):
    """Dropout on: its masks belong to the batch's sequences, not to the microbatch's."""
    whole, parts = (
        dict(zip(BACKENDS, trainers(CONFIG, replace(TRAIN, micro_batch_size=micro)), strict=True))[backend]
        for micro in (None, size)
    )
    for step in range(3):
        a, b = whole.train_step(step), parts.train_step(step)
        assert b.loss == pytest.approx(a.loss, rel=1e-13)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-12)
    for name, p in parts.parameters().items():
        assert relative_difference(p, whole.parameters()[name]) <= PARAMETERS["float64"], name


def test_vectors_do_not_decay():
    assert [has_weight_decay(shape) for shape in ((), (3,), (2, 3), (2, 3, 4))] == [False, False, True, True]


@pytest.mark.thorough
def test_twenty_steps_agree_between_the_backends():
    ours, theirs = trainers(CONFIG, TRAIN)
    for step in range(20):
        a, b = ours.train_step(step), theirs.train_step(step)
        assert abs(a.loss - b.loss) <= LOSS["float64"]
        assert (a.step, a.learning_rate, a.tokens) == (b.step, b.learning_rate, b.tokens)
    theirs_parameters = theirs.parameters()
    for name, p in ours.parameters().items():
        assert relative_difference(p, theirs_parameters[name]) <= PARAMETERS["float64"], name
    assert ours.validation_loss() == pytest.approx(theirs.validation_loss(), rel=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_training_learns_and_is_repeatable(backend):
    config, train = replace(CONFIG, hidden_dropout=0.0, params_dtype="float32"), replace(TRAIN, train_iters=60, lr=1e-2)
    runs = [list(backend_module(backend, "train").train(config, train, tiny_corpus())) for _ in range(2)]
    assert [r.loss for r in runs[0]] == [r.loss for r in runs[1]]
    assert runs[0][0].loss > 5.0
    assert runs[0][-1].loss < 3.0
    assert all(r.tokens == 48 and r.seconds > 0 for r in runs[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_is_without_dropout_and_changes_nothing(backend):
    trainer = dict(zip(BACKENDS, trainers(CONFIG, TRAIN), strict=True))[backend]
    plain = dict(zip(BACKENDS, trainers(replace(CONFIG, hidden_dropout=0.0), TRAIN), strict=True))[backend]
    before = trainer.parameters()
    assert trainer.validation_loss() == plain.validation_loss() == trainer.validation_loss()
    for name, p in trainer.parameters().items():
        np.testing.assert_array_equal(p, before[name])


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_loss_that_is_not_finite_names_its_step(backend):
    trainer = dict(zip(BACKENDS, trainers(CONFIG, TRAIN), strict=True))[backend]
    trainer.train_step(0)
    values = trainer.parameters()
    values["decoder.final_layernorm.weight"][3] = np.nan
    trainer.set_parameters(values)
    with pytest.raises(NonFiniteLossError, match=r"step 1: expected a finite loss .* got loss nan"):
        trainer.train_step(1)
    for name, p in trainer.parameters().items():
        np.testing.assert_array_equal(p, values[name], err_msg="a refused step changed parameters")
    with pytest.raises(NonFiniteLossError, match=r"validation after step 0: expected a finite loss, got nan"):
        trainer.validation_loss()


def test_infinite_gradient_is_refused_too():
    with pytest.raises(NonFiniteLossError, match=r"step 7: .* norm inf"):
        check_finite(StepResult(7, 1.0, float("inf"), 1e-3, 1, 1.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_are_set_whole_or_not_at_all(backend):
    trainer = dict(zip(BACKENDS, trainers(CONFIG, TRAIN), strict=True))[backend]
    values = trainer.parameters()
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    n = len(values)
    got = f"values: expected the {n} parameters of the model, got {{}} values; missing: {{}}; unknown: {{}}; give one"
    with pytest.raises(ValueError, match=got.format(n - 1, name, "none")):
        trainer.set_parameters({k: v for k, v in values.items() if k != name})
    others = {f"other.{i}": np.zeros(1) for i in range(10)}
    eight = ", ".join(sorted(others)[:8])
    with pytest.raises(ValueError, match=got.format(n + 10, "none", f"{eight} and 2 more")):
        trainer.set_parameters({**values, **others})
    with pytest.raises(ValueError, match=rf"values\['{name}'\]: expected shape .* got \(3,\)"):
        trainer.set_parameters({**{k: v + 1 for k, v in values.items()}, name: np.zeros(3)})
    for k, p in trainer.parameters().items():
        np.testing.assert_array_equal(p, values[k])


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("torch", "mesh: expected 64 processes on axis pp"),
        ("jax", "pipeline_model_parallel_size: expected at most the"),
    ],
)
def test_a_model_in_stages_is_not_trained_in_part(backend, message):
    layout = "E|" + "|" * 61 + f"t*{CONFIG.num_layers}|L"
    config = replace(CONFIG, pipeline_model_parallel_size=64, pipeline_model_parallel_layout=layout)
    train = replace(TRAIN, micro_batch_size=1)
    with pytest.raises(ValueError, match=message):
        backend_module(backend, "train").Trainer(config, train, tiny_corpus())


@pytest.mark.thorough
def test_gradients_of_a_batch_of_any_size():
    """Whatever a step's batch and microbatches are, the whole of what is handed over counts."""
    corpus = tiny_corpus()
    batch = corpus.batch(3, 5, CONFIG.seq_length)
    train = replace(TRAIN, micro_batch_size=2)
    (loss, gradients), jax_side = (trainer.loss_and_gradients(batch, 7) for trainer in trainers(CONFIG, train))
    alone = replace(CONFIG, hidden_dropout=0.0)
    for trainer in trainers(alone, train):
        mean = np.mean([trainer.loss_and_gradients(batch.part(i, 1))[0] for i in range(5)])
        assert trainer.loss_and_gradients(batch)[0] == pytest.approx(mean, rel=1e-12)
    assert loss == pytest.approx(jax_side[0], rel=1e-12)
    for name, gradient in gradients.items():
        assert relative_difference(gradient, jax_side[1][name]) <= 1e-12, name


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_steps_count_to_32_bits(backend):
    import jax

    config = replace(CONFIG, params_dtype="float32")
    with jax.enable_x64(False):
        trainer = backend_module(backend, "train").Trainer(config, TRAIN, tiny_corpus())
        batch = tiny_corpus().batch(0, 2, 12)
        losses = {trainer.loss_and_gradients(batch, step)[0] for step in (2**32 - 1, 2**31, 0)}
    assert len(losses) == 3


def test_float64_needs_jax_in_64_bits():
    import jax

    with jax.enable_x64(False), pytest.raises(ValueError, match=r"params_dtype: .* jax_enable_x64=False; call"):
        backend_module("jax", "transformer").GPTModel(CONFIG)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
def test_comparison_of_equal_backends_has_no_failures():
    result = compare(replace(CONFIG, params_dtype="float32"), replace(TRAIN, train_iters=5), tiny_corpus())
    assert result.failures == []
    assert [pair.torch.step for pair in result.steps] == list(range(5))
    assert {g.step for g in result.gradients} == {0, 5}
    assert max(g.exact for g in result.gradients) < 1e-12 < max(g.relative for g in result.gradients)


@pytest.mark.slow
def test_comparison_finds_a_wrong_gradient_and_names_it(monkeypatch):
    """A seeded bug: JAX forgets the second half of swiglu's product rule."""
    import jax

    import jax_impl.mlp

    def broken(x, impl):
        gate, value = jax.numpy.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * jax.lax.stop_gradient(value)

    monkeypatch.setattr(jax_impl.mlp, "swiglu", broken)
    result = compare(CONFIG, replace(TRAIN, train_iters=2), tiny_corpus())
    assert any("loss at step 1: expected a difference of at most" in line for line in result.failures)
    assert any("gradient of decoder.layers.0.mlp.linear_fc1.weight at step 0" in line for line in result.failures)


def synthetic(exact: float, relative: float, norm: float, loss: float = 0.0) -> list[str]:
    step = StepResult(0, 1.0, 1.0, 1e-3, 1, 1.0)
    result = Comparison("float32", 1e-5, 1e-5)
    result.steps = [StepPair(step, step._replace(loss=1.0 + loss))]
    result.gradients = [GradientDifference("w", 0, exact, relative, norm, 1.0)]
    return result.failures


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        ((1e-14, 1e-6, 1.0), []),
        ((1e-14, 1e-4, 1.0), ["in float32"]),
        ((1e-14, 1e-4, 1e-4), []),  # below the floor: measured against 1% of the whole gradient
        ((1e-14, 1e-1, 1e-4), ["in float32"]),
        ((1e-14, 1.0, 1.0), ["in float32"]),
        ((1e-11, 1e-6, 1e-4), ["in float64"]),  # no floor in float64
        ((float("inf"), float("inf"), 1.0), ["in float64", "in float32"]),
        ((float("nan"), 0.0, 1.0), ["in float64"]),
        ((1e-14, 1e-6, 1.0, 1e-4), ["loss at step 0"]),
        ((1e-14, 1e-6, 1.0, float("nan")), ["loss at step 0"]),
    ],
)
def test_verdict(arguments, failing):
    found = synthetic(*arguments)
    assert len(found) == len(failing)
    assert all(part in line for part, line in zip(failing, found, strict=True))


def test_a_gradient_lost_in_either_backend_is_not_small():
    there, lost = {"w": np.ones(4), "v": np.ones(9)}, {"w": np.zeros(4), "v": np.ones(9)}
    for sides in ((there, lost), (lost, there)):
        norms, whole = gradient_norms(*sides)
        assert norms["w"] == 2.0
        assert whole == pytest.approx(13**0.5)


def test_relative_difference():
    a = np.array([3.0, 4.0])
    assert relative_difference(a, a) == 0.0
    assert relative_difference(a, np.zeros(2)) == 1.0
    assert relative_difference(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_difference(a, np.array([3.0, np.nan])) == float("inf")
    with pytest.raises(ValueError, match="b: expected the shape of a"):
        relative_difference(a, np.zeros(3))


def test_torch_trainer_keeps_to_its_device():
    ours, _ = trainers(CONFIG, TRAIN)
    assert ours.device == torch.device("cpu")
    assert {p.device.type for p in ours.model.parameters()} == {"cpu"}

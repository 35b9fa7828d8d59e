"""Memory and work of the lock-step executor are those of the plan."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diptych.plans.config import TransformerConfig
from jax_impl.pipeline import make_pipeline_step
from jax_impl.pipeline.saved import StageAutodiff
from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from tests.pipeline.jax_cases.support import PLAIN, STEP, batch_of, model_of, stage_of

SMALL_HALVES = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)

HIDDEN_BYTES = 2 * 8 * 16 * 8
"""Of one microbatch's hidden states."""


def temporary_bytes(config: TransformerConfig, m: int, **options) -> int:
    step, staged, batch = compilable(config, m, **options)
    return step.lower(staged, *batch).compile().memory_analysis().temp_size_in_bytes


def compilable(config: TransformerConfig, m: int, **options):
    model = model_of(config)
    step = make_pipeline_step(model, config, **options)
    return step, step.stage_parameters(nnx.split(model, nnx.Param)[1]), batch_of(m)


@pytest.mark.parametrize("saves", [pytest.param("inputs", marks=pytest.mark.slow), "residuals"])
def test_memory_does_not_grow_with_the_number_of_microbatches(saves):
    few, many = (temporary_bytes(SMALL_HALVES, m, saves=saves) for m in (8, 64))
    assert many < 1.01 * few + batch_bytes(64)


def batch_bytes(m: int) -> int:
    """Of what a step reads, and of its losses: they grow, but are no activations."""
    return sum(array.nbytes for array in batch_of(m)) + 8 * m


@pytest.mark.slow
def test_memory_of_gpipe_grows():
    """By every microbatch's residuals, which the test above would see."""
    config = replace(SMALL_HALVES, pipeline_schedule="gpipe")
    assert temporary_bytes(config, 64) - temporary_bytes(config, 8) > 5 * 56 * HIDDEN_BYTES


@pytest.mark.slow
def test_memory_of_differentiated_forwards_grows():
    """The peer: JAX's own gradient of a pipeline of forwards, which is GPipe. Its gradients are ours."""

    def differentiated(m: int):
        step, staged, batch = compilable(SMALL_HALVES, m, transform="shard_map", forward_only=True)
        return jax.jit(jax.grad(lambda staged: step(staged, *batch, STEP).mean())).lower(staged).compile(), staged

    (few, staged), (many, _) = map(differentiated, (8, 64))
    growth = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert growth > 5 * 56 * HIDDEN_BYTES
    step = make_pipeline_step(model_of(SMALL_HALVES), SMALL_HALVES)
    for ours, theirs in zip(*(map(jax.tree.leaves, (step(staged, *batch_of(8), STEP)[1], few(staged)))), strict=True):
        assert relative_difference(np.asarray(ours), np.asarray(theirs)) <= GRADIENT["float64"]


@pytest.mark.usefixtures("compiled_well")
@pytest.mark.parametrize("saves", [pytest.param("inputs", marks=pytest.mark.slow), "residuals"])
def test_split_backward_does_no_work_twice(saves):
    """I and W together cost B, and W no more than F; B costs two F, and one more where the stage is run again."""
    config = TransformerConfig(
        hidden_size=512,
        num_layers=2,
        num_attention_heads=8,
        vocab_size=64,
        seq_length=32,
        pipeline_model_parallel_size=2,
        pipeline_schedule="zb-h1",
    )
    programs, task, x = stage_of(config)
    program = programs[0]
    whole, split = (StageAutodiff((program,), task, x, saves, splits) for splits in (False, True))
    zeros = partial(jax.tree.map, lambda like: jnp.zeros(like.shape, like.dtype))

    def flops(function, *arguments) -> float:
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def split_backward(task, x, residuals, gradient):
        result = split.backward(program, task, x, residuals, gradient)
        return result.gradients, result.input_gradient, result.weight_operands

    forward = flops(partial(whole.forward, program), task, x)
    both = flops(lambda *arguments: whole.backward(program, *arguments)[:2], task, x, zeros(whole.residual_shapes), x)
    inputs = flops(split_backward, task, x, zeros(split.residual_shapes), x)
    weights = flops(partial(split.weight_gradients, program, task), zeros(split.weight_operand_shapes))
    assert inputs + weights <= 1.05 * both
    assert weights <= forward
    assert both <= (3.1 if saves == "inputs" else 2.1) * forward


def test_residuals_are_the_named_values_alone():
    """No value twice, nothing made of parameters alone, nothing that lies between named values."""
    config = replace(PLAIN, num_layers=4, pipeline_model_parallel_size=4, params_dtype="float32", bf16=True)
    programs, task, x = stage_of(config)
    (middle,) = (program for program in programs if not program.first and not program.last)
    keeper = StageAutodiff((middle,), task, x, "residuals", split=False)
    width, inner, scores = config.hidden_size, 16, 2 * 8  # a token's: D, inner width, heads x T
    # Input and residual after attention, both norms, q, k, v, weights, what they give; gate and value, activation.
    a_token = 4 * width + 3 * width + scores + width + 3 * inner
    assert keeper.residual_shapes["bfloat16"].shape == (2 * 8 * a_token,)
    assert set(keeper.residual_shapes) == {"bfloat16"}
    first = StageAutodiff(programs[:1], task, x, "residuals", split=False).residual_shapes
    assert first["bfloat16"].shape == keeper.residual_shapes["bfloat16"].shape

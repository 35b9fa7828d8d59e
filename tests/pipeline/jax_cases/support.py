"""What all cases of JAX's pipelines share: eight devices, small models, and the single-device model beside the step."""

import os
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.implementation import callback_threads
from diptych.plans.schedule.named import schedule_for
from jax_impl import ops
from jax_impl.pipeline import make_pipeline_step
from jax_impl.pipeline.programs import Task
from jax_impl.pipeline.stages import Batch, divide_model, names_of
from jax_impl.staged_parameters import StagedParameters
from jax_impl.transformer import GPTModel
from parity.compare import relative_difference
from parity.tolerances import GRADIENT

jax.config.update("jax_num_cpu_devices", 8)
os.environ["NPROC"] = str(callback_threads(8))

ROUNDS = ops.ROUNDS
STEP = 3
"""Training step of every dropout mask."""

PLAIN = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=2,
    ffn_hidden_size=16,
    vocab_size=11,
    seq_length=8,
    init_method_std=0.3,
    params_dtype="float64",
)
DROPPED = replace(
    PLAIN, hidden_dropout=0.2, add_bias_linear=True, layer_pattern="attention,attention+gelu+ffn=24,attention"
)
"""Tied, with biases, layers of two kinds, and dropout."""

FOUR = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|t||tL"}
"""Three layers on four ranks, of which one has none."""

TWICE_TWO = FOUR | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}

HYPER = replace(
    PLAIN,
    num_layers=2,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    hidden_dropout=0.2,
    untie_embeddings_and_output_weights=True,
    layer_pattern="attention,attention+gelu+no-mlp-hc",
    recompute_granularity="selective",
    recompute_modules=("mhc", "mlp"),
)

SEVEN = replace(PLAIN, num_layers=7, untie_embeddings_and_output_weights=True)


def batch_of(m: int, b: int = 2, length: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m)
    return tuple(random.integers(0, PLAIN.vocab_size, (m, b, length)).astype(np.int32) for _ in range(2))


def model_of(config: TransformerConfig) -> GPTModel:
    return GPTModel(unsharded(config))


@cache
def reference(config: TransformerConfig, m: int, b: int = 2, training: bool = True) -> tuple[np.ndarray, list]:
    """Losses [m] of a single-device model and the gradients of their mean, one microbatch after the other."""
    graph, params = nnx.split(GPTModel(config), nnx.Param)

    def loss(params, tokens, targets, samples):
        return nnx.merge(graph, params)(tokens, targets, step=STEP, samples=samples, training=training)

    def add(sums, microbatch):
        value, gradients = jax.value_and_grad(loss)(params, *microbatch)
        return jax.tree.map(lambda a, g: a + g / m, sums, gradients), value

    @jax.jit
    def run(params, *batch):
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)

    gradients, losses = run(params, *batch_of(m, b), np.arange(m * b).reshape(m, b))
    return np.asarray(losses), [np.asarray(g) for g in jax.tree.leaves(gradients)]


def run_step(config: TransformerConfig, m: int, b: int = 2, **options):
    """Loss, and gradients by leaf, of the pipeline."""
    model = model_of(config)
    step = make_pipeline_step(model, config, **options)
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    loss, gradients = step(staged, *batch_of(m, b), STEP)
    joined = step.join_parameters(gradients)
    again = step.stage_parameters(joined)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs, "padding has a gradient")
    return loss, [np.asarray(g) for g in jax.tree.leaves(joined)], step


def check(config: TransformerConfig, m: int, b: int = 2, tolerance: float = GRADIENT["float64"], **options):
    losses, expected = reference(unsharded(config), m, b)
    loss, gradients, step = run_step(config, m, b, **options)
    assert loss == pytest.approx(losses.mean(), rel=tolerance)
    for name, ours, theirs in zip(step.names, gradients, expected, strict=True):
        assert np.linalg.norm(theirs) > 0, name
        assert relative_difference(ours, theirs) <= tolerance, name
    if options.get("slots", "canonical") == "canonical":
        assert step.trace(m) == schedule_for(config, m).actions


def devices(*sizes: int) -> np.ndarray:
    return np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)


def stage_of(config: TransformerConfig):
    """Programs, and a task of rank 0."""
    stages = divide_model(GPTModel, config, schedule_for(config, 2), training=True)
    params = nnx.split(model_of(config), nnx.Param)[1]
    staged = stages.stack(dict(zip(names_of(params), jax.tree.leaves(params), strict=True)))
    rank = StagedParameters(jax.tree.map(lambda x: jnp.asarray(x[0]), staged.layers), staged.replicated)
    tokens = jnp.zeros((2, config.seq_length), jnp.int32)
    task = Task(rank, Batch(tokens, tokens, jnp.zeros(2, jnp.int32), jnp.uint32(0)), jnp.int32(0), jnp.int32(0))
    return stages.programs, task, jnp.zeros((2, config.seq_length, config.hidden_size), config.compute_dtype)

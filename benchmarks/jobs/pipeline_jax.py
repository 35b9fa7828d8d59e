"""The JAX part of benchmarks/pipeline.py, which runs in a separate process with four CPU devices.

XLA reports the temporary bytes of the compiled step of one rank. The baseline of the executor is GPipe by automatic
differentiation, which is jax.grad of the forward of the same pipeline.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.named import schedule_for
from jax_impl.pipeline import make_pipeline_step
from jax_impl.pipeline.programs import Task
from jax_impl.pipeline.saved import StageAutodiff
from jax_impl.pipeline.stages import Batch, divide_model, names_of
from jax_impl.staged_parameters import StagedParameters
from jax_impl.transformer import GPTModel

RANKS = 4
COUNTS = (8, 16, 32, 64)
ROUNDS = 5
MIB = 2**20
CONFIG = TransformerConfig(128, 4, 4, seq_length=64, pipeline_model_parallel_size=RANKS)
WIDE = TransformerConfig(
    512, 2, 8, seq_length=32, vocab_size=64, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"
)


def main() -> None:
    """Measure, and print the results as JSON."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    memory = {
        **{f"1f1b, keeps {saves}": [step_bytes(m, saves) for m in COUNTS] for saves in ("residuals", "inputs")},
        "gpipe by jax.grad": [differentiated_bytes(m) for m in COUNTS],
    }
    seconds = step_seconds()
    split = {saves: split_cost(saves) for saves in ("residuals", "inputs")}
    print(json.dumps({"memory": memory, "seconds": seconds, "split": split, "lines": [*lines(memory, seconds, split)]}))


def lines(memory: dict, seconds: dict, split: dict):
    """Yield the results as text."""
    for name, sizes in memory.items():
        listed = ", ".join(f"{size / MIB:.2f}" for size in sizes)
        counts = ", ".join(map(str, COUNTS))
        yield f"JAX {name}: {listed} MiB temporary a rank at m = {counts} ({sizes[-1] / sizes[0]:.3f}x)"
    fastest = min(seconds.values())
    for name, value in seconds.items():
        yield f"JAX 1f1b, {name}: {value * 1000:.0f} ms a step of 8 microbatches ({value / fastest:.2f})"
    for saves, ratio in split.items():
        yield f"(I + W) / B, compiled operations of JAX at D=512, keeping {saves}: {ratio:.3f}"


def build_step(m: int, **options: Any) -> tuple[Any, StagedParameters, tuple[np.ndarray, np.ndarray]]:
    """Return a step, its parameters, and a batch of m microbatches of one sequence."""
    model = GPTModel(unsharded(CONFIG))
    step = make_pipeline_step(model, CONFIG, **options)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (m, 1, CONFIG.seq_length)).astype(np.int32)
    return step, step.stage_parameters(nnx.split(model, nnx.Param)[1]), (tokens, tokens)


def step_bytes(m: int, saves: str) -> int:
    """Return the temporary bytes of a step of one rank."""
    step, staged, batch = build_step(m, saves=saves)
    return step.lower(staged, *batch).compile().memory_analysis().temp_size_in_bytes


def differentiated_bytes(m: int) -> int:
    """Return the temporary bytes if JAX differentiates the forward of the pipeline."""
    step, staged, batch = build_step(m, transform="shard_map", forward_only=True)
    gradient = jax.jit(jax.grad(lambda staged: step(staged, *batch).mean()))
    return gradient.lower(staged).compile().memory_analysis().temp_size_in_bytes


def step_seconds() -> dict[str, float]:
    """Return the median seconds of a step of each variant; the variants alternate."""
    variants = {}
    for slots in ("canonical", "fused"):
        for saves in ("residuals", "inputs"):
            step, staged, batch = build_step(8, saves=saves, slots=slots)
            variants[f"{slots} slots, keeps {saves}"] = partial(step, staged, *batch)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(ROUNDS + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first compiles
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def split_cost(saves: str) -> float:
    """Return the FLOPs of I and W together, relative to B, of a stage at D=512 as XLA counts them."""
    stages = divide_model(GPTModel, WIDE, schedule_for(WIDE, 2), training=True)
    params = nnx.split(GPTModel(unsharded(WIDE)), nnx.Param)[1]
    staged = stages.stack(dict(zip(names_of(params), jax.tree.leaves(params), strict=True)))
    rank = StagedParameters(jax.tree.map(lambda x: jnp.asarray(x[0]), staged.layers), staged.replicated)
    tokens = jnp.zeros((2, WIDE.seq_length), jnp.int32)
    task = Task(rank, Batch(tokens, tokens, jnp.zeros(2, jnp.int32), jnp.uint32(0)), jnp.int32(0), jnp.int32(0))
    x = jnp.zeros((2, WIDE.seq_length, WIDE.hidden_size), WIDE.compute_dtype)
    program = stages.programs[0]
    full, split = (StageAutodiff(stages.programs, task, x, saves, splits) for splits in (False, True))  # pyright: ignore

    def flops(function: Callable, *arguments: Any) -> float:
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def input_gradients(task: Task, x: Any, residuals: Any, gradient: Any) -> tuple:
        result = split.backward(program, task, x, residuals, gradient)
        return result.gradients, result.input_gradient, result.weight_operands

    zeros = partial(jax.tree.map, lambda like: jnp.zeros(like.shape, like.dtype))
    both = flops(lambda t, x, k, g: full.backward(program, t, x, k, g)[:2], task, x, zeros(full.residual_shapes), x)
    inputs = flops(input_gradients, task, x, zeros(split.residual_shapes), x)
    weights = flops(lambda w: split.weight_gradients(program, task, w), zeros(split.weight_operand_shapes))
    return (inputs + weights) / both


if __name__ == "__main__":
    main()

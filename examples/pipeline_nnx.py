"""Flax modules in four unequal stages, one on each device, trained by optax."""

import jax
import optax
from flax import nnx

from jax_impl.pipeline import PipelineExecutor, split_batch

jax.config.update("jax_num_cpu_devices", 4)  # where there are no accelerators
rngs = nnx.Rngs(0)
layers = [nnx.Embed(64, 32, rngs=rngs)]
for _ in range(3):
    layers += [nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 128, rngs=rngs), nnx.gelu, nnx.Linear(128, 32, rngs=rngs)]
layers.append(nnx.Linear(32, 64, rngs=rngs))
stages = [nnx.Sequential(*layers[begin:end]) for begin, end in ((0, 5), (5, 8), (8, 13), (13, 14))]
loss_fn = lambda output, targets: optax.softmax_cross_entropy_with_integer_labels(output, targets).mean()  # noqa: E731
pipeline = PipelineExecutor(stages, "zb-h1", 8, loss_fn)
params = pipeline.stage_parameters()
optimizer = optax.adamw(1e-2)
moments = optimizer.init(params)
tokens = split_batch(jax.random.randint(jax.random.key(0), (16, 16), 0, 64), 8)
for _ in range(20):
    losses, gradients = pipeline.step(params, tokens, tokens)  # each token is its own target
    updates, moments = optimizer.update(gradients, moments, params)
    params = optax.apply_updates(params, updates)
print("losses of the microbatches:", losses)
for stage, trained in zip(stages, pipeline.join_parameters(params), strict=True):
    nnx.update(stage, trained)

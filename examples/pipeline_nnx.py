"""A language model of flax's own modules in four unequal stages, one on each device, trained by optax.

python examples/pipeline_nnx.py          (without accelerators, JAX makes four CPU devices)
"""

import jax
import optax
from flax import nnx

from jax_impl.pipeline import PipelineExecutor, split_batch

jax.config.update("jax_num_cpu_devices", 4)


class Block(nnx.Module):
    """A residual block: each token and the mean of the tokens up to it, then an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.up, self.down = (
            nnx.LayerNorm(64, rngs=rngs),
            nnx.Linear(64, 128, rngs=rngs),
            nnx.Linear(128, 32, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output of the block, [b, T, 32]."""
        earlier = x.cumsum(1) / (1 + jax.numpy.arange(x.shape[1])[:, None])
        return x + self.down(nnx.gelu(self.up(self.norm(jax.numpy.concatenate([x, earlier], -1)))))


rngs = nnx.Rngs(0)
layers = [nnx.Embed(64, 32, rngs=rngs), *(Block(rngs) for _ in range(5)), nnx.Linear(32, 64, rngs=rngs)]
stages = [nnx.Sequential(*layers[begin:end]) for begin, end in ((0, 2), (2, 4), (4, 6), (6, 7))]
loss_fn = lambda output, targets: optax.softmax_cross_entropy_with_integer_labels(output, targets).mean()  # noqa: E731
pipeline = PipelineExecutor(stages, "zb-h1", 8, loss_fn)
params = pipeline.stage_parameters()
optimizer = optax.adamw(1e-2)
moments = optimizer.init(params)
tokens = jax.random.randint(jax.random.key(0), (16, 17), 0, 64)
losses = []
for _ in range(20):
    losses_of_step, gradients = pipeline.step(params, split_batch(tokens[:, :-1], 8), split_batch(tokens[:, 1:], 8))
    updates, moments = optimizer.update(gradients, moments, params)
    params = optax.apply_updates(params, updates)
    losses.append(losses_of_step.mean())
for stage, trained in zip(stages, pipeline.join_parameters(params), strict=True):
    nnx.update(stage, trained)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on four devices")
assert losses[-1] < losses[0] - 0.5

"""Every technique in every transformation of JAX, on one small nnx model that knows of neither.

A cell computes the gradients of a model with a technique, and again without it, in the same surroundings. The cells
need four devices; support_cases_jax.py runs in a process that has them. This writes the table of docs/everywhere.md:

    python -m tests.everywhere.support_matrix_jax
"""

from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.added_connections import add_hyper_connections
from jax_impl.context_parallel import build_cp_context, cp_attention, cp_short_convolution
from jax_impl.delta_rule import chunk_gated_delta_rule
from jax_impl.offload import offload_modules
from jax_impl.offload.modules import OffloadedModules
from jax_impl.ops import short_convolution
from jax_impl.pipeline import PipelineExecutor, split_batch
from jax_impl.recompute import recompute_modules
from tests.everywhere.support_table import PAGE, limit_in_words, update, write_table

COMMAND = "python -m tests.everywhere.support_matrix_jax"
WIDTH = 16
LENGTH = 16
DEPTH = 2
TECHNIQUES = ("recompute_modules", "PipelineExecutor", "offload_modules", "cp_context", "add_hyper_connections")
SURROUNDINGS = (
    "jit",
    "vmap",
    "grad of grad",
    "scan over layers",
    "remat outside",
    "remat inside",
    "shard_map",
    "pmap",
    "donation",
    "nnx",
    "linen",
)
LIMIT = 1e-13
"""Largest difference of a cell, in float64, relative to the largest gradient."""
REFUSED = {
    ("recompute_modules", "linen"): "TypeError: model: expected an nnx.Module or a function, .* lambda variables, x",
    ("PipelineExecutor", "linen"): "ValueError: stages: .* got the linen module LinenModel; give lambda params, x",
    ("offload_modules", "linen"): "TypeError: model: expected an nnx.Module, got LinenModel",
    ("offload_modules", "pmap"): "ValueError: Memory kinds passed to jax.jit does not match .* pinned_host",
    ("add_hyper_connections", "linen"): "TypeError: model: expected an nnx.Module, got LinenModel",
    ("add_hyper_connections", "scan over layers"): "ValueError: blocks: expected modules of one layer, .* for a scan",
}
"""Errors of the cells that are refused, as a regular expression."""


class Mixer(nnx.Module):
    """Attention, if asked plus a delta rule; with the name of a mesh axis, on this rank's part of the tokens."""

    def __init__(self, axis: str | None, has_rule: bool) -> None:
        self.axis = axis
        self.has_rule = has_rule

    def __call__(self, q: Array, k: Array, v: Array, decay: Array) -> Array:
        q, k, v = (x.reshape(*x.shape[:-1], -1, 8) for x in (q, k, v))
        gates = decay.reshape(*decay.shape[:-1], -1, 8)[..., 0]
        context = context_of(self.axis)
        attended = causal_attention(q, k, v) if context is None else cp_attention(q, k, v, context)
        if not self.has_rule:
            return (attended * jax.nn.sigmoid(gates)[..., None]).reshape(*attended.shape[:-2], -1)
        arguments = q, k, v, jax.nn.log_sigmoid(gates), jax.nn.sigmoid(gates)
        o, _ = chunk_gated_delta_rule(*arguments, use_qk_l2norm_in_kernel=True, cp_context=context)
        return (attended + o).reshape(*o.shape[:-2], -1)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Return softmax attention; q, k, v: [B, T, H, D]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)), v)


def context_of(axis: str | None) -> Any:
    """Return the context of a rank, or None if it has all tokens."""
    return None if axis is None else build_cp_context(np.array([0, LENGTH], np.int32), axis, 3)


class LayerNorm(nnx.Module):
    """A layer norm in float64; second derivatives of flax's pass through float32."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * self.scale[...]


class Activation(nnx.Module):
    """An activation function as a module."""

    def __call__(self, x: Array) -> Array:
        return jax.nn.gelu(x)


class Block(nnx.Module):
    """A pre-norm block: a convolution, a mixer of tokens and an MLP; with jax.checkpoint inside if asked."""

    def __init__(self, rngs: nnx.Rngs, axis: str | None, has_rule: bool, checkpointed: bool) -> None:
        linear = partial(nnx.Linear, rngs=rngs, param_dtype=float)
        self.taps = nnx.Param(jax.random.normal(rngs(), (WIDTH, 3), float))
        self.norm = LayerNorm()
        self.q = linear(WIDTH, WIDTH)
        self.k = linear(WIDTH, WIDTH)
        self.v = linear(WIDTH, WIDTH)
        self.decay = linear(WIDTH, WIDTH)
        self.mixer = Mixer(axis, has_rule)
        self.proj = linear(WIDTH, WIDTH)
        self.up = linear(WIDTH, 2 * WIDTH)
        self.activation = Activation()
        self.down = linear(2 * WIDTH, WIDTH)
        self.axis = axis
        self.checkpointed = checkpointed

    def mix(self, x: Array) -> Array:
        y = self.norm(x)
        if self.axis is None:
            y = short_convolution(y, self.taps[...], jnp.arange(y.shape[1]))
        else:
            y = cp_short_convolution(y, self.taps[...], context_of(self.axis))
        return self.proj(self.mixer(self.q(y), self.k(y), self.v(y), self.decay(y)))

    def __call__(self, x: Array) -> Array:
        mixed = nnx.remat(Block.mix)(self, x) if self.checkpointed else self.mix(x)
        return x + mixed + self.down(self.activation(self.up(mixed)))


class Model(nnx.Module):
    """Some blocks, in a row or stacked in one block for a scan, and a head."""

    def __init__(self, surroundings: str, axis: str | None = None, has_rule: bool = False) -> None:
        rngs = nnx.Rngs(0)
        make = partial(Block, axis=axis, has_rule=has_rule, checkpointed=surroundings == "remat inside")
        self.is_scanned = surroundings == "scan over layers"
        if self.is_scanned:
            self.blocks = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(DEPTH))
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)

    def __call__(self, x: Array) -> Array:
        if self.is_scanned:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        for block in () if self.is_scanned else self.blocks:
            x = block(x)
        return self.head(x)


class LinenModel(linen.Module):
    """A linen module around the functions of the delta rule."""

    axis: str | None = None
    has_rule: bool = False

    @linen.compact
    def __call__(self, x: Array) -> Array:
        dense = partial(linen.Dense, WIDTH, param_dtype=float)
        taps = self.param("taps", linen.initializers.normal(), (WIDTH, 3), float)
        context = context_of(self.axis)
        if context is None:
            y = short_convolution(x, taps, jnp.arange(x.shape[1]))
        else:
            y = cp_short_convolution(x, taps, context)
        mixer = Mixer(self.axis, self.has_rule)
        return x + dense()(mixer(dense()(y), dense()(y), dense()(y), dense()(y)))


def loss_of(output: Array, target: Array) -> Array:
    """A loss with a different gradient at every element."""
    return (jnp.sin(output) * target).sum()


def batch(count: int) -> Array:
    """Return a batch of sequences."""
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, LENGTH, WIDTH)))


def mesh_of(**sizes: int) -> Mesh:
    """Return a mesh of the first devices."""
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


# Techniques.

Loss = Callable[[Any, Array], Array]
"""A loss of parameters and a batch."""
Gradients = dict[str, np.ndarray]
"""Gradients by the path of the parameter."""


def model_with(technique: str, surroundings: str, has_rule: bool) -> Any:
    """Return the model of a cell with its technique."""
    axis = "cp" if technique == "cp_context" else None
    if surroundings == "linen":
        model = LinenModel(axis, has_rule)
        add = {"recompute_modules": {"*": ["norm"]}, "offload_modules": ["*"], "add_hyper_connections": ["*"]}
    else:
        model = Model(surroundings, axis, has_rule)
        blocks = "blocks" if model.is_scanned else "blocks.*"
        add = {
            "recompute_modules": {blocks: ["norm", "activation"]},
            "offload_modules": [blocks],
            "add_hyper_connections": [blocks],
        }
    if technique == "recompute_modules":
        recompute_modules(model, add[technique])
    elif technique == "offload_modules":
        activations = surroundings != "grad of grad"  # JAX has no second derivatives of moved activations
        offload_modules(model, add[technique], activations=activations, activation_min_bytes=0)
    elif technique == "add_hyper_connections":
        add_hyper_connections(model, add[technique], num_residual_streams=2)
    return model


def function_of(model: Any) -> tuple[Callable[[Any, Array], Array], Any]:
    """Return a model as a function of parameters and a batch, and its parameters."""
    if isinstance(model, linen.Module):
        return model.apply, LinenModel().init(jax.random.key(0), batch(1))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: nnx.merge(graph, params, rest, copy=True)(x), params


def loss_on(mesh: Mesh | None, run: Callable[[Any, Array], Array]) -> Loss:
    """Return the loss of a function whose batch is split over the axes "dp" and "cp" of a mesh, if there is one."""
    if mesh is not None:
        axes = [name if name in mesh.axis_names else None for name in ("dp", "cp")]
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(*axes)), out_specs=P(*axes), check_vma=False)
    return lambda params, x: loss_of(run(params, x), x)


# Surroundings.


def gradients(technique: str, surroundings: str, in_context: bool) -> Gradients:
    """Return the gradients of a cell by the name of the parameter.

    Args:
        technique: its name, or the empty string for the model alone.
        surroundings: their name.
        in_context: True for the model that context parallelism runs, with a delta rule and one sequence per replica;
            False for the other techniques, without the rule and with two sequences, the microbatches of a pipeline.
    """
    replicas = 2 if surroundings == "shard_map" else 1
    x = batch(replicas * (1 if in_context else 2))
    if technique == "PipelineExecutor":
        return pipeline_gradients(surroundings, x)
    model = model_with(technique, surroundings, in_context)
    if surroundings == "nnx":
        return named(nnx_gradients(technique, model, x))
    run, params = function_of(model)
    if surroundings == "pmap":
        return named(pmap_gradients(technique, run, params, x))
    if surroundings == "shard_map" and technique != "cp_context":
        return named(sharded_gradients(run, params, x))
    sizes = {"dp": 2} if surroundings == "shard_map" else {}
    if technique == "cp_context":
        sizes["cp"] = 2
    return named(transformed(surroundings, loss_on(mesh_of(**sizes) if sizes else None, run))(params, x))


def transformed(surroundings: str, loss: Loss) -> Callable[[Any, Array], Any]:
    """Return the function that computes the gradients of a loss by its parameters in some surroundings."""
    match surroundings:
        case "vmap":
            return lambda params, x: jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, jnp.stack([x, 2 * x]))
        case "grad of grad":
            slope = jax.grad(loss, argnums=1)
            return jax.jit(jax.grad(lambda params, x: jnp.sin(slope(params, x)).sum()))
        case "remat outside":
            return jax.jit(jax.grad(jax.checkpoint(loss)))
        case "donation":
            return lambda params, x: jax.jit(jax.grad(loss), donate_argnums=0)(jax.tree.map(jnp.copy, params), x)
    return jax.jit(jax.grad(loss))


def sharded_gradients(run: Callable[[Any, Array], Array], params: Any, x: Array) -> Any:
    """Return the sum of the gradients that two devices compute inside of jax.shard_map."""

    def local(params: Any, x: Array) -> Any:
        found = jax.grad(lambda params: loss_of(run(params, x), x))(params)
        return jax.lax.psum(OffloadedModules.fetch(found), "dp")

    mesh = mesh_of(dp=2)
    replicated = [NamedSharding(mesh, P(), memory_kind=x.sharding.memory_kind) for x in jax.tree.leaves(params)]
    params = jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), replicated))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(params, x)


def pmap_gradients(technique: str, run: Callable[[Any, Array], Array], params: Any, x: Array) -> Any:
    """Return the gradients that two devices compute under jax.pmap, each of its sequences or of its tokens."""
    parts = jnp.stack(jnp.split(x, 2, axis=1)) if technique == "cp_context" else x[:, None]
    each = jax.pmap(jax.grad(lambda params, x: loss_of(run(params, x), x)), "cp", in_axes=(None, 0))
    return jax.tree.map(lambda gradient: gradient.sum(0), each(params, parts))


def nnx_gradients(technique: str, model: nnx.Module, x: Array) -> Any:
    """Return the gradients that nnx.grad computes inside of nnx.jit."""

    def loss(model: nnx.Module, x: Array) -> Array:
        if technique != "cp_context":
            return loss_of(model(x), x)
        run, params = function_of(model)
        return loss_on(mesh_of(cp=2), run)(params, x)

    return nnx.jit(nnx.grad(loss))(model, x)


# Pipelines.


class Scanned(nnx.Module):
    """A stage of several blocks in a scan."""

    def __init__(self, blocks: Block) -> None:
        self.blocks = blocks

    def __call__(self, x: Array) -> Array:
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class Last(nnx.Module):
    """The stage of the last block and the head."""

    def __init__(self, block: Block, head: nnx.Linear) -> None:
        self.block = block
        self.head = head

    def __call__(self, x: Array) -> Array:
        return self.head(self.block(x))


def pipeline_gradients(surroundings: str, x: Array) -> Gradients:
    """Return the gradients of a pipeline of two stages and two microbatches."""
    if surroundings == "linen":
        return named(PipelineExecutor([LinenModel(), LinenModel()], "1f1b", 2, loss_of))
    model = Model(surroundings)
    if model.is_scanned:
        modules = [Scanned(model.blocks), model.head]
        names = {(0, "blocks"): "['blocks']", (1, ""): "['head']"}
    else:
        modules = [model.blocks[0], Last(model.blocks[1], model.head)]
        names = {(0, ""): "['blocks'][0]", (1, "block"): "['blocks'][1]", (1, "head"): "['head']"}
    replicas = 2 if surroundings == "shard_map" else 1
    settings = {
        "mesh": mesh_of(pp=2, dp=replicas) if replicas > 1 else None,
        "transform": "pmap" if surroundings == "pmap" else "shard_map",
        "loss_reduction": "sum",
    }
    parameters = None
    stages: list[Any] = modules
    if surroundings != "nnx":
        functions, states = zip(*map(function_of, modules), strict=True)
        stages = [jax.checkpoint(f) if surroundings == "remat outside" else f for f in functions]
        parameters = [*states]
    pipeline = PipelineExecutor(stages, "1f1b", 2, loss_of, parameters=parameters, **settings)
    staged = pipeline.stage_parameters(parameters)
    found = pipeline_step(pipeline, surroundings)(staged, split_batch(x, 2))
    if surroundings == "vmap":
        each = [pipeline.join_parameters(jax.tree.map(itemgetter(i), found)) for i in range(2)]
        joined = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    else:
        joined = pipeline.join_parameters(found)
    by_stage = {}
    for (stage, part), name in names.items():
        tree = joined[stage][part] if part else joined[stage]
        by_stage |= {f"{name}{path}": replicas * gradient for path, gradient in named(tree).items()}
    return by_stage


def pipeline_step(pipeline: PipelineExecutor, surroundings: str) -> Callable[[Any, Any], Any]:
    """Return the function that computes the staged gradients of a pipeline in some surroundings."""

    def step(staged: Any, xs: Any) -> Any:
        return pipeline.step(staged, xs, xs)[1]

    match surroundings:
        case "vmap":
            return lambda staged, xs: jax.vmap(step, (None, 0))(staged, jnp.stack([xs, 2 * xs]))
        case "grad of grad":
            slope = jax.grad(lambda staged, xs: pipeline.step(staged, xs, xs)[0].sum(), argnums=1)
            return jax.jit(jax.grad(lambda staged, xs: jnp.sin(slope(staged, xs)).sum()))
        case "donation":
            return jax.jit(step, donate_argnums=0)
        case "jit":
            return jax.jit(step)
    return step


def named(tree: Any) -> Gradients:
    """Return the leaves of a tree on the host, by their path."""
    return {
        jax.tree_util.keystr(path): np.asarray(jax.device_put(leaf, jax.memory.Space.Device))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@cache
def plain_gradients(surroundings: str, in_context: bool) -> Gradients:
    """Return the gradients of the model without a technique; see gradients."""
    return gradients("", surroundings, in_context)


def run(technique: str, surroundings: str) -> str:
    """Run a cell.

    Returns:
        the largest difference of a gradient to that without the technique, relative to the largest gradient, or the
        type and text of the error that refuses the cell.
    """
    in_context = technique == "cp_context"
    expected = plain_gradients(surroundings, in_context)
    try:
        found = gradients(technique, surroundings, in_context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    additional = [gradient for name, gradient in found.items() if name not in expected]
    if technique == "add_hyper_connections" and not any(np.abs(gradient).max() > 0 for gradient in additional):
        return "inactive: no parameter of the connections has a gradient"
    return f"{difference(found, expected):.0e}"


def difference(found: Gradients, expected: Gradients) -> float:
    """Return the largest difference, relative to the largest expected element; found may have more parameters."""
    missing = expected.keys() - found.keys()
    assert not missing, f"no gradient for {missing}"
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    return max(np.abs(found[name] - gradient).max() for name, gradient in expected.items()) / largest


def cell_in_words(technique: str, surroundings: str) -> str:
    """Return the text of a cell of the table."""
    return "refused" if (technique, surroundings) in REFUSED else limit_in_words(LIMIT)


def updated(page: str) -> str:
    """Return the page with the table."""
    return update(page, COMMAND, write_table(TECHNIQUES, SURROUNDINGS, cell_in_words))


def main() -> None:
    """Write the table to the page."""
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()

"""Run a pipeline of the user's stages in JAX, and the same stages one after the other on one device."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_impl.pipeline import PipelineExecutor, split_batch
from tests.fuzz.grammars._pipelines_jax_stages import (
    TOKENS,
    VOCABULARY,
    StageSpec,
    function_of,
    modules_of,
    parameters_of,
)
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

RATE = 0.05
"""Rate of the gradient descent between two steps."""


@dataclass(frozen=True)
class Program:
    """A pipeline, its data, and what is done with it."""

    ranks: int
    schedule: str
    stages: tuple[StageSpec, ...]
    num_microbatches: int
    kind: str
    """functions or modules."""
    inputs: str
    """floats, tokens, or a form of a message."""
    loss: str
    """Key of LOSSES."""
    loss_reduction: str
    replicas: int
    saves: str
    slots: str
    backend: str
    is_jitted: bool
    """True: jax.jit around two steps with gradient descent between them."""
    does: str
    """step, evaluate or forward."""
    shares: tuple[int, ...]
    """Stages of functions whose first matrix is shared."""
    evaluates_modules: bool
    """True: the modules are in evaluation mode."""
    seed: int


def _squares(y: Any, target: Array) -> Array:
    leaves = [jnp.asarray(leaf, "float64") for leaf in jax.tree.leaves(y)]
    return sum(jnp.square(leaf).mean() for leaf in leaves if leaf.size) + (leaves[0] * target).mean()


LOSSES: dict[str, Callable[[Any, Any], Array] | None] = {
    "squares": _squares,
    "float32": lambda y, target: _squares(y, target).astype("float32"),
    "sum": lambda y, target: sum(jnp.asarray(leaf, "float64").sum() for leaf in jax.tree.leaves(y)) + target.sum(),
    "of the output alone": lambda y, _: jnp.sin(jax.tree.leaves(y)[0].astype("float64")).mean(),
    "of the last stage": None,
}


def _last(stage: Callable[..., Any]) -> Callable[..., Any]:
    """Return a last stage of a function that returns the loss itself."""

    def with_loss(params: Any, *args: Any, **kwargs: Any) -> Array:
        return jnp.sin(jax.tree.leaves(stage(params, *args, **kwargs))[0].astype("float64")).mean()

    return with_loss


def _data(p: Program) -> tuple[Any, Any]:
    rng = np.random.default_rng(p.seed)
    size = p.num_microbatches * 2 * p.replicas
    ids = rng.integers(0, VOCABULARY, (size, TOKENS)).astype("int32")
    h = rng.normal(size=(size, TOKENS, 4))
    inputs = {"tokens": ids, "floats": h, "tuple": (h, ids), "dict": {"h": h, "ids": ids}}[p.inputs]
    return inputs, rng.normal(size=(size, TOKENS, 1))


def _call(stage: Any, params: Any, x: Any) -> Any:
    given = () if params is None else (params,)
    if isinstance(x, tuple):
        return stage(*given, *x)
    return stage(*given, **x) if isinstance(x, dict) else stage(*given, x)


def _functions(p: Program) -> tuple[list[Callable[..., Any]], list[Any]]:
    forms = [p.inputs, *(spec.output for spec in p.stages)]
    stages = [function_of(spec, form) for spec, form in zip(p.stages, forms, strict=False)]
    if p.loss == "of the last stage":
        stages[-1] = _last(stages[-1])
    parameters = parameters_of(p.stages, p.inputs, p.seed)
    for n in p.shares[1:]:
        parameters[n]["first"] = parameters[p.shares[0]]["first"]
    return stages, parameters


def _loss(p: Program, y: Any, target: Any) -> Array:
    function = LOSSES[p.loss]
    return y if function is None else function(y, target)


def _plain_functions(p: Program, inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the results of the stages one after the other."""
    stages, parameters = _functions(p)

    def outputs(parameters: list[Any], x: Any) -> Any:
        for stage, own in zip(stages, parameters, strict=True):
            x = _call(stage, own, x)
        return x

    def losses(parameters: list[Any]) -> Array:
        """Losses [m]: the mean of the replicas' losses for each microbatch."""
        found = []
        for n in range(p.num_microbatches):
            parts = [_part(p, (inputs, targets), n, r) for r in range(p.replicas)]
            found.append(sum(_loss(p, outputs(parameters, x), target) for x, target in parts) / p.replicas)
        return jnp.stack(found)

    if p.does == "forward":
        each = [outputs(parameters, _part(p, inputs, n, None)) for n in range(p.num_microbatches)]
        return {"outputs": jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)}
    if p.does == "evaluate":
        return {"losses": losses(parameters)}
    reduction = jnp.mean if p.loss_reduction == "mean" else jnp.sum
    found = {}
    for step in range(2 if p.is_jitted else 1):
        gradients = jax.grad(lambda parameters: reduction(losses(parameters)))(parameters)
        if p.shares:
            total = sum(gradients[n]["first"] for n in p.shares)
            for n in p.shares:
                gradients[n]["first"] = total
        found |= {f"losses {step}": losses(parameters), f"gradients {step}": gradients}
        parameters = jax.tree.map(lambda w, g: w - RATE * g, parameters, gradients)
    return found


def _part(p: Program, tree: Any, microbatch: int, replica: int | None) -> Any:
    """Return the samples of a microbatch, of one replica or of all."""
    size = 2 * p.replicas
    first = microbatch * size + 2 * (replica or 0)
    return jax.tree.map(lambda x: x[first : first + (size if replica is None else 2)], tree)


def _plain_modules(p: Program, inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the results of nnx modules one after the other; each microbatch sees the state of the one before."""
    stages = nnx.List(_modules(p))
    graph, *both = nnx.split(stages, nnx.Param, ...)
    (params, structure), (state, state_structure) = map(jax.tree.flatten, both)

    def run(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        own = jax.tree.unflatten(structure, params), jax.tree.unflatten(state_structure, state)
        modules = nnx.merge(graph, *own)
        for module in modules:
            x = _call(module, None, x)
        return x, jax.tree.leaves(nnx.split(modules, nnx.Param, ...)[2])

    def loss(params: Any, state: Any, x: Any, target: Any) -> tuple[Array, Any]:
        y, state = run(params, state, x)
        return _loss(p, y, target), state

    scale = 1 / p.num_microbatches if p.loss_reduction == "mean" else 1.0
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    forward = jax.jit(run)
    found: dict[str, Any] = {}
    for step in range(2 if p.is_jitted and p.does == "step" else 1):
        losses, outputs, total = [], [], None
        for n in range(p.num_microbatches):
            x, target = _part(p, (inputs, targets), n, None)
            if p.does == "forward":
                y, state = forward(params, state, x)
                outputs.append(y)
                continue
            (value, state), gradients = gradient(params, state, x, target)
            losses.append(value)
            gradients = jax.tree.map(lambda g: scale * g, gradients)
            total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
        if p.does == "forward":
            return {"outputs": jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)}
        if p.does == "evaluate":
            return {"losses": jnp.stack(losses)}
        params = jax.tree.map(lambda w, g: w - RATE * g, params, total)
        found[f"losses {step}"] = jnp.stack(losses)
    nnx.update(stages, jax.tree.unflatten(structure, params), jax.tree.unflatten(state_structure, state))
    return found | {"parameters and state": _values(stages)}


def _values(stages: Any) -> list[dict[str, Any]]:
    """Return all variables of each stage by name; keys as their data."""

    def numbers(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [
        {".".join(map(str, path)): numbers(value[...]) for path, value in nnx.to_flat_state(nnx.state(stage))}
        for stage in stages
    ]


def _modules(p: Program) -> list[Any]:
    modules = modules_of(p.stages, p.inputs, p.seed)
    if p.evaluates_modules:
        for module in modules:
            module.eval()
    return modules


def _pipelined(p: Program, inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the results of the pipeline."""
    devices = np.array(jax.devices()[: p.ranks * p.replicas])
    mesh = Mesh(devices.reshape(p.replicas, p.ranks), ("dp", "pp")) if p.replicas > 1 else Mesh(devices, ("pp",))
    options = {"loss_reduction": p.loss_reduction, "saves": p.saves, "slots": p.slots, "transform": p.transform}
    if p.kind == "functions":
        stages, parameters = _functions(p)
        options |= {"parameters": parameters}
        if p.shares:
            options |= {"shared_parameters": [dict.fromkeys(p.shares, "first")]}
    else:
        stages, parameters = _modules(p), None
    m = p.num_microbatches
    pipeline = PipelineExecutor(stages, p.schedule, m, LOSSES[p.loss], mesh=mesh, **options)
    params = pipeline.stage_parameters(parameters)
    x, y = split_batch(inputs, m), split_batch(targets, m)
    y = None if p.loss == "of the last stage" else y
    state = pipeline.initial_state() if p.kind == "modules" else None
    if p.does == "forward":
        return {"outputs": pipeline.forward(params, x, state)}
    if p.does == "evaluate":
        return {"losses": pipeline.evaluate(params, x, y, state)}

    def step(params: Any, state: Any) -> tuple[Any, ...]:
        losses, gradients, *rest = pipeline.step(params, x, y, state)
        return losses, gradients, jax.tree.map(lambda w, g: w - RATE * g, params, gradients), *rest

    run = jax.jit(step) if p.is_jitted else step
    found: dict[str, Any] = {}
    for number in range(2 if p.is_jitted else 1):
        losses, gradients, params, *rest = run(params, state)
        state = rest[0] if rest else None
        found[f"losses {number}"] = losses
        if p.kind == "functions":
            found[f"gradients {number}"] = pipeline.join_parameters(gradients)
    if p.kind == "modules":
        pipeline.update_modules(params, state)
        found["parameters and state"] = _values(stages)
    return found


def check_program(p: Program) -> Outcome:
    """Run a program and compare it with its stages one after the other.

    Raises:
        Wrong: if a result differs; any other exception is a failure too.
    """
    inputs, targets = _data(p)
    plain = partial(_plain_functions if p.kind == "functions" else _plain_modules, p, inputs, targets)
    expected = jax.jit(plain)() if p.kind == "functions" else plain()
    try:
        found = _pipelined(p, inputs, targets)
    except ValueError as error:
        if re.match(r"[^:\n]+: expected .*, got ", str(error), re.DOTALL) is None:
            raise
        return Outcome(REFUSED, str(error))
    operations = {name for spec in p.stages for name in spec.operations}
    narrow = {"float32"} if p.kind == "functions" else {"attention", "batch norm"}  # flax computes parts in float32
    is_narrow = narrow & operations or p.loss == "float32" or any(spec.output == "two types" for spec in p.stages)
    is_narrow = is_narrow or (p.is_jitted and p.kind == "functions")  # parameters in float32 are rounded between steps
    _compare(found, expected, 1e-5 if is_narrow else 1e-9)
    return Outcome(EQUAL)


def _compare(found: Any, expected: Any, tolerance: float) -> None:
    """Compare trees of arrays, each relative to its largest element, or to 1e-2 of the largest of all."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise Wrong(f"structures: {jax.tree.structure(found)}, expected {jax.tree.structure(expected)}")
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    largest = max((float(np.abs(leaf).max()) for _, leaf in paths if _is_real(leaf)), default=0.0)
    for (path, theirs), ours in zip(paths, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise Wrong(f"{name}: expected {theirs.dtype}{theirs.shape}, got {ours.dtype}{ours.shape}")
        if not _is_real(theirs):
            if not np.array_equal(ours, theirs):
                raise Wrong(f"{name}: expected {theirs}, got {ours}")
            continue
        own = max(tolerance, 1e-5 if theirs.dtype == np.float32 else 0.0)
        error = float(np.abs(ours - theirs).max())
        scale = max(float(np.abs(theirs).max()), 1e-2 * largest)
        if not error <= own * scale:
            raise Wrong(f"{name}: differs by {error:.2e} of {scale:.2e}")


def _is_real(x: Any) -> bool:
    return bool(np.issubdtype(np.asarray(x).dtype, np.floating) and np.size(x))


def check_quietly(p: Program) -> Outcome:
    """Run check_program without warnings of JAX about types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_program(p)

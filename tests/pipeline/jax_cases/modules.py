"""Pipelines of any functions and nnx modules: equal to the same stages one after the other on one device."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

from jax_impl.pipeline import PipelineExecutor, split_batch
from jax_impl.pipeline.module_stages import Microbatches, ModuleStages, StageLayouts, stage_of_function
from jax_impl.pipeline.packed_layout import PackedLayout
from jax_impl.pipeline.programs import Task
from jax_impl.pipeline.saved import StageAutodiff
from jax_impl.staged_parameters import StagedParameters
from tests.pipeline.jax_cases.support import devices

M = 6
RANDOM = np.random.default_rng(0)
PARAMETERS = [
    {"table": RANDOM.normal(size=(7, 5))},
    {"w": RANDOM.normal(size=(5, 8)), "b": RANDOM.normal(size=8)},
    {"w": RANDOM.normal(size=(8, 5)), "by token": RANDOM.normal(size=(7, 1)), "single": np.ones(3, np.float32)},
    {"table": RANDOM.normal(size=(7, 5))},
]
PARAMETERS[3]["table"] = PARAMETERS[0]["table"]
SHARED = [{0: "table", 3: "table"}]
TOKENS, TARGETS = RANDOM.integers(0, 7, (2, 12, 3)).astype(np.int32)


def embed(p, tokens):
    return {"x": p["table"][tokens], "tokens": tokens}


def widen(p, tokens, x):
    return jnp.tanh(x @ p["w"] + p["b"]), tokens, 2.0, {"none": None, "half": jnp.float32(0.5)}


def narrow(p, x, tokens, two, rest):
    y = jax.jit(lambda w, x: jnp.sin(x) @ w)(p["w"], x) * rest["half"].astype(x.dtype) * two
    return [y + p["by token"][tokens] + p["single"].sum().astype(x.dtype)]


def head(p, inputs):
    return inputs[0] @ p["table"].T


def cross_entropy(y, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(y), targets[..., None], -1).mean()


STAGES = [embed, widen, narrow, head]


def mesh_of(**axes: int) -> Mesh:
    return Mesh(devices(*axes.values()), tuple(axes))


def executor(schedule: str = "1f1b", pp: int = 4, **options) -> PipelineExecutor:
    given = {"parameters": PARAMETERS, "shared_parameters": SHARED, "mesh": mesh_of(pp=pp)} | options
    return PipelineExecutor(STAGES, schedule, M, cross_entropy, **given)


@partial(jax.jit, static_argnums=1)
def one_after_the_other(parameters: list, reduction=jnp.mean):
    """Losses of the microbatches and gradients, with the shared table counted once."""

    def losses(parameters):
        tied = [*parameters[:3], parameters[0]]

        def loss(tokens, targets):
            x = embed(tied[0], tokens)
            return cross_entropy(head(tied[3], narrow(tied[2], *widen(tied[1], **x))), targets)

        return jnp.stack([*map(loss, split_batch(TOKENS, M), split_batch(TARGETS, M))])

    gradients = jax.grad(lambda parameters: reduction(losses(parameters)))(parameters[:3])
    return losses(parameters), [*gradients, gradients[0]]


def assert_equal(found, expected, tolerance: float = 1e-13):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        own = tolerance if np.asarray(theirs).dtype == np.float64 else 1e-6
        np.testing.assert_allclose(ours, theirs, rtol=own, atol=own)


@pytest.mark.parametrize(
    ("schedule", "pp", "options"),
    [
        ("1f1b", 4, {}),
        ("zb-v", 2, {"transform": "pmap"}),
        pytest.param("1f1b", 4, {"saves": "inputs", "transform": "pmap"}, marks=pytest.mark.slow),
        pytest.param("1f1b", 4, {"slots": "fused"}, marks=pytest.mark.slow),
        pytest.param("gpipe", 4, {}, marks=pytest.mark.slow),
        pytest.param("zb-h1", 4, {"saves": "inputs"}, marks=pytest.mark.slow),
        pytest.param("zb-h2", 4, {}, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, {}, marks=pytest.mark.slow),
        pytest.param("interleaved-zb1p", 2, {"transform": "pmap"}, marks=pytest.mark.slow),
        pytest.param("v-half", 2, {}, marks=pytest.mark.slow),
        pytest.param("v-min", 2, {}, marks=pytest.mark.slow),
        pytest.param("dualpipe-v", 2, {"saves": "inputs"}, marks=pytest.mark.slow),
        pytest.param("none", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_unequal_functions_with_pytrees_between_them(schedule, pp, options):
    """Dicts, tuples and lists, whole numbers, numbers and single precision cross; the table is read at both ends."""
    pipeline = executor(schedule, pp, **options)
    losses, gradients = pipeline.step(
        pipeline.stage_parameters(PARAMETERS), split_batch(TOKENS, M), split_batch(TARGETS, M)
    )
    assert_equal((losses, pipeline.join_parameters(gradients)), one_after_the_other(PARAMETERS))


def test_training_evaluation_and_outputs_over_replicas():
    """An optimizer works on staged parameters inside of one jitted step; a mask is staged like parameters."""
    pipeline = executor("1f1b", 4, mesh=mesh_of(dp=2, pp=4), loss_reduction="sum")
    data = split_batch(TOKENS, M), split_batch(TARGETS, M)
    staged = pipeline.stage_parameters(PARAMETERS)
    decayed = pipeline.stage_parameters(jax.tree.map(lambda p: p.ndim > 1, PARAMETERS))

    def decay(updates, state, params):
        return jax.tree.map(lambda u, d, p: u + 0.1 * d * p, updates, decayed, params), state

    def optimizer(decay):
        own = optax.GradientTransformation(lambda _: (), decay)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), own, optax.scale(-0.01))

    ours = optimizer(decay)

    @jax.jit
    def train(staged, state):
        losses, gradients = pipeline.step(staged, *data)
        updates, state = ours.update(gradients, state, staged)
        return optax.apply_updates(staged, updates), state, losses

    theirs = optimizer(lambda u, s, p: (jax.tree.map(lambda u, p: u + 0.1 * (p.ndim > 1) * p, u, p), s))

    @jax.jit
    def train_plain(gradients, state, plain):
        updates, state = theirs.update(gradients, state, plain)
        return optax.apply_updates(plain, updates), state

    plain = PARAMETERS[:3]
    state, plain_state = jax.jit(ours.init)(staged), theirs.init(plain)
    for _ in range(3):
        staged, state, losses = train(staged, state)
        # Each replica has the sum over its microbatches, and their mean is the sum over whole microbatches.
        expected, gradients = one_after_the_other([*plain, plain[0]], jnp.sum)
        assert_equal(losses, expected)
        plain, plain_state = train_plain(gradients[:3], plain_state, plain)
    trained = pipeline.join_parameters(staged)
    assert_equal(trained, [*plain, plain[0]], 1e-12)
    assert_equal(pipeline.evaluate(staged, *data), one_after_the_other(trained)[0])
    outputs = pipeline.forward(staged, data[0])
    assert outputs.shape == (M, 2, 3, 7)
    assert_equal(jax.jit(jax.vmap(cross_entropy))(outputs, data[1]), pipeline.evaluate(staged, *data))


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(inputs, outputs, rngs=rngs)])
        self.norm = nnx.BatchNorm(outputs, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.scale = nnx.Variable(jnp.float32(1.5))

    def __call__(self, x):
        return self.drop(jax.nn.gelu(self.norm(self.layers[0](x)))) * self.scale


def blocks_of(*widths: int) -> list[Block]:
    return [Block(*pair, nnx.Rngs(n)) for n, pair in enumerate(pairwise(widths))]


def square(y, target):
    return jnp.square(y - target).mean()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_nnx_modules_with_statistics_and_dropout(schedule):
    """Two steps: losses, gradients, statistics of batch norms, and the counters of dropout."""
    blocks = blocks_of(4, 6, 6, 6, 3)
    x, y = (RANDOM.normal(size=(M, 4, width)).astype(np.float32) for width in (4, 3))
    mesh = mesh_of(pp=2 if schedule == "zb-v" else 4)
    pipeline = PipelineExecutor(blocks, schedule, M, square, mesh=mesh)
    staged, state = pipeline.stage_parameters(), pipeline.initial_state()
    graph, params, rest = nnx.split(blocks, nnx.Param, ...)

    @jax.jit
    def plain(params, rest):
        def mean(params, rest):
            rest = jax.tree.map(jnp.copy, rest)  # variables of this trace, which may change
            losses = []
            for microbatch, target in zip(x, y, strict=True):
                model = nnx.merge(graph, params, rest)
                for block in model:
                    microbatch = block(microbatch)
                losses.append(square(microbatch, target))
                rest = nnx.split(model, nnx.Param, ...)[2]
            return jnp.stack(losses).mean(), (jnp.stack(losses), rest)

        return jax.grad(mean, has_aux=True)(params, rest)

    for _ in range(2):
        losses, gradients, state = pipeline.step(staged, x, y, state)
        expected, (expected_losses, rest) = plain(params, rest)
        assert_equal(losses, expected_losses)
        found = pipeline.join_parameters(gradients)
        assert_equal(jax.tree.leaves(found), jax.tree.leaves(expected))
    expected = [np.ravel(x) for x in jax.tree.leaves(rest) if x.dtype == jnp.float32]
    found = state["float32"][state["float32"] != 0]
    assert_equal(np.sort(found), np.sort(np.concatenate(expected)))
    pipeline.update_modules(staged, state)
    for block, expected_block in zip(blocks, nnx.merge(graph, params, rest), strict=True):
        assert block.drop.rngs.count[...] == 2 * M
        assert_equal(block.norm.mean[...], expected_block.norm.mean[...])
        assert jnp.array_equal(
            jax.random.key_data(block.drop.rngs.key[...]), jax.random.key_data(expected_block.drop.rngs.key[...])
        )
    for block in blocks:
        block.eval()  # evaluation uses the statistics, and drops nothing
    found = x[0]
    for block in blocks:
        found = block(found)
    state = pipeline.initial_state()
    assert_equal(pipeline.forward(staged, x, state)[0], found)
    blocks[0].layers[0].kernel[...] = jnp.zeros_like(blocks[0].layers[0].kernel[...])
    first = pipeline.join_parameters(pipeline.stage_parameters())[0]
    assert not first["layers"][0]["kernel"][...].any()


class Counting(nnx.Module):
    """Its weight is scaled by the number of calls, so the gradient of the weight reads the state of its own forward."""

    def __init__(self):
        self.weight = nnx.Param(jnp.eye(3))
        self.calls = nnx.Variable(jnp.float64(1))
        self.seen = nnx.Variable(jnp.float64(0))

    def __call__(self, x):
        y = x @ (self.weight[...] * self.calls[...])
        self.calls[...] += 1
        self.seen[...] = x.mean()
        return y


def test_state_of_replicas_that_weight_gradients_read():
    x, y = RANDOM.normal(size=(2, M, 4, 3))
    pipeline = PipelineExecutor([Counting(), Counting()], "zb-h1", M, square, mesh=mesh_of(dp=2, pp=2))
    _, gradients, state = pipeline.step(pipeline.stage_parameters(), x, y, pipeline.initial_state())

    def mean(weights):
        return jnp.stack(
            [square(x[i] @ (weights[0] * (i + 1)) @ (weights[1] * (i + 1)), y[i]) for i in range(M)]
        ).mean()

    expected = jax.jit(jax.grad(mean))([jnp.eye(3), jnp.eye(3)])
    assert_equal(jax.tree.leaves(pipeline.join_parameters(gradients)), expected)
    assert_equal(state["float64"], np.array([[M + 1, x[-1].mean()], [M + 1, M * x[-1].mean()]]))


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_split_schedules_on_replicas_and_names_with_dots(schedule):
    def scaled(p, x):
        return jnp.tanh(x @ p["a"]["b"]) * p["a.b"] + p["a"]["c"]

    stages = 4 if schedule == "zb-v" else 2
    parameters = [
        {"a": {"b": RANDOM.normal(size=(3, 3)), "c": RANDOM.normal(size=3)}, "a.b": RANDOM.normal(size=3)}
        for _ in range(stages)
    ]
    x, y = RANDOM.normal(size=(2, M, 4, 3))
    pipeline = PipelineExecutor([scaled] * stages, schedule, M, square, parameters=parameters, mesh=mesh_of(dp=2, pp=2))
    _, gradients = pipeline.step(pipeline.stage_parameters(parameters), x, y)

    def mean(p):
        def loss(x, y):
            for own in p:
                x = scaled(own, x)
            return square(x, y)

        return jnp.stack([*map(loss, x, y)]).mean()

    assert_equal(pipeline.join_parameters(gradients), jax.jit(jax.grad(mean))(parameters))


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_split_schedules_of_what_is_equal_on_all_replicas(schedule):
    """The indices of a sort and a product of constants vary over no axis; JAX casts them where W reads them."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def mlp(p, x):
        phases = jnp.sin(jnp.arange(3.0)) @ jnp.cos(jnp.arange(9.0)).reshape(3, 3)
        return jnp.tanh(jnp.sort(x, 1) @ (p["up"] * phases)) @ p["down"]

    def stage(p, x):
        return mlp(p, jnp.sort(x @ p["first"], 1))

    names = ("first", "up", "down")
    parameters = [{name: RANDOM.normal(size=(3, 3)) for name in names} for _ in range(4 if schedule == "zb-v" else 2)]
    stages = [stage] * len(parameters)
    x, y = RANDOM.normal(size=(2, M, 4, 5, 3))
    pipeline = PipelineExecutor(
        stages, schedule, M, square, parameters=parameters, saves="inputs", mesh=mesh_of(dp=2, pp=2)
    )
    losses, gradients = pipeline.step(pipeline.stage_parameters(parameters), x, y)

    def mean(parameters):
        def loss(x, y):
            for own in parameters:
                x = stage(own, x)
            return square(x, y)

        return jnp.stack([*map(loss, x, y)]).mean()

    expected = jax.jit(jax.value_and_grad(mean))(parameters)
    assert_equal((losses.mean(), pipeline.join_parameters(gradients)), expected)


def test_one_function_with_parameters_of_other_shapes():
    def mlp(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    parameters = [{"up": RANDOM.normal(size=(3, n)), "down": RANDOM.normal(size=(n, 3))} for n in (5, 2, 7, 5)]
    x, y = RANDOM.normal(size=(2, M, 4, 3))
    pipeline = PipelineExecutor([mlp] * 4, "1f1b", M, square, parameters=parameters)
    _, gradients = pipeline.step(pipeline.stage_parameters(parameters), x, y)

    def mean(p):
        def loss(x, y):
            for own in p:
                x = mlp(own, x)
            return square(x, y)

        return jnp.stack([*map(loss, x, y)]).mean()

    assert_equal(pipeline.join_parameters(gradients), jax.jit(jax.grad(mean))(parameters))


def test_state_must_be_given_and_saved():
    x = y = np.ones((M, 2, 4), np.float32)
    blocks = blocks_of(4, 4, 4)
    pipeline = PipelineExecutor(blocks, "1f1b", M, square)
    with pytest.raises(ValueError, match=r"state: expected pipeline.initial_state\(\) .* stages 0, 1 change variables"):
        pipeline.step(pipeline.stage_parameters(), x, y)
    assert pipeline.evaluate(pipeline.stage_parameters(), x, y).shape == (M,)
    replayed = PipelineExecutor(blocks, "1f1b", M, square, saves="inputs")
    with pytest.raises(ValueError, match=r"saves: expected 'residuals', since stages 0, 1 change variables"):
        replayed.step(replayed.stage_parameters(), x, y, replayed.initial_state())
    for block in blocks:
        block.eval()  # constants, such as Block.scale, may stay
    constant = PipelineExecutor(blocks, "1f1b", M, square, saves="inputs")
    losses, _ = constant.step(constant.stage_parameters(), x, y)
    assert losses.shape == (M,)


class Listed(nnx.Module):
    """A module with attributes that have no hash."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.sizes = [1, 2]
        self.names = {"a": 1.0}

    def __call__(self, x):
        return self.linear(x) * self.sizes[1] * self.names["a"]


def test_attributes_without_a_hash_compile_one_step():
    modules = [Listed(nnx.Rngs(n)) for n in range(2)]
    pipeline = PipelineExecutor(modules, "1f1b", M, square)
    staged = pipeline.stage_parameters()
    x = RANDOM.normal(size=(M, 2, 3)).astype(np.float32)
    first, second = (pipeline.step(staged, x, x)[0] for _ in range(2))
    assert_equal(first, second)
    assert len(pipeline._runs) == 1
    modules[1].names["a"] = 2.0
    assert not np.allclose(pipeline.step(staged, x, x)[0], first)
    assert len(pipeline._runs) == 2


def test_a_variable_of_two_modules_is_one_parameter():
    first, last = blocks_of(4, 4, 4)
    for block in (first, last):
        block.eval()
    last.layers[0].kernel = first.layers[0].kernel
    pipeline = PipelineExecutor([first, last], "1f1b", M, square)
    staged = pipeline.stage_parameters()
    assert len(staged.replicated) == 1
    x, y = RANDOM.normal(size=(2, M, 2, 4)).astype(np.float32)
    gradients = pipeline.join_parameters(pipeline.step(staged, x, y)[1])
    graph, params, rest = nnx.split([first, last], nnx.Param, ...)

    def mean(params):
        own = nnx.merge(graph, params, rest)
        return jnp.stack([square(own[1](own[0](a)), b) for a, b in zip(x, y, strict=True)]).mean()

    expected = jax.jit(jax.grad(mean))(params)[0]["layers"][0]["kernel"]
    kernels = [of_stage["layers"][0]["kernel"] for of_stage in gradients]
    for kernel in kernels:
        assert_equal(jnp.asarray(kernel[...]), jnp.asarray(expected[...]))


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["power"])
@dataclass(eq=False)
class Affine:
    """A module in the style of equinox: a pytree that is called."""

    weight: jax.Array
    power: int

    def __call__(self, x):
        return (x @ self.weight) ** self.power


def test_modules_that_are_pytrees_and_loops_and_checkpoints_inside():
    def run(module, x):
        y, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(module)(x), None), x, None, length=2)
        return y

    modules = [Affine(RANDOM.normal(size=(3, 3)) * 0.3, power) for power in (1, 2, 1, 1)]
    x, y = RANDOM.normal(size=(2, M, 2, 3))
    pipeline = PipelineExecutor([run] * 4, "zb-h1", M, square, parameters=modules)
    losses, gradients = pipeline.step(pipeline.stage_parameters(modules), x, y)

    def mean(modules):
        def loss(x, y):
            for module in modules:
                x = run(module, x)
            return square(x, y)

        return jnp.stack([*map(loss, x, y)]).mean()

    assert_equal((losses.mean(), pipeline.join_parameters(gradients)), jax.jit(jax.value_and_grad(mean))(modules))


def stages_of(function, params, x):
    """The stages of a pipeline of three equal functions, the task of the middle one, and its message."""
    users = [stage_of_function(function, params)] * 3
    likes = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in user.params] for user in users]
    layouts = StageLayouts(PackedLayout(likes, [0, 1, 2]), PackedLayout([[]] * 3, [0, 1, 2]), [{}] * 3)
    data = Microbatches(x, None)
    stages = ModuleStages(users, layouts, data, None, None, False)
    packed = {dtype: jnp.zeros(length, dtype) for dtype, length in layouts.params.lengths.items()}
    task = Task(StagedParameters(packed, []), data.microbatch(0), jnp.int32(0), jnp.int32(0), jnp.int32(1), {})
    return stages.programs[1], task, stages.message(data)


@pytest.mark.usefixtures("compiled_well")
def test_only_products_of_weights_wait():
    """I and W together cost B, and W half of it. W reads inputs of products and gradients of their outputs alone."""

    def mlp(p, x):
        return jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]

    shapes = {"up": (256, 512), "bias": (512,), "down": (512, 256)}
    params = {name: jnp.ones(shape, "float32") for name, shape in shapes.items()}
    program, task, x = stages_of(mlp, params, jnp.ones((2, 64, 256), "float32"))
    whole, split = (StageAutodiff([program], task, x, "residuals", splits) for splits in (False, True))
    zeros = partial(jax.tree.map, lambda like: jnp.zeros(like.shape, like.dtype))

    def flops(function, *arguments) -> float:
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def backward(autodiff, task, x, residuals, gradient):
        result = autodiff.backward(program, task, x, residuals, gradient)
        return result.gradients, result.input_gradient, result.weight_operands

    both = flops(partial(backward, whole), task, x, zeros(whole.residual_shapes), x)
    inputs = flops(partial(backward, split), task, x, zeros(split.residual_shapes), x)
    weights = flops(partial(split.weight_gradients, program), task, zeros(split.weight_operand_shapes))
    assert inputs + weights <= 1.02 * both
    assert 0.45 * both <= weights <= 0.55 * both
    assert split.weight_operand_shapes["float32"].shape == (64 * (256 + 512) * 2,)


def test_values_of_parameters_alone_are_not_saved():
    """A weight cast to bfloat16 inside of a jitted stage is computed again, and not saved for each microbatch."""
    cast = jax.jit(lambda p, x: x @ p["w"].astype(x.dtype))
    program, task, x = stages_of(cast, {"w": jnp.ones((16, 16))}, jnp.ones((2, 4, 16), "bfloat16"))
    autodiff = StageAutodiff([program], task, x, "residuals", split=False)
    assert {dtype: like.shape for dtype, like in autodiff.residual_shapes.items()} == {"bfloat16": (4 * 16,)}


REFUSED = [
    (lambda: executor("1f2b"), r"schedule: expected one of .*, or a table, got '1f2b'"),
    (lambda: executor(pp=3), r"stages: expected a multiple of 3, the number of ranks, got 4"),
    (lambda: executor("interleaved", 4), r"stages_per_rank: expected at least 2 with schedule 'interleaved', got 1"),
    (lambda: executor(mesh=mesh_of(pp=2, tp=2)), r"mesh: expected an axis 'pp', .* got \{'pp': 2, 'tp': 2\}"),
    (
        lambda: executor(mesh=mesh_of(dp=2, pp=4), transform="pmap"),
        r"transform: expected 'shard_map' with a mesh .*, got 'pmap'",
    ),
    (lambda: executor(saves="all"), r"saves: expected one of \('inputs', 'residuals'\), got 'all'"),
    (lambda: executor(parameters=PARAMETERS[:3]), r"parameters: expected a list of 4, one pytree for each .*, got 3"),
    (lambda: executor(parameters=None), r"parameters: expected a pytree for each stage, since stages are functions"),
    (
        lambda: executor(parameters=[{"table": np.arange(3)}, *PARAMETERS[1:]], shared_parameters=None),
        r"parameters: expected floating-point arrays, got int64 for 'table' of stage 0; let the function read",
    ),
    (
        lambda: executor(shared_parameters=[{0: "table", 3: "tabel"}]),
        r"shared_parameters: expected one parameter of stage 3, which has table, got 'tabel'",
    ),
    (
        lambda: executor(shared_parameters=[{0: "table", 1: "w"}]),
        r"shared_parameters: expected equal shapes and dtypes for \{0: 'table', 1: 'w'\}",
    ),
    (
        lambda: PipelineExecutor([linen.Dense(3)] * 2, "1f1b", M, parameters=[{}, {}]),
        r"stages: expected a function or an nnx module for stage 0, got the linen module Dense; give lambda",
    ),
    (lambda: PipelineExecutor([embed] * 9, "1f1b", M, parameters=[{}] * 9), r"mesh: expected one with fewer ranks"),
    (
        lambda: PipelineExecutor([*blocks_of(2, 2), embed], "1f1b", M),
        r"stages: expected nnx modules alone, without parameters, or functions with parameters, got a mixture",
    ),
    (
        lambda: (
            PipelineExecutor([Block(2, 2, rngs) for rngs in [nnx.Rngs(0)] * 2], "1f1b", M)
            and PipelineExecutor([(block := Block(2, 2, nnx.Rngs(0))), block], "1f1b", M)
        ),
        r"stages: expected modules with variables of their own, got .* of stage 1, which is .* of stage 0; create it",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_data_and_outputs_are_checked():
    pipeline = executor()
    staged = pipeline.stage_parameters(PARAMETERS)
    data = split_batch(TOKENS, M), split_batch(TARGETS, M)
    with pytest.raises(ValueError, match=r"inputs: expected arrays \[6, ...\], .* got shape \[12, 3\]; .*, 6\)"):
        pipeline.step(staged, TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"batch: expected arrays whose axis 0 is a multiple of 5, .* \[12, 3\]"):
        split_batch(TOKENS, 5)
    with pytest.raises(ValueError, match=r"parameters: expected shape \(5, 8\) for 'w' of stage 1, .* got \(5, 9\)"):
        pipeline.stage_parameters([PARAMETERS[0], {"w": np.ones((5, 9)), "b": 0.0}, *PARAMETERS[2:]])
    with pytest.raises(ValueError, match=r"parameters: expected the structure of stage 0, .*"):
        pipeline.stage_parameters([{}, *PARAMETERS[1:]])
    for stage, message in (
        (lambda p, x: "text", r"stages: expected a pytree of arrays from stage 1, got one with str"),
        (lambda p, x: jax.random.key(0), r"stages: expected arrays of numbers from stage 1, got a typed random key"),
    ):
        wrong = PipelineExecutor([lambda p, x: x, stage], "1f1b", M, parameters=[{}, {"w": np.ones(1)}])
        with pytest.raises(ValueError, match=message) as caught:
            wrong.step(wrong.stage_parameters([{}, {"w": np.ones(1)}]), np.ones((M, 2)))
        assert caught.value.__notes__[0] == "in stage 1 of the pipeline"
    for loss_fn, message in (
        (lambda y, t: (y.mean(), 1.0), r"loss_fn: expected a scalar loss of a floating-point dtype, got \("),
        (lambda y, t: y, r"loss_fn: expected a scalar loss of a floating-point dtype, got float64\[2, 3, 7\]"),
    ):
        wrong = PipelineExecutor(STAGES, "1f1b", M, loss_fn, parameters=PARAMETERS)
        with pytest.raises(ValueError, match=message):
            wrong.step(wrong.stage_parameters(PARAMETERS), *data)
    with pytest.raises(ValueError, match=r"targets: expected arrays \[m, ...\] for loss_fn, got none"):
        pipeline.step(staged, data[0])
    with pytest.raises(ValueError, match=r"params: expected the result of stage_parameters, got list"):
        pipeline.step(PARAMETERS, *data)
    no_loss = PipelineExecutor(STAGES, "1f1b", M, parameters=PARAMETERS)
    with pytest.raises(
        ValueError, match=r"without loss_fn, the last stage: expected a scalar loss .* float64\[2, 3, 7\]"
    ):
        no_loss.step(no_loss.stage_parameters(PARAMETERS), data[0])

"""offload_modules in JAX: nnx models, with what surrounds them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.extend.core import Literal
from jax.sharding import Mesh, PartitionSpec

from jax_impl.offload import offload_modules
from jax_impl.recompute import recompute_modules
from tests.recompute.test_recompute_modules_jax import CHOSEN, Model, Transformer, assert_same, batch, loss, results
from tests.recompute.test_users_code_jax import Part, linear

MODELS = {"blocks": (Model, ["blocks.*"]), "parts": (Model, ["blocks.*.up"]), "flax": (Transformer, ["layers.*"])}
SETTINGS = {
    "parameters": {},
    "activations": {"activations": True, "activation_min_bytes": 0},
    "moments": {"optimizer_state": True},
}


def train(name, settings=None):
    """Three steps with AdamW under nnx.jit: losses and all state at the end."""
    make, modules = MODELS[name]
    model = make()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    handle = None if settings is None else offload_modules(model, modules, **settings)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(model, x)
        if handle is None:
            optimizer.update(model, gradients)
        else:
            handle.update(optimizer, model, gradients)
        return value

    losses = [step(model, optimizer, batch()) for _ in range(3)]
    return losses, model, optimizer, handle


def on_host(state) -> dict[str, bool]:
    """Whether each leaf is in host memory, by path."""
    return {
        jax.tree_util.keystr(path): leaf.sharding.memory_kind == "pinned_host"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_that_of_the_plain_model(name, settings):
    expected, plain, plain_optimizer, _ = train(name)
    found, model, optimizer, handle = train(name, SETTINGS[settings])
    assert found == expected
    begin = MODELS[name][1][0].partition(".")[0]
    moments = on_host(nnx.state(optimizer))
    kinds = [on_host(nnx.state(model, nnx.Param)), *([moments] if settings == "moments" else [])]
    for path, is_there in (item for kind in kinds for item in kind.items()):
        assert is_there == (begin in path and (name != "parts" or "'up'" in path)), path
    assert any(moments.values()) == (settings == "moments")
    assert not all(moments.values())
    handle.close()
    assert not any(on_host(nnx.state(model, nnx.Param)).values())
    for one, other in ((model, plain), (optimizer, plain_optimizer)):
        wanted = dict(jax.tree_util.tree_leaves_with_path(nnx.state(other)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(one)):
            if jnp.issubdtype(leaf.dtype, jnp.number):
                np.testing.assert_array_equal(leaf, wanted[path], err_msg=str(path))


def test_gradients_are_added_on_the_device():
    model, plain = Transformer(), Transformer()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    handle = offload_modules(model, ["layers.*"])

    @nnx.jit
    def step(model, optimizer, x):
        gradients = [handle.fetch(nnx.grad(loss)(model, scale * x)) for scale in (1, 2)]
        handle.update(optimizer, model, jax.tree.map(jnp.add, *gradients))

    step(model, optimizer, batch())
    gradients = [nnx.jit(nnx.grad(loss))(plain, scale * batch()) for scale in (1, 2)]
    expected = jax.tree.map(lambda p, a, b: p - 0.1 * (a + b), nnx.state(plain, nnx.Param), *gradients)
    for found, wanted in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_of_the_input_alone(transform):
    """Of what is known then, JAX moves operations with one result only."""
    plain, model = Transformer(), Transformer()
    offload_modules(model, ["layers.*"], activations=True, activation_min_bytes=0)
    expected = jax.grad(lambda x: loss(plain, x))(batch())
    np.testing.assert_allclose(transform(jax.grad(lambda x: loss(model, x)))(batch()), expected, rtol=1e-11, atol=1e-11)


def test_what_an_optimizer_takes_besides_gradients_is_passed_on():
    model, plain = Transformer(), Transformer()
    transformation = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    handle = offload_modules(model, ["layers.*"])
    for one in (model, plain):
        optimizer = nnx.Optimizer(one, transformation, wrt=nnx.Param)
        for value in (1.0, 2.0, 3.0, 4.0):
            gradients = nnx.grad(loss)(one, batch())
            if one is model:
                handle.update(optimizer, one, gradients, value=value)
            else:
                optimizer.update(one, gradients, value=value)
    handle.close()
    for found, wanted in zip(*(jax.tree.leaves(nnx.state(one, nnx.Param)) for one in (model, plain)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def residuals(model) -> tuple[list, list]:
    """Shapes of what the model saves for backward on the device and on the host, besides its arguments."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        return loss(nnx.merge(graph, params, rest, copy=True), x)

    program = jax.make_jaxpr(lambda p, x: jax.vjp(lambda p: run(p, x), p)[1])(params, batch()).jaxpr
    saved = dict.fromkeys(v for v in program.outvars if not isinstance(v, Literal))
    found = [v.aval for v in saved if v not in {*program.invars, *program.constvars}]
    hosted = [a.memory_space == jax.memory.Space.Host for a in found]
    return tuple([a.shape for a, h in zip(found, hosted, strict=True) if h == there] for there in (False, True))


def test_copies_of_parameters_are_not_saved():
    model = Transformer()
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}
    offload_modules(model, ["layers.*"])
    on_device, hosted = residuals(model)
    assert on_device
    assert not hosted
    assert not shapes & {*on_device}


def test_activations_are_saved_on_the_host():
    model = Transformer()
    handle = offload_modules(model, ["layers.*"], activations=True, activation_min_bytes=0)
    on_device, hosted = residuals(model)
    assert len(hosted) > 10
    inputs_of_layers_and_the_loss = [(2, 6, 8)] * 2
    assert len(on_device) <= len(inputs_of_layers_and_the_loss) + 2
    handle.close()
    offload_modules(model, ["layers.*"], activations=True, activation_min_bytes=2**30)
    assert not residuals(model)[1]


@pytest.mark.parametrize("transform", ["eager", "jit"])
def test_gradients_and_state(transform):
    model = Model()
    offload_modules(model, ["blocks.*"])
    apply = {"eager": lambda f: f, "jit": nnx.jit}[transform]
    assert_same(results(model, transform=apply), results(Model(), transform=apply))


@pytest.mark.parametrize("order", ["recompute first", "offload first"])
def test_with_recompute(order):
    model = Model()
    add = [partial(recompute_modules, model, CHOSEN), partial(offload_modules, model, ["blocks.*"])]
    for each in add if order == "recompute first" else add[::-1]:
        each()
    assert_same(results(model), results(Model()))


def outputs(model, how: str):
    """Gradients of a model by its parameters, on the device, under a transformation."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x)

    def total(params, x):
        return jnp.sin(run(params, x)).sum()

    if how == "vmap":
        found = jax.jit(jax.vmap(jax.grad(total), (None, 0)))(params, jnp.stack([batch(), 2 * batch()]))
    elif how == "checkpoint":
        found = jax.jit(jax.grad(jax.checkpoint(total)))(params, batch())
    elif how == "forward":
        found = jax.jit(run)(params, batch())
    else:
        mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
        spec = PartitionSpec("dp")
        mapped = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec())
        found = jax.jit(mapped)(params, batch())
    return jax.tree.map(lambda x: np.asarray(jax.device_put(x, jax.memory.Space.Device)), jax.tree.leaves(found))


@pytest.mark.parametrize("how", ["vmap", "checkpoint", "forward", "shard_map"])
def test_transformations(how):
    model = Transformer()
    offload_modules(model, ["layers.*"], activations=True, activation_min_bytes=0)
    for found, expected in zip(outputs(model, how), outputs(Transformer(), how), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_moved_activations_are_an_error_of_jax():
    """JAX refuses them in jax.checkpoint with any policy that moves; once it does not, the docs need a change."""

    def curvature(activations):
        model = Transformer()
        offload_modules(model, ["layers.*"], activations=activations, activation_min_bytes=0)
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: model(x).sum())(x)).sum())(batch())

    plain = Transformer()
    expected = jax.grad(lambda x: jnp.sin(jax.grad(lambda x: plain(x).sum())(x)).sum())(batch())
    np.testing.assert_allclose(curvature(False), expected, rtol=1e-4, atol=1e-4)  # norms of flax are in float32
    with pytest.raises(ValueError, match=r"Expected cotangent type|safe_zip"):
        curvature(True)


MISTAKES = [
    (Model, ["block.*"], {}, ValueError, r"'block\.\*', which matches none of blocks"),
    (Model, "blocks.*", {}, TypeError, "modules: expected a list"),
    (Model, ["blocks.*", "blocks.0.up"], {}, ValueError, r"got blocks\.0 and blocks\.0\.up inside it"),
    (Model, ["blocks.*.activation"], {}, ValueError, "expected modules with parameters"),
    (Model, ["blocks.*"], {"activation_min_bytes": -1}, ValueError, "activation_min_bytes: expected a number of bytes"),
    (lambda: linen.Dense(8), ["blocks.*"], {}, TypeError, "model: expected an nnx.Module, got Dense"),
]


@pytest.mark.parametrize(("make", "modules", "settings", "kind", "message"), MISTAKES)
def test_mistakes_are_named(make, modules, settings, kind, message):
    with pytest.raises(kind, match=message):
        offload_modules(make(), modules, **settings)


def test_a_parameter_that_another_module_shares_is_refused():
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(3)))
    model.layers[2].kernel = model.layers[0].kernel
    with pytest.raises(ValueError, match=r"no other module shares, got 'kernel' of 'layers\.2', which belongs to a"):
        offload_modules(model, ["layers.0"])
    inner = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.tanh)
    shared = nnx.Sequential(inner, nnx.Sequential(inner.layers[0]))
    with pytest.raises(ValueError, match=r"got 'layers\.0' of 'layers\.1', which belongs to a chosen module too"):
        offload_modules(shared, ["layers.0"])
    expected = model(batch())
    offload_modules(model, ["layers.0", "layers.2"])
    np.testing.assert_allclose(model(batch()), expected, rtol=1e-12)


def test_a_second_offload_and_a_late_close_are_refused():
    model = Model()
    handle = offload_modules(model, ["blocks.*"])
    with pytest.raises(ValueError, match=r"got blocks\.0, which has it; close\(\) it first"):
        offload_modules(model, ["blocks.*"])
    later = recompute_modules(model, CHOSEN)
    with pytest.raises(
        ValueError,
        match=r"close: expected the class of offload_modules in 'blocks\.0', got Block with changes made later",
    ):
        handle.close()
    later.remove()
    handle.close()
    handle.close()
    assert type(model.blocks[0]).__mro__[1] is nnx.Module


class Larger(nnx.Module):
    """A model that is a part of a larger one, which an optimizer trains."""

    def __init__(self) -> None:
        self.encoder = nnx.Sequential(Part(), Part())
        self.linear = linear(rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.linear(self.encoder(x))


def names_on_host(state) -> list[str]:
    """Names of what is in host memory."""
    return [path for path, is_there in on_host(state).items() if is_there]


@pytest.mark.parametrize("from_checkpoint", [False, True])
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
def test_an_optimizer_of_a_larger_model(jit, from_checkpoint):
    model = Larger()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    values = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    handle = offload_modules(model.encoder, ["layers.1"], optimizer_state=True)
    if from_checkpoint:
        nnx.update(model, values)
    step = jit(lambda model, optimizer: handle.update(optimizer, model, jax.tree.map(jnp.ones_like, values)))
    step(model, optimizer)
    for state, number in ((nnx.state(model), 4), (nnx.state(optimizer), 8)):
        found = names_on_host(state)
        assert len(found) == number, found
        assert all("['layers'][1]" in path for path in found)


def test_two_offloads_of_a_model_move_the_moments_of_their_own_modules():
    model = Larger()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    first = offload_modules(model, ["encoder.layers.0"], optimizer_state=True)
    second = offload_modules(model.encoder, ["layers.1"])
    values = jax.tree.map(jnp.ones_like, second.fetch(nnx.state(model, nnx.Param)))
    second.update(optimizer, model, values)
    assert len(names_on_host(nnx.state(model))) == 8
    moments = names_on_host(nnx.state(optimizer))
    assert len(moments) == 8
    assert all("['layers'][0]" in path for path in moments)
    first.close()
    nnx.update(optimizer, first.fetch(nnx.state(optimizer)))
    second.update(optimizer, model, values)
    assert len(names_on_host(nnx.state(model))) == 4
    assert not names_on_host(nnx.state(optimizer))

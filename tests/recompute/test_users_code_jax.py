"""What the user's code does around and inside of modules with recompute or offload in JAX."""

import dataclasses
import re
from collections import deque
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jax_impl.offload import is_on_host, offload_modules
from jax_impl.recompute import recompute_modules
from tests.recompute.test_recompute_modules_jax import saved_bytes

WIDTH = 8
linear = partial(nnx.Linear, WIDTH, WIDTH, param_dtype=float)
norm = partial(nnx.LayerNorm, WIDTH, param_dtype=float)
TECHNIQUES = {
    "chosen": lambda model: recompute_modules(model, {"": ["part"]}),
    "block": lambda model: recompute_modules(model, {"part": ["norm"]}),
    "offload": lambda model: offload_modules(model, ["part"]),
}
"""Ways to make model.part special."""


def batch() -> jax.Array:
    """A batch."""
    return jnp.asarray(np.random.default_rng(1).standard_normal((4, 3, WIDTH)))


class Part(nnx.Module):
    """A norm and a linear layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = norm(rngs=rngs)
        self.linear = linear(rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(self.norm(x)))


class Model(nnx.Module):
    """A model of one part, which is used by a function of the test."""

    def __init__(self, part: nnx.Module, use) -> None:
        self.part = part
        self.use = use

    def __call__(self, x):
        return self.use(self.part, x)


def gradients(model, compiled: bool = False):
    """Gradients of a model, on the device."""
    gradient = nnx.grad(lambda model, x: (model(x) ** 2).sum())
    found = (nnx.jit(gradient) if compiled else gradient)(model, batch())
    return [jax.device_put(x, jax.memory.Space.Device) for x in jax.tree.leaves(found)]


def assert_plain_gradients(make, technique, compiled: bool = False) -> None:
    """Check that a model has the gradients of the plain one."""
    expected = gradients(make(), compiled)
    model = make()
    technique(model)
    for ours, theirs in zip(gradients(model, compiled), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def saved_by(model) -> int:
    """Bytes that a model saves for backward, by the gradients of its parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return saved_bytes(lambda params: nnx.merge(graph, params, rest)(batch()), params)


# Arguments and results.


class Appending(Part):
    """A part that adds a loss to a list, as mixtures of experts do."""

    def __call__(self, x, losses):
        y = super().__call__(x)
        losses.append((y**2).mean())
        return y


class Setting(Part):
    """A part that keeps a value in the caller's dict."""

    def __call__(self, x, cache):
        cache["y"] = super().__call__(x)
        return cache["y"]


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
@pytest.mark.parametrize(
    ("kind", "argument", "message"),
    [
        (Appending, list, "got one that adds to a list, a dict or an object among them"),
        (Setting, lambda: {"y": jnp.zeros(())}, "got one that sets ['y'] of one"),
    ],
)
def test_an_argument_that_a_call_changes_is_refused(technique, kind, argument, message):
    model = Model(kind(), lambda part, x: part(x, argument()))
    technique(model)
    with pytest.raises(ValueError, match=re.escape(f"{kind.__name__}: expected a call that does not change its")) as e:
        model(batch())
    assert message in str(e.value)


def test_an_argument_that_a_function_changes_is_refused():
    def forward(x, losses):
        losses.append(checkpoint_name(jnp.tanh(x), "a").mean())
        return x

    with pytest.raises(ValueError, match="forward: expected a call that does not change its arguments, got one that"):
        recompute_modules(forward, ["a"])(batch(), [])


class Bag:
    """An object that is no pytree."""

    def __init__(self) -> None:
        self.number = 0
        self.items = []
        self.inner = None


class SlottedBag:
    """The same without a dict of attributes."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def count(bag, y) -> None:
    """Set an attribute."""
    bag.number += 1


def collect(bag, y) -> None:
    """Add to a list of an object."""
    bag.items.append((y**2).mean())


def count_inside(bag, y) -> None:
    """Set an attribute of an object in another one."""
    bag.inner.number += 1


def nested() -> Bag:
    """An object with another one."""
    bag = Bag()
    bag.inner = Bag()
    return bag


class Noting(Part):
    """A part that changes an object."""

    def __init__(self, note) -> None:
        super().__init__()
        self.note = note

    def __call__(self, x, bag):
        y = super().__call__(x)
        self.note(bag, y)
        return y


class Owning(Noting):
    """A part that changes an object which it has."""

    def __init__(self, note, bag) -> None:
        super().__init__(note)
        self.bag = bag

    def __call__(self, x):
        return super().__call__(x, self.bag)


BAGS = [
    (count, Bag, "number"),
    (count, SlottedBag, "number"),
    (collect, Bag, "items"),
    (count_inside, nested, "inner"),
    (lambda bag, y: bag.append(y.shape), deque, "deque"),
    (lambda bag, y: bag.add(y.shape), set, "set"),
    (lambda bag, y: bag.put(0, 1), partial(np.zeros, 2), "ndarray"),
    (lambda bag, y: setattr(bag, "new", 0), Bag, "Bag"),
]


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
@pytest.mark.parametrize(("note", "make", "what"), BAGS)
def test_an_object_that_a_call_changes_is_refused(technique, note, make, what):
    owners = [(Noting(lambda bags, y: note(bags["bag"], y)), lambda part, x: part(x, {"bag": make()}))]
    if what != "ndarray":  # which would be state of the module
        owners.append((Owning(note, make()), lambda part, x: part(x)))
    for part, use in owners:
        model = Model(part, use)
        technique(model)
        with pytest.raises(ValueError, match=rf"{type(part).__name__}: expected a call that .*{what}"):
            model(batch())


def test_objects_that_a_call_reads():
    def use(part, x):
        return part(x, [nested(), SlottedBag(), deque([jnp.ones(2)]), {1, 2}, np.full(2, np.nan), np.array([None])])

    for technique in TECHNIQUES.values():
        assert_plain_gradients(lambda: Model(Noting(lambda bag, y: bag[0].number), use), technique)


@dataclasses.dataclass
class Output:
    """A result that JAX takes for a leaf."""

    y: jax.Array


class Wrapping(Part):
    """A part with an object as its result."""

    def __call__(self, x):
        return Output(super().__call__(x))


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_an_object_with_arrays_as_a_result_is_refused(technique):
    model = Model(Wrapping(), lambda part, x: part(x).y)
    technique(model)
    with pytest.raises(ValueError, match=r"Wrapping: expected results that are arrays .* got an object of Output with"):
        model(batch())


class Deciding(Part):
    """A part whose shapes depend on arguments and results of NumPy."""

    def __call__(self, x, size, keep):
        y = super().__call__(x).reshape(size, -1)
        return (y if keep.all() else y[:, keep]), np.array(x.shape)


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_values_of_numpy_may_decide_shapes(technique):
    def use(part, x):
        y, shape = part(x, np.prod(x.shape[:2]), np.arange(WIDTH) > 2)
        return y.reshape(int(shape[0]), -1)

    assert_plain_gradients(lambda: Model(Deciding(), use), technique)


# Functions of modules.


class Random(nnx.Module):
    """A module with a state."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = linear(rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def dropped(module, x):
    """A function of a module, with a name."""
    return module.dropout(checkpoint_name(jnp.tanh(module.linear(x)), "a"))


def test_a_function_of_a_module_changes_its_state():
    found = []
    for function in (dropped, recompute_modules(dropped, ["a"])):
        module = Random()
        step = nnx.jit(nnx.value_and_grad(lambda module, x, function=function: function(module, x).sum()))
        found.append([jax.tree.leaves(step(module, batch())) for _ in range(2)])
        assert module.dropout.rngs.count[...] == 2
    assert found[0][0][0] != found[0][1][0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), *found)


def test_a_function_that_changes_a_module_from_outside_is_refused():
    module = Random()
    with pytest.raises(ValueError, match="expected a function that changes nnx modules among its arguments only"):
        recompute_modules(lambda x: dropped(module, x), ["a"])(batch())


# Programs that JAX keeps.


class Jitted(Part):
    """A part that JAX compiles once."""

    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


def test_a_program_of_another_place_is_not_used():
    """A jitted block is traced without recompute by report, and outside of its block."""
    model = Model(nnx.List([Jitted(), Jitted()]), lambda parts, x: parts[1](parts[0](x)))
    plain = saved_by(model)
    handle = recompute_modules(model, {"": ["part.*.norm"]})
    first = saved_by(model)
    assert first < plain
    before, after = map(sum, zip(*handle.report(batch()).values(), strict=True))
    assert after < before
    assert saved_by(model) == first
    jax.clear_caches()
    model.part[0](batch())
    assert saved_by(model) == first


@jax.checkpoint
def deep(kernel, x):
    """Operations whose author drops what they save."""
    for _ in range(6):
        x = jnp.sin(x @ kernel)
    return x


def _on_a_mesh(kernel, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    specs = PartitionSpec(), PartitionSpec("d")
    return jax.shard_map(deep, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"))(kernel, x)


PLACES = {
    "cond": lambda kernel, x: jax.lax.cond(x.sum() > -1e9, deep, lambda kernel, x: x, kernel, x),
    "switch": lambda kernel, x: jax.lax.switch(jnp.int32(1), [lambda kernel, x: x, deep], kernel, x),
    "shard_map": _on_a_mesh,
}


class Checkpointed(Part):
    """A part with a checkpoint of the user inside of another operation."""

    place = "cond"

    def __call__(self, x):
        return PLACES[self.place](self.linear.kernel[...], self.norm(x))


@pytest.mark.parametrize("technique", ["block", "offload"])
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_inside_of_another_operation_still_drops_its_values(place, technique):
    kind = type("Checkpointed", (Checkpointed,), {"place": place})
    model = Model(kind(), lambda part, x: part(x))
    plain = saved_by(model)
    TECHNIQUES[technique](model)
    assert saved_by(model) <= plain
    assert_plain_gradients(lambda: Model(kind(), lambda part, x: part(x)), TECHNIQUES[technique], compiled=True)


# Transformations.


def test_results_that_are_equal_for_all_samples_of_a_vmap():
    """The count of dropout does not depend on the sample."""
    found = []
    for technique in (lambda model: None, lambda model: recompute_modules(model, {"": ["part.dropout"]})):
        module = Random()
        model = Model(module, nnx.vmap(lambda module, x: module.dropout(module.linear(x)), in_axes=(None, 0)))
        technique(model)
        found.append(nnx.jit(lambda model, x: model(x))(model, batch()))
        assert module.dropout.rngs.count[...] == 1
    np.testing.assert_allclose(*found, rtol=1e-12)


class Scaled(Model):
    """A model with a scale, which its part gets as an argument."""

    def __init__(self, part: nnx.Module, use) -> None:
        super().__init__(part, use)
        self.scale = nnx.Param(jnp.asarray(1.5))

    def __call__(self, x):
        return self.use(self.part, x, self.scale[...])


class Penalised(Part):
    """A part that returns values of its parameters and arguments alone: a penalty and a gate."""

    def __call__(self, x, scale):
        return super().__call__(x) * scale, (self.linear.kernel[...] ** 2).sum(), jnp.sin(scale)


class Counting(Penalised):
    """The same with a running mean of the penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.ones(()))

    def __call__(self, x, scale):
        y, penalty, gate = super().__call__(x, scale)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * penalty
        return y, penalty * self.mean[...], gate


class InCheckpoint(Penalised):
    """The same in a checkpoint of the user."""

    def __call__(self, x, scale):
        def run(kernel, x, scale):
            return jnp.tanh(x @ kernel) * scale, (kernel**2).sum(), jnp.sin(scale)

        return jax.checkpoint(run)(self.linear.kernel[...], x, scale)


class Looping(Penalised):
    """The same in a loop over the rows of a sample."""

    def __call__(self, x, scale):
        @jax.checkpoint
        def values(x):
            return jnp.tanh(x) * scale, scale**2, jnp.sin(scale)

        def row(carry, x):
            y, penalty, gate = values(x)
            return carry + penalty * gate, y * penalty

        carry, y = jax.lax.scan(row, jnp.zeros(()), self.norm(x))
        return y * carry, scale, scale**2


def product(part, x, scale):
    """What a model makes of the values."""
    y, penalty, gate = part(x, scale)
    return y * penalty * gate


def over_samples(part, x, scale):
    """The same for each sample."""
    return jax.vmap(lambda x: product(part, x, scale))(x)


def over_samples_alone(part, x, scale):
    """The same, where the other values are no results for each sample."""
    call = nnx.vmap(lambda part, x, scale: part(x, scale), in_axes=(None, 0, None), out_axes=(0, None, None))
    y, penalty, gate = call(part, x, scale)
    return y * penalty * gate


def over_rows(part, x, scale):
    """The same for each row of each sample."""
    return nnx.vmap(nnx.vmap(product, in_axes=(None, 0, None)), in_axes=(None, 1, None))(part, x, scale)


def over_scales(part, x, scale):
    """The same for each scale."""
    return nnx.vmap(product, in_axes=(None, None, 0))(part, x, scale * jnp.arange(3.0))


MAPS = [
    (Penalised, over_samples),
    (Counting, nnx.vmap(product, in_axes=(None, 0, None))),
    (Counting, over_samples_alone),
    (Counting, over_rows),
    (Penalised, over_scales),
    (InCheckpoint, over_samples),
    (InCheckpoint, over_samples_alone),
    (Looping, over_samples),
]
"""Kinds of parts, and functions that map them, with values that are equal for all samples."""


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize(("kind", "use"), MAPS)
def test_gradients_of_values_that_are_equal_for_all_samples(kind, use, technique):
    """JAX's custom_vjp counts the gradient of such a result once for each sample."""
    found = []
    for apply in (TECHNIQUES[technique], lambda model: None):
        model = Scaled(kind(), use)
        apply(model)
        found.append((gradients(model, compiled=True), model.part.mean[...] if kind is Counting else None))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), *found)


def test_gradients_of_values_of_a_function_that_are_equal_for_all_samples():
    def values(x, scale):
        y, penalty = jax.checkpoint(lambda x, scale: (jnp.tanh(x) * scale, jnp.exp(scale)))(x, scale)
        return checkpoint_name(y * penalty, "y")

    def gradient(values):
        return jax.grad(lambda scale: jax.vmap(lambda x: values(x, scale))(batch()).sum())(1.5)

    np.testing.assert_allclose(gradient(recompute_modules(values, ["y"])), gradient(values), rtol=1e-12)


class Centred(Part):
    """A part that subtracts the mean of the mapped samples."""

    def __call__(self, x):
        return x - jax.lax.pmean(super().__call__(x), "samples")


def test_a_collective_over_the_axis_of_a_vmap_is_refused():
    model = Model(Centred(), lambda part, x: part(x))
    recompute_modules(model, {"": ["part"]})
    graph, state = nnx.split(model)
    with pytest.raises(NotImplementedError, match="without collectives over the axis of a vmap, got one over 'samp"):
        jax.vmap(lambda x: nnx.merge(graph, state)(x), axis_name="samples")(batch())


class Ordered(Part):
    """A part with a callback that keeps its order."""

    def __call__(self, x):
        jax.debug.callback(lambda _: None, x.sum(), ordered=True)
        return super().__call__(x)


@pytest.mark.parametrize("technique", ["chosen", "offload"])
def test_an_ordered_callback_is_refused(technique):
    model = Model(Ordered(), lambda part, x: part(x))
    TECHNIQUES[technique](model)
    with pytest.raises(NotImplementedError, match="expected a submodule without ordered callbacks, got one with"):
        model(batch())


# Parameters in host memory.


class Unread(Part):
    """A part with a bias that it does not read, and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return super().__call__(x) * jax.lax.stop_gradient(self.stopped[...]) + x @ self.linear.kernel[...]


class NotRead(Part):
    """A part that reads a kernel alone."""

    def __call__(self, x):
        return x @ self.linear.kernel[...]


@pytest.mark.parametrize("kind", [Unread, NotRead])
def test_offloaded_parameters_without_gradients(kind):
    assert_plain_gradients(lambda: Model(kind(), lambda part, x: part(x)), TECHNIQUES["offload"])


def on_host(state) -> list[str]:
    """Names of what is in host memory."""
    found = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, x in found if hasattr(x, "sharding") and is_on_host(x)]


@pytest.mark.parametrize("pattern", ["part", ""])
def test_the_first_update_moves_what_a_checkpoint_has_put_on_the_device(pattern):
    """The moments of all parameters of the pattern move, also if it is that of the whole model."""
    model = Model(Part(), lambda part, x: part(x))
    model.linear = linear(rngs=nnx.Rngs(1))  # its name is the end of another's
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    values = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    handle = offload_modules(model, [pattern], optimizer_state=True)
    nnx.update(model, values)
    assert not on_host(nnx.state(model))
    handle.update(optimizer, model, jax.tree.map(jnp.ones_like, values))
    expected = 6 if pattern == "" else 4
    assert len(on_host(nnx.state(model))) == expected
    moments = on_host(nnx.state(optimizer))
    assert len(moments) == 2 * expected, moments

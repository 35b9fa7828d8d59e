"""recompute_modules in JAX: nnx models and functions of any kind, under every transformation of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jax_impl.added_connections import add_hyper_connections
from jax_impl.offload import offload_modules
from jax_impl.recompute import recompute_modules

CHOSEN = {"blocks.*": ["norm", "activation", "dropout", "batch_norm"]}


class Activation(nnx.Module):
    """An activation as a module."""

    def __call__(self, x):
        return nnx.gelu(x)


class Block(nnx.Module):
    """A block with a norm, an activation, dropout and a batch norm."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, rngs=rngs, param_dtype=float)
        self.norm, self.activation = nnx.LayerNorm(width, rngs=rngs, param_dtype=float), Activation()
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(width, rngs=rngs, param_dtype=float, dtype=float)

    def __call__(self, x, scale: float = 1.0, use_residual: bool = True):
        changed = self.down(self.dropout(self.activation(self.up(self.norm(x))))) * scale
        return self.batch_norm(x + changed if use_residual else changed)


class Model(nnx.Module):
    """A few blocks and a head."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, width, rngs=rngs, param_dtype=float)

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x, scale=0.5, use_residual=number > 0)
        return self.head(x)


class Attention(nnx.Module):
    """A pre-norm transformer layer of flax's own modules, as its examples write it."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        settings = {"rngs": rngs, "param_dtype": float, "dtype": float}
        self.norm1, self.norm2 = (nnx.RMSNorm(width, **settings) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=width, decode=False, **settings)
        self.mlp = nnx.Sequential(nnx.Linear(width, 2 * width, **settings), nnx.Linear(2 * width, width, **settings))

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
    """Layers of flax's modules."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Attention(8, rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "blocks": (Model, CHOSEN),
    "whole model": (Model, {"": ["blocks.*.norm", "blocks.*.dropout"]}),
    "flax transformer": (Transformer, {"layers.*": ["norm*", "mlp"]}),
    "flax attention": (Transformer, {"layers.*": ["attention"]}),
}


def batch() -> jax.Array:
    """A batch."""
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 8)))


def loss(model, x):
    """A loss whose cotangents differ."""
    y = model(x)
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()


def results(model, steps: int = 2, transform=nnx.jit):
    """Loss and gradients of some steps, and the state after them."""
    step = transform(nnx.value_and_grad(loss, argnums=(0, 1)))
    found = [step(model, batch()) for _ in range(steps)]
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path((found, nnx.state(model)))
    }


def assert_same(found, expected, tolerance=1e-13):
    """Floating results agree to rounding, all others exactly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if jnp.issubdtype(value.dtype, jnp.floating):
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            assert (found[name] == value).all(), name


def recomputed(name: str = "blocks"):
    """A model with recompute."""
    make, modules = MODELS[name]
    model = make()
    recompute_modules(model, modules)
    return model


def saved_bytes(function, *args) -> int:
    """Bytes of the residuals of a function that are no argument."""
    program = jax.make_jaxpr(lambda *args: jax.vjp(function, *args)[1])(*args).jaxpr
    residuals = {v for v in program.outvars if not isinstance(v, Literal)} - {*program.invars, *program.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in residuals)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_gradients_and_saves_less(name):
    make, modules = MODELS[name]
    plain, other = make(), make()
    structure = jax.tree.structure(nnx.state(other))
    handle = recompute_modules(other, modules)
    assert_same(results(other), results(plain))
    assert jax.tree.structure(nnx.state(other)) == structure
    report = handle.report(batch())
    before, after = (sum(each[i] for each in report.values()) for i in (0, 1))
    graph, params, rest = nnx.split(other, nnx.Param, ...)

    def forward(params):
        return nnx.merge(graph, params, rest, copy=True)(batch())

    inner = saved_bytes(forward, params)
    assert after == pytest.approx(inner, rel=0.02)
    assert after < before
    dropped = [name for name in report if any(name == f"{b}.{p}".lstrip(".") for b, ps in modules.items() for p in ps)]
    assert all(report[name].after < report[name].before for name in dropped)
    handle.remove()
    handle.remove()
    assert type(other) is make
    assert nnx.graphdef(other) == nnx.graphdef(plain)
    assert_same(results(other), results(plain))
    with pytest.raises(ValueError, match="got removed recompute; call report before remove"):
        handle.report(batch())


def test_every_dropped_output_is_gone():
    """Only the results of the blocks stay of the chosen submodules."""
    other = Model()
    report = recompute_modules(other, {"blocks.*": ["norm", "activation", "dropout"]}).report(batch())
    chosen = {name: each.after for name, each in report.items() if name not in ("", "blocks.*")}
    assert chosen == {"blocks.*.norm": 0, "blocks.*.activation": 0, "blocks.*.dropout": 0}


def eager(step):
    """Without jit."""
    return step


def remat_outside(step):
    """The whole step's forward in jax.checkpoint."""
    return nnx.jit(nnx.value_and_grad(nnx.remat(loss), argnums=(0, 1)))


def vmapped(step):
    """Over an axis of one model and several batches."""

    def run(model, x):
        graph, state = nnx.split(model)
        outer = jnp.stack([x, x])

        def one(x):
            inner = nnx.merge(graph, state, copy=True)
            return nnx.value_and_grad(loss, argnums=(0, 1))(inner, x)

        found = jax.vmap(one)(outer)
        return jax.tree.map(lambda leaf: leaf[1], found)

    return run


def sharded(step):
    """In jax.shard_map on a mesh of one device."""

    def run(model, x):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        graph, state = nnx.split(model)

        def one(state, x):
            found = nnx.value_and_grad(loss, argnums=(0, 1))(nnx.merge(graph, state, copy=True), x)
            return jax.tree.map(lambda leaf: leaf[None], found)

        mapped = jax.shard_map(one, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"), check_vma=False)
        return jax.tree.map(lambda leaf: leaf[0], jax.jit(mapped)(state, x))

    return run


def in_pmap(step):
    """In jax.pmap on one device."""

    def run(model, x):
        graph, state = nnx.split(model)

        def one(x):
            return nnx.value_and_grad(loss, argnums=(0, 1))(nnx.merge(graph, state, copy=True), x)

        return jax.tree.map(lambda leaf: leaf[0], jax.pmap(one)(x[None]))

    return run


def donating(step):
    """With the batch's memory given away."""

    def run(model, x):
        graph, state = nnx.split(model)

        def one(x):
            return nnx.value_and_grad(loss, argnums=(0, 1))(nnx.merge(graph, state, copy=True), x)

        return jax.jit(one, donate_argnums=0)(x.copy())

    return run


TRANSFORMS = {
    "eager": eager,
    "remat outside": remat_outside,
    "vmap": vmapped,
    "shard_map": sharded,
    "pmap": in_pmap,
    "donation": donating,
}


@pytest.mark.filterwarnings("ignore:Some donated buffers:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations(name):
    steps = 1 if name in ("eager", "vmap") else 2
    assert_same(results(recomputed(), steps, TRANSFORMS[name]), results(Model(), steps, TRANSFORMS[name]))


def test_remat_inside():
    class Checkpointed(Activation):
        def __call__(self, x):
            return jax.checkpoint(nnx.gelu)(x)

    models = [Model(), Model()]
    for model in models:
        for block in model.blocks:
            block.activation = Checkpointed()
    recompute_modules(models[1], CHOSEN)
    assert_same(results(models[1]), results(models[0]))


def test_layers_in_a_scan():
    """One block, whose parameters have a leading axis of layers."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Block(8, rngs)

    class Scanned(nnx.Module):
        def __init__(self) -> None:
            self.blocks = make(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)

    plain, other = Scanned(), Scanned()
    handle = recompute_modules(other, {"blocks": ["norm", "activation", "dropout"]})
    assert_same(results(other), results(plain))
    report = handle.report(batch())
    assert sum(each.after for each in report.values()) < sum(each.before for each in report.values())


@pytest.mark.parametrize(("chosen", "tolerance"), [("mlp", 1e-12), ("norm*", 1e-4)])  # norms of flax are in float32
def test_second_derivatives(chosen, tolerance):
    plain, other = Transformer(), Transformer()
    recompute_modules(other, {"layers.*": [chosen]})

    def curvature(model):
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: loss(model, x))(x)).sum())(batch())

    np.testing.assert_allclose(curvature(other), curvature(plain), rtol=tolerance, atol=tolerance)


def test_forward_mode_is_refused_by_name():
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(recomputed("flax transformer"), (batch(),), (batch(),))


class Counts(nnx.Module):
    """A module that counts its calls in an attribute of Python."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = nnx.Param(jnp.ones(8))
        self.table = jnp.full((8,), 2.0)

    def __call__(self, x, counts=True, keeps=False):
        if counts:
            self.calls += 1
        if keeps:
            self.mean = nnx.Intermediate(x.mean())
        return x * self.weight[...] * self.table * (1 + self.calls)


class Around(nnx.Module):
    """A module around another one."""

    def __init__(self, part: nnx.Module) -> None:
        self.part = part

    def __call__(self, x, **options):
        return self.part(x, **options)


@pytest.mark.parametrize("technique", ["recompute", "offload"])
def test_attributes_that_a_call_changes_are_refused(technique):
    """Their change would be lost without a word. Arrays that are attributes are state like Variables."""
    model = Around(Counts())
    if technique == "recompute":
        recompute_modules(model, {"": ["part"]})
    else:
        offload_modules(model, ["part"])
    assert jnp.array_equal(model(batch(), counts=False), 2.0 * batch())
    for options in ({}, {"counts": False, "keeps": True}):
        with pytest.raises(ValueError, match="Counts: expected a call that changes the values of Variables only"):
            model(batch(), **options)


# functions


def layer(params, x):
    """A function in the style of equinox: a pytree of parameters, and names of the author's own."""
    h = checkpoint_name(x @ params["up"], "up")
    h = checkpoint_name(jax.nn.gelu(h), "gelu")
    return checkpoint_name(h @ params["down"], "down") + x


def parameters():
    """Parameters of layer."""
    draw = np.random.default_rng(0).standard_normal
    return {"up": jnp.asarray(draw((8, 32))), "down": jnp.asarray(draw((32, 8)))}


@pytest.mark.parametrize("function", [layer, jax.jit(layer)], ids=["plain", "jitted"])
def test_named_values_of_a_function_are_dropped(function):
    def whole(function, params, x):
        return jnp.sin(function(params, function(params, x))).sum()

    plain = partial(whole, function)
    other = partial(whole, recompute_modules(function, ["gelu", "u*"]))
    args = parameters(), batch()
    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(*args) for f in (other, plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, expected)
    tokens = batch().size // 8
    wide = tokens * 32 * 8  # bytes of one value of the inner width
    assert saved_bytes(other, *args) <= saved_bytes(plain, *args) - 4 * wide


def test_a_value_is_dropped_with_what_it_alone_is_made_from():
    """A norm and a SwiGLU leave two products of the inner width. What another operation reads too stays."""

    def swiglu(params, x, shared):
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        h = checkpoint_name(scaled * params["scale"], "norm")
        gate = jax.nn.sigmoid(h @ params["gate"])
        act = checkpoint_name(gate * (h @ params["up"]), "act")
        return (act @ params["down"] * (gate @ params["down"] if shared else 1.0)).sum()

    draw = np.random.default_rng(0).standard_normal
    shapes = {"scale": (8,), "gate": (8, 32), "up": (8, 32), "down": (32, 8)}
    params = {name: jnp.asarray(draw(shape)) for name, shape in shapes.items()}
    wide = batch().size // 8 * 32 * 8  # bytes of one value of the inner width
    for shared, size in ((False, 2 * wide), (True, 3 * wide + 2 * wide // 4)):
        plain = partial(swiglu, shared=shared)
        other = recompute_modules(plain, ["norm", "act"])
        found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, batch()) for f in (other, plain))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), found, expected)
        assert saved_bytes(other, params, batch()) == size


def test_complex_values_do_not_keep_a_compiled_checkpoint_from_working():
    """They are computed again: JAX cannot save them where a policy decides."""

    def function(x):
        spectrum = jnp.fft.fft(checkpoint_name(jnp.sin(x), "sine"))
        return jnp.abs(spectrum * jax.lax.complex(jnp.cos(x), x) + 1j * jnp.square(spectrum)).sum()

    x = jnp.linspace(0.1, 1, 12).reshape(3, 4)
    found = jax.jit(jax.value_and_grad(recompute_modules(function, ["sine"])))(x)
    for one, other in zip(found, jax.value_and_grad(function)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


class Labels(nnx.Module):
    """A module that also returns a text, a number and None."""

    def __call__(self, x, scale):
        return {"out": jnp.sin(x) * scale, "label": "sine", "count": 3, "nothing": None}


class Labelled(nnx.Module):
    def __init__(self) -> None:
        self.part = Labels()

    def __call__(self, x):
        found = self.part(x, scale=2)
        assert (found["label"], found["count"], found["nothing"]) == ("sine", 3, None)
        return found["out"] * found["count"], found["label"]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_results_that_are_no_arrays_are_passed_on(transform):
    model, x = Labelled(), jnp.linspace(0.1, 1, 12)
    recompute_modules(model, {"": ["part"]})
    function = recompute_modules(lambda x: (checkpoint_name(jnp.sin(x), "a") * 6, "sine"), ["a"])
    for call in (model, function):
        assert call(x)[1] == "sine"
        gradient = transform(jax.grad(lambda x, call=call: call(x)[0].sum()))(x)
        np.testing.assert_allclose(gradient, 6 * jnp.cos(x), rtol=1e-15)


class Checkpointed(nnx.Module):
    """A block, of which a part runs in jax.checkpoint, alone or in a loop."""

    def __init__(self, count: int) -> None:
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0), param_dtype=float)
        self.weight = nnx.Param(jax.random.normal(jax.random.key(0), (8, 64)) / 4)
        self.count = count

    def __call__(self, x):
        @jax.checkpoint  # pyright: ignore[reportPrivateImportUsage]
        def mlp(x, weight):
            return x + jnp.sin(jnp.sin(x @ weight) ** 2) @ weight.T

        x = self.norm(x)
        if self.count == 1:
            return jax.jit(mlp)(x, self.weight[...])
        return jax.lax.scan(lambda x, _: (mlp(x, self.weight[...]), None), x, None, self.count)[0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("technique", ["recompute", "offload"])
def test_a_checkpoint_of_the_user_still_drops_its_values(technique, count):
    plain, model = (nnx.Sequential(Checkpointed(count)) for _ in range(2))
    if technique == "recompute":
        recompute_modules(model, {"layers.0": ["norm"]})
    else:
        offload_modules(model, ["layers.0"])
    x = jnp.linspace(-1, 1, 5 * 8).reshape(5, 8)
    graph, params = nnx.split(model)
    run = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    assert saved_bytes(run, params, x) <= (5 + count) * 8 * x.size, "of width 8 only, none of width 64"
    found = jax.jit(jax.grad(lambda params, x: (run(params, x) ** 2).sum()))(params, x)
    wanted = nnx.grad(lambda model, x: (model(x) ** 2).sum())(plain, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_a_result_of_the_function_is_not_dropped():
    def both(x):
        h = jnp.tanh(x)
        return h, checkpoint_name(h * x, "product")

    jax.tree.map(np.testing.assert_array_equal, recompute_modules(both, ["product"])(batch()), both(batch()))


def test_linen_modules_are_functions():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(8)(checkpoint_name(linen.gelu(linen.Dense(32)(x)), "gelu"))

    module = Dense()
    variables = module.init(jax.random.key(0), batch())

    def plain(variables, x):
        return module.apply(variables, x)

    other = recompute_modules(plain, ["gelu"])
    grad = [jax.grad(lambda v, f=f: jnp.sin(f(v, batch())).sum())(variables) for f in (plain, other)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), *grad)
    with pytest.raises(TypeError, match="pass a linen module as lambda variables, x"):
        recompute_modules(module, ["gelu"])


MISTAKES = [
    (Model, {}, ValueError, "expected at least one pattern, got none"),
    (Model, ["blocks.*"], TypeError, "expected a mapping from patterns of blocks"),
    (Model, {"block.*": ["norm"]}, ValueError, r"'block\.\*', which matches none of blocks"),
    (Model, {"blocks.*": ["nrm"]}, ValueError, "'nrm', which matches none of norm"),
    (Model, {"": ["blocks.0", "blocks.*.norm"]}, ValueError, r"got blocks\.0 and blocks\.0\.norm inside it"),
    (lambda: layer, "gelu", TypeError, "expected a list of patterns of checkpoint names for a function, got 'gelu'"),
    (lambda: layer, [], ValueError, "expected at least one pattern, got none"),
    (lambda: 3, ["gelu"], TypeError, "expected an nnx.Module or a function, got int"),
]


@pytest.mark.parametrize(("make", "modules", "kind", "message"), MISTAKES)
def test_mistakes_are_named(make, modules, kind, message):
    with pytest.raises(kind, match=message):
        recompute_modules(make(), modules)


def test_names_that_cannot_be_dropped_are_named():
    args = parameters(), batch()
    with pytest.raises(ValueError, match="got 'relu', which matches none of down, gelu, up"):
        recompute_modules(layer, ["gelu", "relu"])(*args)
    with pytest.raises(ValueError, match=r"since there are none: use jax\.ad_checkpoint\.checkpoint_name"):
        recompute_modules(jnp.sin, ["gelu"])(args[1])

    def scanned(params, x):
        return jax.lax.scan(lambda x, _: (layer(params, x), None), x, None, 3)[0]

    def repeated(params, x):
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: layer(params, x), x)

    def chosen(params, x):
        return jax.lax.cond(x.sum() > 0, layer, layer, params, x)

    for function, name in ((scanned, "scan"), (repeated, "while"), (chosen, "cond")):
        with pytest.raises(NotImplementedError, match=f"expected names outside of {name}, got one inside it"):
            recompute_modules(function, ["gelu"])(*args)


def test_a_second_recompute_is_refused():
    model = recomputed()
    with pytest.raises(ValueError, match=r"got blocks\.0, which has it; remove\(\) it first"):
        recompute_modules(model, CHOSEN)


def test_recompute_under_later_hyper_connections_is_not_removed():
    model = nnx.Sequential(*(Attention(8, nnx.Rngs(n)) for n in range(2)))
    x = jnp.ones((2, 3, 8))
    before = model(x)
    recompute = recompute_modules(model, {"layers.*": ["norm1"]})
    connections = add_hyper_connections(model, ["layers.*"], num_residual_streams=2)
    with pytest.raises(ValueError, match=r"remove: expected the class of recompute_modules in 'layers\.0', got"):
        recompute.remove()
    connections.remove()
    recompute.remove()
    assert jnp.array_equal(model(x), before)


def test_a_submodule_that_reads_a_surrounding_array_is_named():
    from jax_impl.recompute.opaque_call import opaque_call

    def outer(x):
        return opaque_call(lambda y: y * x, x).sum()

    with pytest.raises(NotImplementedError, match="got one that reads an array of a surrounding transformation"):
        jax.make_jaxpr(outer)(batch())

"""Features of PyTorch and Flax that locate supports or refuses: each in an equal pair and in one with a bug."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from parity import locate

WIDTH = 4
X = np.random.default_rng(0).standard_normal((3, 5, WIDTH))


def linear(width=WIDTH):
    return nnx.Linear(WIDTH, width, rngs=nnx.Rngs(0))


class Larger(nnx.Linear):
    """A linear layer with a bug."""

    def __call__(self, x):
        return super().__call__(x) * 1.001


class LargerConvolution(nnx.Conv):
    """A convolution with a bug."""

    def __call__(self, x):
        return super().__call__(x) * 1.001


class Stopped(nnx.Linear):
    """A linear layer that passes no gradient to its input."""

    def __call__(self, x):
        return super().__call__(jax.lax.stop_gradient(x))


def faulty(layer):
    layer.__class__ = LargerConvolution if isinstance(layer, nnx.Conv) else Larger
    return layer


class TorchParts(nn.Module):
    """Named submodules, and a function that calls them."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.call(self, *inputs)


class JaxParts(nnx.Module):
    def __init__(self, call, **parts):
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *inputs):
        return self.call(self, *inputs)


def in_place():
    """ReLU and addition change the output of the layer before them."""

    def call(m, x):
        hidden = m.first(x)
        hidden += 1.0
        return m.second(m.act(hidden))

    first = TorchParts(call, first=nn.Linear(4, 4), act=nn.ReLU(inplace=True), second=nn.Linear(4, 4))
    second = JaxParts(lambda m, x: m.second(nnx.relu(m.first(x) + 1.0)), first=linear(), second=linear())
    return first, second, [X], "second"


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x.mul_(2.0)
        return self.layer(x)


def input_changed_in_place():
    call = lambda m, x: m.layer(2.0 * x)  # noqa: E731
    first = TorchParts(
        lambda m, x: m.second(m.inner(m.first(x))), first=nn.Linear(4, 4), inner=AddsInPlace(), second=nn.Linear(4, 4)
    )
    inner = JaxParts(call, layer=linear())
    second = JaxParts(lambda m, x: m.second(m.inner(m.first(x))), first=linear(), inner=inner, second=linear())
    return first, second, [X], "inner.layer"


def input_of_the_model_changed_in_place():
    return AddsInPlace(), JaxParts(lambda m, x: m.layer(2.0 * x), layer=linear()), [X], "layer"


def called_twice():
    first = TorchParts(lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    second = JaxParts(lambda m, x: m.b(jnp.tanh(m.a(jnp.tanh(m.a(x))))), a=linear(), b=linear())
    return first, second, [X], "a"


def shared_by_two_parents():
    """A layer that belongs to one module and that another one calls."""
    layer, table = nn.Linear(4, 4), linear()
    inner = TorchParts(lambda m, x: torch.tanh(m.mine(m.shared(x))), mine=nn.Linear(4, 4), shared=layer)
    other = JaxParts(lambda m, x: jnp.tanh(m.mine(m.shared(x))), mine=linear(), shared=table)
    first = TorchParts(lambda m, x: m.inner(x) + m.layer(x), layer=layer, inner=inner)
    second = JaxParts(lambda m, x: m.inner(x) + m.layer(x), layer=table, inner=other)
    names = {"layer.weight": {"to": "inner.shared.kernel", "transpose": True}, "layer.bias": "inner.shared.bias"}
    names |= {"inner.mine.weight": {"to": "inner.mine.kernel", "transpose": True}, "inner.mine.bias": "inner.mine.bias"}
    return first, second, [X], "inner.mine", {"names": names}


TOKENS = np.random.default_rng(1).integers(0, 7, (3, 5))


class JaxTied(nnx.Module):
    """The output layer has the parameter of the embedding under a second name."""

    def __init__(self):
        self.emb = nnx.Embed(7, 4, rngs=nnx.Rngs(0))
        self.mid = linear()
        self.out = TiedOutput(self.emb.embedding)

    def __call__(self, tokens):
        return self.out(self.mid(self.emb(tokens)))


class TiedOutput(nnx.Module):
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight[...].T


def tied_parameters(target="mid"):
    def call(m, tokens):
        return m.out(m.mid(m.emb(tokens)))

    first = TorchParts(call, emb=nn.Embedding(7, 4), mid=nn.Linear(4, 4), out=nn.Linear(4, 7, bias=False))
    first.out.weight = first.emb.weight
    return first, JaxTied(), [TOKENS], target


def attention(torch_call, jax_call):
    first = TorchParts(
        lambda m, x: m.out(m.attn(m.qkv(x))), qkv=nn.Linear(4, 12), attn=TorchParts(torch_call), out=nn.Linear(4, 4)
    )
    second = JaxParts(lambda m, x: m.out(m.attn(m.qkv(x))), qkv=linear(12), attn=JaxParts(jax_call), out=linear())
    return first, second, [X], "out"


def several_outputs():
    """A cell one of whose outputs depends on the other."""
    cell = TorchParts(lambda m, x, c: (torch.tanh(m.l(x) + c), m.l(x) * c), l=nn.Linear(4, 4))
    other = JaxParts(lambda m, x, c: (jnp.tanh(m.l(x) + c), m.l(x) * c), l=linear())

    def ours(m, x):
        h, c = m.outer(x, x)
        h, c = m.outer(h, c)
        return m.out(h)

    def dependent(m, x, c):
        c = m.cell(x, c)[1]
        return m.cell(c, x)[0] * c, c

    first = TorchParts(ours, outer=TorchParts(dependent, cell=cell), out=nn.Linear(4, 4))
    second = JaxParts(ours, outer=JaxParts(dependent, cell=other), out=linear())
    return first, second, [X], "outer.cell.l"


def channels_first():
    """Convolutions with channels first in PyTorch and last in JAX; here all axes have equal sizes."""
    images = np.random.default_rng(2).standard_normal((2, 4, 4, 4))

    def ours(m, x):
        return m.out(m.b(torch.tanh(m.a(x.permute(0, 3, 1, 2)))).permute(0, 2, 3, 1))

    def conv():
        return nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0))

    first = TorchParts(ours, a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 3, padding=1), out=nn.Linear(4, 4))
    second = JaxParts(lambda m, x: m.out(m.b(jnp.tanh(m.a(x)))), a=conv(), b=conv(), out=linear())
    names = {f"{name}.weight": {"to": f"{name}.kernel", "transpose": [2, 3, 1, 0]} for name in "ab"}
    names |= {"a.bias": "a.bias", "b.bias": "b.bias", "out.weight": {"to": "out.kernel", "transpose": True}}
    return first, second, [images], "b", {"names": names}


def functional_attention():
    def ours(m, x):
        q, k, v = x.unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def theirs(m, x):
        q, k, v = jnp.moveaxis(x.reshape(*x.shape[:2], 3, 2, 2), 2, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape[0], x.shape[1], 4)

    # jax.nn.dot_product_attention computes its softmax in float32.
    return *attention(ours, theirs), {"precision": "float32"}


def containers():
    """ModuleDict, ParameterList, nnx.Dict with a number as key, and a dictionary of arrays."""
    first = TorchParts(
        lambda m, x: m.layers["b"](m.layers["0"](x) * m.scales[0]) * m.scales[1],
        layers=nn.ModuleDict({"0": nn.Linear(4, 4), "b": nn.Linear(4, 4)}),
        scales=nn.ParameterList([nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))]),
    )
    second = JaxParts(
        lambda m, x: m.layers["b"](m.layers["0"](x) * m.scales[0][...]) * m.scales[1][...],
        layers=nnx.Dict({"0": linear(), "b": linear()}),
        scales=nnx.List([nnx.Param(jnp.ones(4)), nnx.Param(jnp.ones(4))]),
    )
    return first, second, [X], "layers.b"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pieces:
    left: object
    right: object


def structured_outputs():
    """Submodules that return tuples with None, dictionaries, and dataclasses, and receive them."""

    def call(m, x):
        one, _, two = m.a(x)
        pieces = m.b({"one": one, "two": two})
        return m.c(pieces)["y"]

    first = TorchParts(
        call,
        a=TorchParts(lambda m, x: (m.l(x), None, x), l=nn.Linear(4, 4)),
        b=TorchParts(lambda m, parts: Pieces(m.l(parts["one"]), parts["two"]), l=nn.Linear(4, 4)),
        c=TorchParts(lambda m, p: {"y": m.l(p.left) * p.right, "size": 3}, l=nn.Linear(4, 4)),
    )
    second = JaxParts(
        call,
        a=JaxParts(lambda m, x: (m.l(x), None, x), l=linear()),
        b=JaxParts(lambda m, parts: Pieces(m.l(parts["one"]), parts["two"]), l=linear()),
        c=JaxParts(lambda m, p: {"y": m.l(p.left) * p.right, "size": 3}, l=linear()),
    )
    return first, second, [X], "b.l"


class TorchMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, first, second, index=None, *, scale=1.0):
        return self.layer(first) - scale * second[:, index]


class JaxMix(nnx.Module):
    def __init__(self):
        self.layer = linear()

    def __call__(self, second, first, index=None, scale=1.0):
        return self.layer(first) - scale * second[:, index]


def keyword_inputs():
    """Arguments of equal shape by keyword in one framework and by position, in another order, in the other."""
    order = np.array([1, 0, 2, 4, 3])
    first = TorchParts(lambda m, x, i: m.mix(x, index=i, second=x * 2.0, scale=0.5), mix=TorchMix())
    second = JaxParts(lambda m, x, i: m.mix(x * 2.0, x, i, scale=0.5), mix=JaxMix())
    return first, second, [X, order], "mix.layer"


def without_gradient():
    def call(m, x):
        with torch.no_grad():
            frozen = m.frozen(x)
        return m.out(frozen + x)

    first = TorchParts(call, frozen=nn.Linear(4, 4), out=nn.Linear(4, 4))
    second = JaxParts(lambda m, x: m.out(jax.lax.stop_gradient(m.frozen(x)) + x), frozen=linear(), out=linear())
    return first, second, [X], "frozen"


def forward_called_directly():
    first = TorchParts(lambda m, x: m.b(m.a.forward(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    return first, JaxParts(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()), [X], "a"


class Base(nnx.Module):
    """A base class whose __call__ its subclasses inherit."""

    def __init__(self):
        self.inner = linear()

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class Derived(Base):
    def __call__(self, x):
        return super().__call__(x)


class Inherited(Base):
    pass


def inherited_calls():
    def block():
        return TorchParts(lambda m, x: torch.tanh(m.inner(x)), inner=nn.Linear(4, 4))

    first = TorchParts(lambda m, x: m.b(m.a(m.b(m.a(x)))), a=block(), b=block())
    second = JaxParts(lambda m, x: m.b(m.a(m.b(m.a(x)))), a=Derived(), b=Inherited())
    return first, second, [X], "b.inner"


def sequential():
    first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return first, nnx.Sequential(linear(), jnp.tanh, linear()), [X], "2"


def checkpointed():
    """PyTorch runs a checkpointed submodule again in backward."""
    from torch.utils.checkpoint import checkpoint

    first = TorchParts(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    return first, JaxParts(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()), [X], "a"


SUPPORTED = [
    in_place,
    input_changed_in_place,
    input_of_the_model_changed_in_place,
    called_twice,
    shared_by_two_parents,
    tied_parameters,
    several_outputs,
    channels_first,
    functional_attention,
    containers,
    structured_outputs,
    keyword_inputs,
    without_gradient,
    forward_called_directly,
    inherited_calls,
    sequential,
    checkpointed,
]


def jax_path(path):
    return ["layers", path] if path == "2" else path.split(".")


@pytest.mark.parametrize("feature", SUPPORTED, ids=lambda f: f.__name__)
def test_a_supported_feature(feature):
    torch.manual_seed(0)
    first, second, inputs, target, *rest = feature()
    options = rest[0] if rest else {}
    found = locate(first, second, inputs, **options)
    assert found.is_equal, found
    assert not any(entry.forward_differs or entry.backward_differs for entry in found.points), found
    assert target in {entry.point.path for entry in found.points}
    assert not found.notes
    node = second
    for part in jax_path(target):
        node = (
            node[int(part)]
            if part.isdigit() and isinstance(node, nnx.List)
            else (node[part] if isinstance(node, nnx.Dict) else getattr(node, part))
        )
    faulty(node)
    found = locate(first, second, inputs, **options)
    assert (found.point and found.point.path, found.direction, found.notes) == (target, "forward", ()), found


class JaxTransformed(nnx.Module):
    """A submodule inside a transformation, between two that are not."""

    def __init__(self, run, middle):
        self.a, self.b, self.c, self.run = linear(), middle, linear(), run

    def __call__(self, x):
        return self.c(self.run(self.b, self.a(x)))


def scanned(layers, x):
    return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


def stack():
    return nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(params=key)))(jax.random.split(jax.random.key(0), 2))


class TorchStack(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


STACKED = {f"b.layers.*.{a}": {"to": f"b.{b}", "stack": 0, **more} for a, b, more in (
    ("weight", "kernel", {"transpose": True}), ("bias", "bias", {}))} | {
    f"{m}.weight": {"to": f"{m}.kernel", "transpose": True} for m in "ac"}  # fmt: skip
TRANSFORMED = {
    "jit": (nnx.jit(lambda layer, x: layer(x)), linear, lambda: nn.Linear(4, 4), None),
    "remat": (nnx.remat(lambda layer, x: layer(x)), linear, lambda: nn.Linear(4, 4), None),
    "checkpoint": (lambda layer, x: jax.checkpoint(layer)(x), linear, lambda: nn.Linear(4, 4), None),
    "scan": (scanned, stack, TorchStack, STACKED),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_submodules_inside_a_transformation_are_named(name):
    run, middle, other, names = TRANSFORMED[name]
    torch.manual_seed(0)
    first = TorchParts(lambda m, x: m.c(m.b(m.a(x))), a=nn.Linear(4, 4), b=other(), c=nn.Linear(4, 4))
    second = JaxTransformed(run, middle())
    found = locate(first, second, [X], names=names)
    assert found.is_equal
    (note,) = found.notes
    assert note.startswith("Not recorded: b of JAX. They are not called, or through another method")
    faulty(second.b)
    found = locate(first, second, [X], names=names)
    assert (found.point.path, found.between) == ("", ("a", "c"))


def test_submodules_whose_parameters_are_used_directly_are_named():
    first = nn.MultiheadAttention(4, 2, batch_first=True)
    second = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    model = TorchParts(lambda m, x: m.attn(x, x, x, need_weights=False)[0], attn=first)
    other = JaxParts(lambda m, x: m.attn(x), attn=second)
    names = {
        "attn.in_proj_weight": {
            "to": [f"attn.{n}.kernel" for n in ("query", "key", "value")],
            "transpose": True,
            "split": 1,
            "reshape": [4, 2, 2],
        },
        "attn.in_proj_bias": {"to": [f"attn.{n}.bias" for n in ("query", "key", "value")], "reshape": [2, 2]},
        "attn.out_proj.weight": {"to": "attn.out.kernel", "transpose": True, "reshape": [2, 2, 4]},
        "attn.out_proj.bias": "attn.out.bias",
    }
    found = locate(model, other, [X], names=names)
    assert re.match("JAX computes in a narrower dtype inside .float32.*pass precision='float32'", found.notes[0])
    found = locate(model, other, [X], names=names, precision="float32")
    assert found.is_equal
    assert any(note.startswith("Not recorded: attn.out_proj of PyTorch. They are not called") for note in found.notes)
    assert any(note.startswith("Not judged: parameter gradient 'attn.key.bias'") for note in found.notes)
    faulty_scale(second)
    assert locate(model, other, [X], names=names, precision="float32").point.path == "attn"
    with pytest.raises(ValueError, match="precision: expected one of bfloat16, float32, float64, got 'half'"):
        locate(model, other, [X], names=names, precision="half")


def faulty_scale(attention):
    attention.attention_fn = lambda q, *rest, **more: nnx.dot_product_attention(2.0 * q, *rest, **more)


def test_a_tied_parameter_has_the_value_of_the_whole_model():
    """The output layer is compared by itself before the bug is, with the parameter of the embedding."""
    torch.manual_seed(0)
    first, second, inputs, _ = tied_parameters()
    second.mid.__class__ = Stopped
    found = locate(first, second, inputs)
    assert (found.point.path, found.direction) == ("mid", "backward"), found
    tied = dict(first.named_parameters())["emb.weight"]
    assert not np.allclose(tied.detach(), second.emb.embedding[...])


class TorchOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.own


def test_dropout_is_refused_by_name():
    first = TorchParts(lambda m, x: m.drop(m.a(x)), a=nn.Linear(4, 4), drop=nn.Dropout(0.1))
    second = JaxParts(lambda m, x: m.drop(m.a(x)), a=linear(), drop=nnx.Dropout(0.1, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"expected it to be off, got it on in drop of PyTorch, drop of JAX; call ev"):
        locate(first, second, [X])
    first.eval()
    with pytest.raises(ValueError, match="got it on in drop of JAX"):
        locate(first, second, [X])
    second.eval()
    assert locate(first, second, [X]).is_equal


def test_parameters_that_are_tied_in_one_framework_only_are_refused():
    first = TorchParts(lambda m, t: m.out(m.emb(t)), emb=nn.Embedding(7, 4), out=nn.Linear(4, 7, bias=False))
    first.out.weight = first.emb.weight
    embedding, out = nnx.Embed(7, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 7, use_bias=False, rngs=nnx.Rngs(0))
    second = JaxParts(lambda m, t: m.out(m.emb(t)), emb=embedding, out=out)
    with pytest.raises(ValueError, match=r"counterpart for every parameter, got none for out\.kernel of JAX"):
        locate(first, second, [TOKENS], names={"emb.weight": "emb.embedding"})


@pytest.mark.parametrize("limit", [0, 3000])
def test_a_recording_on_disk(limit, monkeypatch):
    import tempfile
    from pathlib import Path

    import parity.array_store

    folders = []
    original = tempfile.TemporaryDirectory

    def recorded(**options):
        folders.append(original(**options))
        return folders[-1]

    monkeypatch.setattr(parity.array_store.tempfile, "TemporaryDirectory", recorded)
    monkeypatch.setattr(parity.array_store, "SEGMENT_BYTES", 1000)
    stores = []
    leave = parity.array_store.ArrayStore.__exit__
    monkeypatch.setattr(parity.array_store.ArrayStore, "__exit__", lambda s, *e: (stores.append(s), leave(s, *e))[1])
    torch.manual_seed(0)
    first, second, inputs, _ = called_twice()
    faulty(second.b)
    expected = locate(first, second, inputs)
    found = locate(first, second, inputs, memory_limit=limit)
    assert found.to_json() == expected.to_json()
    assert found.point.path == "b"
    assert stores[0].bytes_on_disk == 0
    assert stores[1].bytes == stores[0].bytes > 6000
    assert stores[1].bytes_on_disk >= stores[1].bytes - limit
    with monkeypatch.context() as patch:
        patch.setattr("parity.location.align_modules", partial(_failing, folders))
        with pytest.raises(KeyError, match="stopped"):
            locate(first, second, inputs, memory_limit=limit)
    assert len(folders) == 3
    assert not any(Path(folder.name).exists() for folder in folders)


def _failing(folders, *_):
    from pathlib import Path

    assert list(Path(folders[-1].name).iterdir())
    raise KeyError("stopped")

"""add_hyper_connections in models of others, in both frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from jax_impl.added_connections import add_hyper_connections as add_in_jax
from parity import compare_modules
from reference_torch.added_connections import add_hyper_connections as add_in_torch
from reference_torch.recompute import recompute_modules
from tests.everywhere.torch_models import MODELS, build

WIDTH, DEPTH = 8, 3
BLOCKS = {"Llama": "model.layers.*", "GPT-2": "transformer.h.*", "Qwen3.5": "model.layers.*", "ViT": "vit.layers.*"}


class TorchBlock(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class TorchModel(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(DEPTH)).double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class JaxBlock(nnx.Module):
    """The same block."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, param_dtype=float, epsilon=1e-5, use_fast_variance=False)
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs, param_dtype=float)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs, param_dtype=float)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class JaxModel(nnx.Module):
    """The same model."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([JaxBlock(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> np.ndarray:
    """A batch."""
    return np.random.default_rng(1).standard_normal((2, 5, WIDTH))


@pytest.mark.parametrize("name", BLOCKS)
def test_models_of_others_compute_what_they_did(name):
    """With equal streams, h_pre = 1 / S, h_post = 1 and a doubly stochastic h_res. Needs no code of this project."""
    model = build(name).double().eval()
    inputs = {key: t.double() if t.is_floating_point() else t for key, t in MODELS[name].inputs().items()}
    expected = model(**inputs).logits
    names = {key for key, _ in model.named_parameters()}
    handle = add_in_torch(model, [BLOCKS[name]])
    found = model(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    added = {key for key, _ in model.named_parameters()} - names
    assert added == {f"{block}.hyper_connection.{p}" for block in handle.connections for p in ("phi", "alpha", "bias")}
    found.square().mean().backward()
    assert all(c.bias.grad.abs().max() > 0 for c in handle.connections.values())
    handle.remove()
    handle.remove()
    assert torch.equal(model(**inputs).logits, expected)
    assert {key for key, _ in model.named_parameters()} == names


@pytest.mark.parametrize("keep_function", [True, False])
def test_both_frameworks_agree_with_any_coefficients(keep_function):
    torch_model, jax_model = TorchModel(), JaxModel()
    settings = {"num_residual_streams": 3, "sinkhorn_iterations": 6, "keep_function": keep_function}
    handle = add_in_torch(torch_model, ["blocks.*"], **settings)
    add_in_jax(jax_model, ["blocks.*"], **settings)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for connection in handle.connections.values():
            for parameter in connection.parameters():
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    report = compare_modules(torch_model, jax_model, [batch()], names=NAMES, dtypes=("float64",))
    report.check()


NAMES = {
    "blocks.*.hyper_connection.*": "blocks.*.hyper_connection.*",
    "blocks.*.norm.weight": "blocks.*.norm.scale",
    "blocks.*.norm.bias": "blocks.*.norm.bias",
    "blocks.*.up.weight": {"to": "blocks.*.up.kernel", "transpose": True},
    "blocks.*.down.weight": {"to": "blocks.*.down.kernel", "transpose": True},
    "blocks.*.up.bias": "blocks.*.up.bias",
    "blocks.*.down.bias": "blocks.*.down.bias",
}


def test_jax_models_compute_what_they_did_under_jit():
    model = JaxModel()
    expected = model(jnp.asarray(batch()))
    handle = add_in_jax(model, ["blocks.*"])
    graph, params = nnx.split(model, nnx.Param)
    np.testing.assert_allclose(jax.jit(lambda p, x: nnx.merge(graph, p)(x))(params, batch()), expected, rtol=1e-12)
    gradients = nnx.grad(lambda model, x: (model(x) ** 2).sum())(model, jnp.asarray(batch()))
    assert float(jnp.abs(gradients["blocks"][1]["hyper_connection"]["bias"][...]).max()) > 0
    handle.remove()
    handle.remove()
    assert nnx.graphdef(model) == nnx.graphdef(JaxModel())


def test_with_recompute():
    results = []
    for recompute in (False, True):
        model = TorchModel()
        add_in_torch(model, ["blocks.*"], keep_function=False)
        if recompute:
            recompute_modules(model, {"blocks.*": ["norm", "hyper_connection"]})
        x = torch.from_numpy(batch()).requires_grad_()
        model(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


MISTAKES = [
    ({"num_residual_streams": 1}, ValueError, "num_residual_streams: expected an integer >= 2, got 1"),
    ({"blocks": ["block.*"]}, ValueError, r"'block\.\*', which matches none of blocks"),
    ({"blocks": "blocks.*"}, TypeError, r"expected a list of patterns, got 'blocks\.\*'"),
    ({"mhc_head": True}, TypeError, "expected settings out of sinkhorn_iterations, .*, got 'mhc_head'"),
    ({"sinkhorn_iterations": 0}, ValueError, "sinkhorn_iterations: expected an integer >= 1, got 0"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), MISTAKES)
@pytest.mark.parametrize(("add", "make"), [(add_in_torch, TorchModel), (add_in_jax, JaxModel)], ids=["torch", "jax"])
def test_mistakes_are_named(add, make, settings, kind, message):
    with pytest.raises(kind, match=message):
        add(make(), **({"blocks": ["blocks.*"]} | settings))


@pytest.mark.parametrize(("add", "make"), [(add_in_torch, TorchModel), (add_in_jax, JaxModel)], ids=["torch", "jax"])
def test_wrong_models_are_named(add, make):
    with pytest.raises(TypeError, match=r"model: expected an? .*Module, got function"):
        add(lambda x: x, ["blocks.*"])
    model = make()
    add(model, ["blocks.*"])
    with pytest.raises(ValueError, match=r"got blocks\.0, which has one"):
        add(model, ["blocks.*"])
    with pytest.raises(ValueError, match=r"hidden_size: expected a number, since no child of blocks\.0\.up is a norm"):
        add(make(), ["blocks.*.up"])
    reordered = make()
    add(reordered, ["blocks.1"], hidden_size=5)
    with pytest.raises(ValueError, match=r"states \[B, T, 5\] as first positional argument, got \[2, 5, 8\]"):
        reordered(torch.from_numpy(batch()) if add is add_in_torch else jnp.asarray(batch()))


class Scales(nnx.Module):
    """A block without parameters."""

    def __call__(self, x):
        return x + jnp.sin(x)


def test_coefficients_have_the_type_of_the_model_if_the_first_block_has_no_parameters():
    model = nnx.Sequential(Scales(), JaxBlock(nnx.Rngs(0)))
    x = jnp.asarray(batch())
    expected = model(x)
    handle = add_in_jax(model, ["layers.*"], hidden_size=WIDTH)
    assert {c.phi[...].dtype for c in handle.connections.values()} == {jnp.dtype("float64")}
    np.testing.assert_allclose(model(x), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dict", "narrow"])
def test_blocks_that_return_something_else_are_named(kind):
    """In both frameworks with one message. A narrower result would be added to all columns."""
    change = {"dict": lambda x: {"hidden": x}, "narrow": lambda x: x[..., :1]}[kind]
    say = (
        r"expected hidden states \[2, 5, 8\], or a tuple that begins with them, got "
        + {"dict": "dict", "narrow": r"\[2, 5, 1\]"}[kind]
    )
    torch_model, jax_model = TorchModel(), JaxModel()
    torch_block, jax_block = type("Other", (TorchBlock,), {}), type("Other", (JaxBlock,), {})
    torch_block.forward = lambda self, x: change(TorchBlock.forward(self, x))
    jax_block.__call__ = lambda self, x: change(JaxBlock.__call__(self, x))
    torch_model.blocks[0].__class__ = torch_block
    object.__setattr__(jax_model.blocks[0], "__class__", jax_block)
    add_in_torch(torch_model, ["blocks.*"])
    add_in_jax(jax_model, ["blocks.*"])
    x = np.ones((2, 5, WIDTH))
    with pytest.raises(ValueError, match=say):
        torch_model(torch.from_numpy(x))
    with pytest.raises(ValueError, match=say):
        jax_model(jnp.asarray(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x += self.map(self.norm(x))
        return x


def test_a_residual_in_place_is_refused():
    model = nn.Sequential(InPlace(), InPlace())
    add_in_torch(model, ["*"])
    with pytest.raises(ValueError, match=r"^0: .* got one that changes them in place; write x = x \+ y"):
        model(torch.randn(2, 3, 8))


def test_a_block_that_is_called_twice_is_refused():
    block = InPlace()
    with pytest.raises(ValueError, match="expected blocks that the model calls once, got '2'"):
        add_in_torch(nn.Sequential(block, InPlace(), block), ["*"])


def test_autocast_leaves_the_residual_stream_in_float32():
    """bfloat16 streams would round what the plain model keeps."""

    class Block(InPlace):
        def forward(self, x):
            return x + self.map(self.norm(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))), 30 * torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        add_in_torch(model, ["*"])
        found = model(x)
    assert found.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-2)

"""Layers of flax and their counterparts in torch.nn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import linen, nnx
from torch import nn

from benchmarks.pair_cases import DIFFERENT, EQUAL, pair
from parity import Report, compare_functions, compare_modules
from parity.testing import normal

RNGS = nnx.Rngs(0)
X = normal((4, 16))
NARROW = ("float32", "bfloat16")
"""Dtypes in which jax.nn.dot_product_attention, which computes in float32, is as accurate as PyTorch."""
IMAGES = normal((2, 8, 8, 4))
"""Images with channels last."""


class ChannelsLast(nn.Module):
    """A module of PyTorch that receives and returns channels in the last dimension.

    Args:
        inner: the module; it receives channels in the second dimension.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner module's result with channels last."""
        return self.inner(x.movedim(-1, 1)).movedim(1, -1)


def varied(module: nn.Module) -> nn.Module:
    """Return the module with random parameters, so that no scale is 1 and no bias is 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


SCALE = {"weight": "scale", "bias": "bias"}


@pair(
    "LayerNorm",
    "nnx.LayerNorm",
    "epsilon",
    ("defaults", DIFFERENT),
    ("nnx.LayerNorm(epsilon=1e-5)", EQUAL, {"epsilon": 1e-5}),
)
def layer_norm(dtypes: Any, **settings: Any) -> Report:
    """Compare layer normalisation."""
    return compare_modules(varied(nn.LayerNorm(16)), nnx.LayerNorm(16, rngs=RNGS, **settings), [X], dtypes=dtypes)


@pair(
    "LayerNorm, mean 1000",
    "linen.LayerNorm",
    "cancellation in the fast variance",
    ("epsilon=1e-5", DIFFERENT, {}, ("float32",)),
    ("epsilon=1e-5, use_fast_variance=False", EQUAL, {"use_fast_variance": False}, ("float32",)),
)
def layer_norm_far_from_zero(dtypes: Any, **settings: Any) -> Report:
    """Compare layer normalisation of inputs whose mean is 1000 times their standard deviation."""
    layer = linen.LayerNorm(epsilon=1e-5, **settings)
    variables = layer.init(jax.random.key(0), jnp.ones((4, 16)))
    return compare_modules(varied(nn.LayerNorm(16)), (layer, variables), [X + 1000.0], dtypes=dtypes)


@pair(
    "RMSNorm",
    "nnx.RMSNorm",
    "epsilon depends on the dtype in torch",
    ("defaults", DIFFERENT),
    ("nn.RMSNorm(16, eps=1e-6)", EQUAL, {"eps": 1e-6}),
    ("nnx.RMSNorm(epsilon=2**-52), float64", EQUAL, {"epsilon": 2.0**-52}, ("float64",)),
    ("nnx.RMSNorm(epsilon=2**-52), float32", DIFFERENT, {"epsilon": 2.0**-52}, ("float32",)),
    ("nnx.RMSNorm(epsilon=2**-23), float32", EQUAL, {"epsilon": 2.0**-23}, ("float32",)),
)
def rms_norm(dtypes: Any, eps: float | None = None, epsilon: float = 1e-6) -> Report:
    """Compare normalisation by the root mean square of small inputs."""
    theirs = nnx.RMSNorm(16, epsilon=epsilon, rngs=RNGS)
    return compare_modules(varied(nn.RMSNorm(16, eps=eps)), theirs, [0.01 * X], dtypes=dtypes)


@pair(
    "GroupNorm",
    "nnx.GroupNorm",
    "epsilon; channels last",
    ("defaults", DIFFERENT),
    ("nnx.GroupNorm(epsilon=1e-5)", EQUAL, {"epsilon": 1e-5}),
)
def group_norm(dtypes: Any, **settings: Any) -> Report:
    """Compare group normalisation of images."""
    ours, theirs = ChannelsLast(nn.GroupNorm(2, 4)), nnx.GroupNorm(4, num_groups=2, rngs=RNGS, **settings)
    return compare_modules(varied(ours), theirs, [IMAGES], dtypes=dtypes)


@pair(
    "InstanceNorm2d(affine=True)",
    "nnx.InstanceNorm",
    "epsilon; channels last",
    ("defaults", DIFFERENT),
    ("nnx.InstanceNorm(epsilon=1e-5)", EQUAL, {"epsilon": 1e-5}),
)
def instance_norm(dtypes: Any, **settings: Any) -> Report:
    """Compare instance normalisation of images."""
    ours = ChannelsLast(nn.InstanceNorm2d(4, affine=True))
    return compare_modules(varied(ours), nnx.InstanceNorm(4, rngs=RNGS, **settings), [IMAGES], dtypes=dtypes)


@pair("BatchNorm1d, evaluation", "nnx.BatchNorm", "", ("defaults", EQUAL))
def batch_norm_evaluation(dtypes: Any) -> Report:
    """Compare batch normalisation with running statistics."""
    ours = varied(nn.BatchNorm1d(16)).eval()
    ours.running_mean.copy_(torch.linspace(-1.0, 1.0, 16))
    ours.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return compare_modules(ours, nnx.BatchNorm(16, use_running_average=True, rngs=RNGS), [X], dtypes=dtypes)


class TorchStatistics(nn.Module):
    """Batch normalisation in training that also returns its running statistics.

    Args:
        correction: factor on the new variance of the batch.
    """

    def __init__(self, correction: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.correction = correction

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output and both statistics."""
        before = self.norm.running_var.clone()
        y = self.norm(x)
        variance = before * (1 - 0.1) + self.correction * (self.norm.running_var - before * (1 - 0.1))
        return y, self.norm.running_mean.clone(), variance


class JaxStatistics(nnx.Module):
    """Batch normalisation of flax in training that also returns its running statistics.

    Args:
        settings: keyword arguments of the layer.
    """

    def __init__(self, **settings: Any) -> None:
        self.norm = nnx.BatchNorm(16, rngs=RNGS, **settings)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return the output and both statistics."""
        y = self.norm(x)
        return y, *jax.lax.stop_gradient((self.norm.mean[...], self.norm.var[...]))


@pair(
    "BatchNorm1d, training",
    "nnx.BatchNorm",
    "momentum; running variance biased in flax",
    ("defaults", DIFFERENT),
    ("nnx.BatchNorm(momentum=0.9)", DIFFERENT, {"momentum": 0.9}),
    ("momentum=0.9, variance of the batch times (n - 1) / n", EQUAL, {"momentum": 0.9, "correction": 3 / 4}),
)
def batch_norm_training(dtypes: Any, correction: float = 1.0, **settings: Any) -> Report:
    """Compare batch normalisation and the running statistics after one step."""
    return compare_modules(varied(TorchStatistics(correction)), JaxStatistics(**settings), [X], dtypes=dtypes)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself.

    Args:
        is_mask_inverted: True: the mask is true where attention is allowed, as in flax.
    """

    def __init__(self, is_mask_inverted: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.is_mask_inverted = is_mask_inverted

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.attention(x, x, x, attn_mask=~mask if self.is_mask_inverted else mask, need_weights=False)[0]


@pair(
    "MultiheadAttention",
    "nnx.MultiHeadAttention",
    "mask inverted; q, k, v fused in torch",
    ("one boolean mask", DIFFERENT, {}, NARROW),
    ("torch's mask inverted", EQUAL, {"is_mask_inverted": True}, NARROW),
)
def multi_head_attention(dtypes: Any, is_mask_inverted: bool = False) -> Report:
    """Compare attention with a mask that has true and false in each row."""
    mask = np.eye(7, dtype=bool) | (normal((7, 7)) > 0.0)
    mask[0] = ~np.eye(7, dtype=bool)[0]
    return compare_modules(
        varied(SelfAttention(is_mask_inverted)),
        (
            lambda module, x, mask: module(x, mask=mask[None, None]),
            nnx.MultiHeadAttention(4, 16, decode=False, rngs=RNGS, keep_rngs=False),
        ),
        {"x": normal((2, 7, 16)), "mask": mask},
        names={
            "attention.in_proj_weight": {
                "to": ["query.kernel", "key.kernel", "value.kernel"],
                "transpose": True,
                "split": 1,
                "reshape": [16, 4, 4],
            },
            "attention.in_proj_bias": {"to": ["query.bias", "key.bias", "value.bias"], "reshape": [4, 4]},
            "attention.out_proj.weight": {"to": "out.kernel", "transpose": True, "reshape": [4, 4, 16]},
            "attention.out_proj.bias": "out.bias",
        },
        dtypes=dtypes,
    )


@pair(
    "scaled_dot_product_attention",
    "jax.nn.dot_product_attention",
    "a row of the mask without true; float32 inside jax",
    ("heads third in jax, float64", DIFFERENT, {}, ("float64",)),
    ("heads third in jax, float32 and bfloat16", EQUAL, {}, NARROW),
    ("one query with a mask of false only", DIFFERENT, {"is_one_row_empty": True}, NARROW),
    ("the same, torch's row set to the mean of all values", EQUAL, {"is_one_row_empty": True, "is_mean": True}, NARROW),
)
def dot_product_attention(dtypes: Any, is_one_row_empty: bool = False, is_mean: bool = False) -> Report:
    """Compare attention with a mask."""
    mask = np.tril(np.ones((5, 5), bool))
    if is_one_row_empty:
        mask[0] = False

    def torch_side(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = F.scaled_dot_product_attention(q, k, v, mask)
        return torch.where(mask.any(-1, keepdim=True), found, v.mean(-2, keepdim=True)) if is_mean else found

    def jax_side(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None]).swapaxes(1, 2)

    inputs = {name: normal((2, 3, 5, 8), seed) for seed, name in enumerate("qkv")} | {"mask": mask}
    return compare_functions(torch_side, jax_side, inputs, dtypes=dtypes)


GATES = {
    "weight_ih_l0": {"to": [f"cell.{x}.kernel" for x in ("ii", "if_", "ig", "io")], "transpose": True, "split": 1},
    "weight_hh_l0": {"to": [f"cell.{x}.kernel" for x in ("hi", "hf", "hg", "ho")], "transpose": True, "split": 1},
    "bias_hh_l0": {"to": [f"cell.{x}.bias" for x in ("hi", "hf", "hg", "ho")]},
}
SEQUENCES = normal((2, 5, 8))


class FirstOutput(nn.Module):
    """A recurrent layer of PyTorch without its final state.

    Args:
        inner: the layer.
        zeroed: names of parameters that are set to 0.
    """

    def __init__(self, inner: nn.Module, *zeroed: str) -> None:
        super().__init__()
        self.inner = varied(inner)
        with torch.no_grad():
            for name in zeroed:
                getattr(inner, name).zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all steps."""
        return self.inner(x)[0]


def recurrent(ours: nn.Module, cell: Any, names: dict[str, Any], ignored: str, dtypes: Any) -> Report:
    """Compare a recurrent layer of PyTorch with nnx.RNN around a cell."""
    links = {f"inner.{name}": value for name, value in names.items()}
    return compare_modules(ours, nnx.RNN(cell), [SEQUENCES], names=links, ignore=[f"inner.{ignored}"], dtypes=dtypes)


@pair(
    "LSTM",
    "nnx.RNN(nnx.LSTMCell)",
    "two biases in torch",
    ("bias_ih_l0 ignored", DIFFERENT),
    ("bias_ih_l0 = 0", EQUAL, {"zeroed": "bias_ih_l0"}),
)
def lstm(dtypes: Any, *, zeroed: str = "") -> Report:
    """Compare LSTMs whose gates are one matrix in PyTorch and four in flax."""
    ours = FirstOutput(nn.LSTM(8, 4, batch_first=True), *filter(None, [zeroed]))
    return recurrent(ours, nnx.LSTMCell(8, 4, rngs=RNGS), GATES, "bias_ih_l0", dtypes)


@pair(
    "LSTM",
    "nnx.RNN(nnx.OptimizedLSTMCell)",
    "two biases in torch",
    ("bias_ih_l0 ignored", DIFFERENT),
    ("bias_ih_l0 = 0", EQUAL, {"zeroed": "bias_ih_l0"}),
)
def optimized_lstm(dtypes: Any, *, zeroed: str = "") -> Report:
    """Compare LSTMs whose gates are one matrix in both."""
    names = {
        "weight_ih_l0": {"to": "cell.dense_i.kernel", "transpose": True},
        "weight_hh_l0": {"to": "cell.dense_h.kernel", "transpose": True},
        "bias_hh_l0": "cell.dense_h.bias",
    }
    ours = FirstOutput(nn.LSTM(8, 4, batch_first=True), *filter(None, [zeroed]))
    return recurrent(ours, nnx.OptimizedLSTMCell(8, 4, rngs=RNGS), names, "bias_ih_l0", dtypes)


@pair(
    "GRU",
    "nnx.RNN(nnx.GRUCell)",
    "no bias inside the reset gate in nnx",
    ("bias_hh_l0 ignored", DIFFERENT),
    ("bias_hh_l0 = 0", EQUAL, {"zeroed": "bias_hh_l0"}),
)
def gru(dtypes: Any, *, zeroed: str = "") -> Report:
    """Compare GRUs; both apply the reset gate after the matrix product."""
    names = {
        "weight_ih_l0": {"to": "cell.dense_i.kernel", "transpose": True},
        "weight_hh_l0": {"to": "cell.dense_h.kernel", "transpose": True},
        "bias_ih_l0": "cell.dense_i.bias",
    }
    ours = FirstOutput(nn.GRU(8, 4, batch_first=True), *filter(None, [zeroed]))
    return recurrent(ours, nnx.GRUCell(8, 4, rngs=RNGS), names, "bias_hh_l0", dtypes)


class TorchGru(nn.Module):
    """nn.GRU with the biases of linen: one for each input gate, and one inside the reset gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 4, batch_first=True)
        del self.inner.bias_hh_l0
        self.bias_hn = nn.Parameter(torch.zeros(4))
        self.inner.register_buffer("bias_hh_l0", torch.zeros(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all steps."""
        bias = torch.cat([torch.zeros(8, dtype=x.dtype), self.bias_hn])
        return torch.func.functional_call(self.inner, {"bias_hh_l0": bias}, (x,))[0]


@pair("GRU", "linen.RNN(linen.GRUCell)", "", ("b_hr = b_hz = 0", EQUAL))
def linen_gru(dtypes: Any) -> Report:
    """Compare GRUs with a bias inside the reset gate."""
    layer = linen.RNN(linen.GRUCell(4))
    variables = layer.init(jax.random.key(0), jnp.ones((2, 5, 8), jnp.float32))
    names = {
        "inner.weight_ih_l0": {
            "to": ["cell.ir.kernel", "cell.iz.kernel", "cell.in.kernel"],
            "transpose": True,
            "split": 1,
        },
        "inner.weight_hh_l0": {
            "to": ["cell.hr.kernel", "cell.hz.kernel", "cell.hn.kernel"],
            "transpose": True,
            "split": 1,
        },
        "inner.bias_ih_l0": {"to": ["cell.ir.bias", "cell.iz.bias", "cell.in.bias"]},
        "bias_hn": "cell.hn.bias",
    }
    return compare_modules(
        varied(TorchGru()), (layer, variables), [SEQUENCES], names=names, ignore=["inner.bias_hh_l0"], dtypes=dtypes
    )


@pair(
    "RNN",
    "nnx.RNN(nnx.SimpleCell)",
    "two biases in torch",
    ("bias_hh_l0 ignored", DIFFERENT),
    ("bias_hh_l0 = 0", EQUAL, {"zeroed": "bias_hh_l0"}),
)
def simple_rnn(dtypes: Any, *, zeroed: str = "") -> Report:
    """Compare recurrent layers without gates."""
    names = {
        "weight_ih_l0": {"to": "cell.dense_i.kernel", "transpose": True},
        "weight_hh_l0": {"to": "cell.dense_h.kernel", "transpose": True},
        "bias_ih_l0": "cell.dense_i.bias",
    }
    ours = FirstOutput(nn.RNN(8, 4, batch_first=True), *filter(None, [zeroed]))
    return recurrent(ours, nnx.SimpleCell(8, 4, rngs=RNGS), names, "bias_hh_l0", dtypes)


@pair(
    "Conv2d(padding=1, stride=2)",
    "nnx.Conv(strides=2)",
    "SAME pads right and bottom first",
    ("nnx.Conv(padding='SAME')", DIFFERENT),
    ("nnx.Conv(padding=1)", EQUAL, {"padding": 1}),
)
def strided_convolution(dtypes: Any, **settings: Any) -> Report:
    """Compare convolutions with stride 2 of images of even size."""
    ours = ChannelsLast(nn.Conv2d(4, 6, 3, stride=2, padding=1))
    return compare_modules(
        varied(ours), nnx.Conv(4, 6, (3, 3), strides=2, rngs=RNGS, **settings), [IMAGES], dtypes=dtypes
    )


@pair("Conv2d(padding='same')", "nnx.Conv", "", ("defaults", EQUAL))
def convolution(dtypes: Any) -> Report:
    """Compare convolutions with stride 1."""
    ours = ChannelsLast(nn.Conv2d(4, 6, (5, 3), padding="same"))
    return compare_modules(varied(ours), nnx.Conv(4, 6, (5, 3), rngs=RNGS), [IMAGES], dtypes=dtypes)


@pair("Conv2d(groups=4)", "nnx.Conv(feature_group_count=4)", "", ("padding='VALID'", EQUAL))
def depthwise_convolution(dtypes: Any) -> Report:
    """Compare convolutions of single channels, with dilation."""
    ours = ChannelsLast(nn.Conv2d(4, 8, 3, groups=4, dilation=2))
    theirs = nnx.Conv(4, 8, (3, 3), feature_group_count=4, kernel_dilation=2, padding="VALID", rngs=RNGS)
    return compare_modules(varied(ours), theirs, [IMAGES], dtypes=dtypes)


@pair(
    "ConvTranspose2d(stride=2)",
    "nnx.ConvTranspose(strides=2)",
    "kernel flipped",
    ("padding='VALID'", DIFFERENT),
    ("padding='VALID', kernel flipped", EQUAL, {"is_flipped": True}),
    ("padding='VALID', transpose_kernel=True", EQUAL, {"transpose_kernel": True}),
)
def transposed_convolution(dtypes: Any, is_flipped: bool = False, transpose_kernel: bool = False) -> Report:
    """Compare transposed convolutions."""
    ours = ChannelsLast(nn.ConvTranspose2d(4, 6, 3, stride=2))
    theirs = nnx.ConvTranspose(4, 6, (3, 3), 2, padding="VALID", transpose_kernel=transpose_kernel, rngs=RNGS)
    rule: dict[str, Any] = {"to": "kernel", "transpose": [2, 3, 1, 0] if transpose_kernel else [2, 3, 0, 1]}
    if is_flipped:
        rule["flip"] = [0, 1]
    return compare_modules(
        varied(ours), theirs, [IMAGES], names={"inner.weight": rule, "inner.bias": "bias"}, dtypes=dtypes
    )


@pair("Linear", "nnx.Linear", "", ("defaults", EQUAL))
def linear(dtypes: Any) -> Report:
    """Compare linear layers."""
    return compare_modules(varied(nn.Linear(16, 3)), nnx.Linear(16, 3, rngs=RNGS), [X], dtypes=dtypes)


@pair("Linear", "linen.DenseGeneral", "", ("kernel reshaped", EQUAL))
def dense_general(dtypes: Any) -> Report:
    """Compare a linear layer with one whose outputs have two dimensions."""
    layer = linen.DenseGeneral((2, 3))
    variables = layer.init(jax.random.key(0), jnp.ones((4, 16)))
    names = {
        "0.weight": {"to": "kernel", "transpose": True, "reshape": [16, 2, 3]},
        "0.bias": {"to": "bias", "reshape": [2, 3]},
    }
    ours = nn.Sequential(nn.Linear(16, 6), nn.Unflatten(1, (2, 3)))
    return compare_modules(varied(ours), (layer, variables), [X], names=names, dtypes=dtypes)


@pair("Linear", "nnx.Einsum", "", ("kernel not transposed", EQUAL))
def einsum(dtypes: Any) -> Report:
    """Compare a linear layer with nnx.Einsum in PyTorch's layout."""
    theirs = nnx.Einsum("bi,oi->bo", (3, 16), (3,), rngs=RNGS)
    return compare_modules(
        varied(nn.Linear(16, 3)), theirs, [X], names={"weight": "kernel", "bias": "bias"}, dtypes=dtypes
    )


@pair(
    "Embedding",
    "nnx.Embed",
    "no padding index in flax",
    ("defaults", EQUAL),
    ("nn.Embedding(padding_idx=0)", DIFFERENT, {"padding_idx": 0}),
)
def embedding(dtypes: Any, **settings: Any) -> Report:
    """Compare embeddings of tokens that include the padding index."""
    tokens = np.array([[0, 3, 5], [5, 1, 0]])
    ours = varied(nn.Embedding(7, 4, **settings))
    return compare_modules(ours, nnx.Embed(7, 4, rngs=RNGS), [tokens], dtypes=dtypes)


@pair("PReLU", "nnx.PReLU", "", ("defaults", EQUAL))
def prelu(dtypes: Any) -> Report:
    """Compare PReLU, a ReLU with a learned slope."""
    return compare_modules(
        nn.PReLU(), nnx.PReLU(), [X], names={"weight": {"to": "negative_slope", "reshape": []}}, dtypes=dtypes
    )

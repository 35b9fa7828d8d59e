"""Functions of jax.nn, jax.numpy, jax.image and flax.linen, and their counterparts in torch.nn.functional."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx

from benchmarks.pair_cases import DIFFERENT, EQUAL, pair
from parity import Report, compare_functions
from parity.testing import normal

X = 3.0 * normal((4, 16))
IMAGES = normal((2, 8, 6, 3))
"""Images with channels last."""


def first_channels(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of images with channels last for one with channels in the second dimension."""
    return lambda x: function(x.movedim(-1, 1)).movedim(1, -1)


@pair(
    "gelu",
    "jax.nn.gelu",
    "jax approximates by tanh",
    ("defaults", DIFFERENT),
    ("jax.nn.gelu(x, approximate=False)", EQUAL, {"approximate": False}),
    ("F.gelu(x, approximate='tanh')", EQUAL, {"torch_approximate": "tanh"}),
)
def gelu(dtypes: Any, torch_approximate: str = "none", **settings: Any) -> Report:
    """Compare GELU."""
    return compare_functions(
        lambda x: F.gelu(x, approximate=torch_approximate), lambda x: jax.nn.gelu(x, **settings), [X], dtypes=dtypes
    )


def jax_name(torch_name: str, function: Callable) -> str:
    """Return the name of a function of jax.nn; for a lambda around a function, the name in PyTorch."""
    name = getattr(function, "__name__", torch_name)
    return f"jax.nn.{torch_name.partition('(')[0] if name == '<lambda>' else name}"


SAME = {
    "silu": (F.silu, jax.nn.silu),
    "elu": (F.elu, jax.nn.elu),
    "selu": (F.selu, jax.nn.selu),
    "celu(alpha=2)": (lambda x: F.celu(x, 2.0), lambda x: jax.nn.celu(x, 2.0)),
    "hardswish": (F.hardswish, jax.nn.hard_swish),
    "mish": (F.mish, jax.nn.mish),
    "glu": (F.glu, jax.nn.glu),
    "softsign": (F.softsign, jax.nn.soft_sign),
    "logsigmoid": (F.logsigmoid, jax.nn.log_sigmoid),
    "log_softmax": (lambda x: F.log_softmax(x, -1), jax.nn.log_softmax),
    "softmax": (lambda x: F.softmax(x, -1), jax.nn.softmax),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1)),
}
"""Functions that are equal with their defaults, except at kinks."""
for _name, (_ours, _theirs) in SAME.items():
    pair(_name, jax_name(_name, _theirs), "", ("defaults", EQUAL))(
        lambda dtypes, sides=(_ours, _theirs): compare_functions(*sides, [X], dtypes=dtypes)
    )


@pair(
    "hardsigmoid",
    "jax.nn.hard_sigmoid",
    "torch's 1/6 is rounded to float32",
    ("float64", DIFFERENT, {}, ("float64",)),
    ("float32", EQUAL, {}, ("float32", "bfloat16")),
    ("float64, gradient times float(1/6) in jax", EQUAL, {"is_rounded": True}, ("float64",)),
)
def hard_sigmoid(dtypes: Any, is_rounded: bool = False) -> Report:
    """Compare the hard sigmoid, whose gradient is 1/6."""

    def rounded(x: jax.Array) -> jax.Array:
        exact = jax.nn.hard_sigmoid(x)
        slope = jnp.where((x > -3.0) & (x < 3.0), float(np.float32(1.0) / np.float32(6.0)), 0.0) * x
        return jax.lax.stop_gradient(exact - slope) + slope

    return compare_functions(F.hardsigmoid, rounded if is_rounded else jax.nn.hard_sigmoid, [X], dtypes=dtypes)


@pair(
    "softplus",
    "jax.nn.softplus",
    "torch is linear above 20",
    ("x = 21", DIFFERENT, {}, ("float64",)),
    ("x = 21 in float32", EQUAL, {}, ("float32",)),
    ("x = 21, F.softplus(x, threshold=40)", EQUAL, {"threshold": 40.0}),
)
def softplus(dtypes: Any, **settings: Any) -> Report:
    """Compare softplus above PyTorch's threshold."""
    x = np.full((1, 1), 21.0)
    return compare_functions(lambda x: F.softplus(x, **settings), jax.nn.softplus, [x], dtypes=dtypes)


ZEROS = np.zeros((2, 5))
KINKS = {
    "relu": (F.relu, jax.nn.relu, 0),
    "elu(alpha=2)": (lambda x: F.elu(x, 2.0), lambda x: jax.nn.elu(x, 2.0), 0),
    "relu6": (F.relu6, jax.nn.relu6, 6),
    "hardswish": (F.hardswish, jax.nn.hard_swish, 3),
    "hardsigmoid": (F.hardsigmoid, jax.nn.hard_sigmoid, 3),
}
"""Functions with a kink, and its place."""


def at(place: float, function: Callable) -> Callable:
    """Return a function whose inputs are distances from a place, so that perturbations leave 0 at the place."""
    return lambda x: function(x + place)


for _name, (_ours, _theirs, _place) in KINKS.items():
    _sides = at(_place, _ours), at(_place, _theirs)
    pair(f"{_name} at {_place}", jax_name(_name, _theirs), "", ("defaults", EQUAL))(
        lambda dtypes, sides=_sides: compare_functions(*sides, [ZEROS], dtypes=dtypes)
    )


def inside(low: float, high: float, is_closed: bool) -> Callable:
    """Return a function that clips, with gradient 1 inside of the interval and 0 outside.

    Args:
        low: lower end.
        high: upper end.
        is_closed: True: the gradient is 1 at the ends too.
    """

    def clip(x: jax.Array) -> jax.Array:
        is_inside = (x >= low) & (x <= high) if is_closed else (x > low) & (x < high)
        return jnp.where(is_inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))

    return clip


@pair(
    "leaky_relu at 0",
    "jax.nn.leaky_relu",
    "gradient: slope in torch, 1 in jax",
    ("defaults", DIFFERENT),
    ("jnp.where(x > 0, x, 0.01 * x)", EQUAL, {"theirs": lambda x: jnp.where(x > 0, x, 0.01 * x)}),
)
def leaky_relu(dtypes: Any, theirs: Callable = jax.nn.leaky_relu) -> Report:
    """Compare leaky ReLU at 0."""
    return compare_functions(F.leaky_relu, theirs, [ZEROS], dtypes=dtypes)


@pair(
    "hardtanh at 1",
    "jax.nn.hard_tanh",
    "gradient: 0 in torch, 1 in jax",
    ("defaults", DIFFERENT),
    ("jax's gradient 0 at the bounds", EQUAL, {"theirs": inside(-1.0, 1.0, is_closed=False)}),
)
def hard_tanh(dtypes: Any, theirs: Callable = jax.nn.hard_tanh) -> Report:
    """Compare hard tanh at its upper bound."""
    return compare_functions(at(1, F.hardtanh), at(1, theirs), [ZEROS], dtypes=dtypes)


@pair(
    "clamp(-1, 1) at 1",
    "jax.numpy.clip",
    "gradient: 1 in torch, 1/2 in jax",
    ("defaults", DIFFERENT),
    ("jax's gradient 1 at the bounds", EQUAL, {"theirs": inside(-1.0, 1.0, is_closed=True)}),
)
def clamp(dtypes: Any, theirs: Callable = lambda x: jnp.clip(x, -1.0, 1.0)) -> Report:
    """Compare clamping at its upper bound."""
    return compare_functions(at(1, lambda x: x.clamp(-1.0, 1.0)), at(1, theirs), [ZEROS], dtypes=dtypes)


@pair(
    "max(dim).values with ties",
    "jax.numpy.max",
    "gradient: first maximum, shared",
    ("defaults", DIFFERENT),
    ("torch.amax", EQUAL, {"ours": torch.amax}),
)
def maximum(dtypes: Any, ours: Callable = lambda x, dim: torch.max(x, dim).values) -> Report:
    """Compare maxima of rows with several equal largest values."""
    return compare_functions(lambda x: ours(x, -1), lambda x: jnp.max(x, -1), [ZEROS], dtypes=dtypes)


@pair(
    "linalg.norm of a zero row",
    "jax.numpy.linalg.norm",
    "gradient 0, nan",
    ("defaults", DIFFERENT),
    ("jnp.where around the zero row, twice", EQUAL, {"is_guarded": True}),
)
def norm_of_zero(dtypes: Any, is_guarded: bool = False) -> Report:
    """Compare the norms of rows, one of which is 0."""
    x = normal((3, 4))
    x[1] = 0.0

    def guarded(x: jax.Array) -> jax.Array:
        is_zero = (x == 0.0).all(-1)
        return jnp.where(is_zero, 0.0, jnp.linalg.norm(jnp.where(is_zero[:, None], 1.0, x), axis=-1))

    theirs = guarded if is_guarded else lambda x: jnp.linalg.norm(x, axis=-1)
    return compare_functions(lambda x: torch.linalg.norm(x, dim=-1), theirs, [x], dtypes=dtypes)


@pair(
    "std",
    "jax.numpy.std",
    "torch divides by n - 1",
    ("defaults", DIFFERENT),
    ("jnp.std(x, -1, ddof=1)", EQUAL, {"ddof": 1}),
)
def standard_deviation(dtypes: Any, **settings: Any) -> Report:
    """Compare standard deviations of rows."""
    return compare_functions(lambda x: x.std(-1), lambda x: jnp.std(x, -1, **settings), [X], dtypes=dtypes)


@pair(
    "median of an even number",
    "jax.numpy.median",
    "lower of two, mean of two",
    ("defaults", DIFFERENT),
    ("jnp.quantile(x, 0.5, -1, method='lower')", EQUAL, {"method": "lower"}),
)
def median(dtypes: Any, **settings: Any) -> Report:
    """Compare medians of rows of even length."""
    theirs = (lambda x: jnp.quantile(x, 0.5, -1, **settings)) if settings else lambda x: jnp.median(x, -1)
    return compare_functions(lambda x: torch.median(x, -1).values, theirs, [X], dtypes=dtypes)


RESIZED = (2, 13, 9, 3)
REDUCED = (2, 3, 4, 3)
NO_BFLOAT16 = ("float64", "float32")
"""PyTorch does not antialias in bfloat16 on CPU."""


@pair(
    "interpolate(mode='bilinear')",
    "jax.image.resize('linear')",
    "jax antialiases when it shrinks",
    ("enlarged", EQUAL, {"shape": RESIZED}),
    ("reduced", DIFFERENT, {"shape": REDUCED}),
    ("reduced, jax.image.resize(antialias=False)", EQUAL, {"shape": REDUCED, "antialias": False}),
    ("reduced, F.interpolate(antialias=True)", EQUAL, {"shape": REDUCED, "ours": {"antialias": True}}, NO_BFLOAT16),
    ("enlarged, align_corners=True", DIFFERENT, {"shape": RESIZED, "ours": {"align_corners": True}}),
)
def bilinear(dtypes: Any, shape: tuple, ours: dict[str, Any] | None = None, **settings: Any) -> Report:
    """Compare bilinear interpolation."""
    resize = first_channels(lambda x: F.interpolate(x, shape[1:3], mode="bilinear", **(ours or {})))
    return compare_functions(
        resize, lambda x: jax.image.resize(x, shape, "linear", **settings), [IMAGES], dtypes=dtypes
    )


@pair(
    "interpolate(mode='bicubic')",
    "jax.image.resize('cubic')",
    "coefficient -0.75, -0.5; borders",
    ("enlarged", DIFFERENT, {"shape": RESIZED}),
    ("enlarged, F.interpolate(antialias=True)", EQUAL, {"shape": RESIZED, "ours": {"antialias": True}}, NO_BFLOAT16),
    ("reduced, F.interpolate(antialias=True)", EQUAL, {"shape": REDUCED, "ours": {"antialias": True}}, NO_BFLOAT16),
)
def bicubic(dtypes: Any, shape: tuple, ours: dict[str, Any] | None = None) -> Report:
    """Compare bicubic interpolation."""
    resize = first_channels(lambda x: F.interpolate(x, shape[1:3], mode="bicubic", **(ours or {})))
    return compare_functions(resize, lambda x: jax.image.resize(x, shape, "cubic"), [IMAGES], dtypes=dtypes)


@pair(
    "interpolate(mode='nearest')",
    "jax.image.resize('nearest')",
    "pixel corners, pixel centres",
    ("13 x 9 from 8 x 6", DIFFERENT),
    ("F.interpolate(mode='nearest-exact')", EQUAL, {"mode": "nearest-exact"}),
)
def nearest(dtypes: Any, mode: str = "nearest") -> Report:
    """Compare interpolation by the nearest pixel."""
    resize = first_channels(lambda x: F.interpolate(x, RESIZED[1:3], mode=mode))
    return compare_functions(resize, lambda x: jax.image.resize(x, RESIZED, "nearest"), [IMAGES], dtypes=dtypes)


@pair(
    "avg_pool2d(3, 2, padding=1)",
    "nnx.avg_pool",
    "SAME pads right and bottom first",
    ("padding='SAME'", DIFFERENT),
    ("padding=((1, 1), (1, 1))", EQUAL, {"padding": ((1, 1), (1, 1))}),
    ("the same, count_include_pad=False in nnx", DIFFERENT, {"padding": ((1, 1), (1, 1)), "count_include_pad": False}),
    (
        "count_include_pad=False in both",
        EQUAL,
        {"padding": ((1, 1), (1, 1)), "count_include_pad": False, "is_counted": False},
    ),
)
def average_pool(dtypes: Any, is_counted: bool = True, padding: Any = "SAME", **settings: Any) -> Report:
    """Compare average pooling with padding."""
    ours = first_channels(lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=is_counted))
    theirs = lambda x: nnx.avg_pool(x, (3, 3), (2, 2), padding, **settings)  # noqa: E731
    return compare_functions(ours, theirs, [IMAGES], dtypes=dtypes)


@pair("max_pool2d(2) with ties", "nnx.max_pool", "", ("strides=(2, 2)", EQUAL))
def max_pool(dtypes: Any) -> Report:
    """Compare maximum pooling of images with many equal pixels."""
    ours = first_channels(lambda x: F.max_pool2d(x, 2))
    theirs = lambda x: nnx.max_pool(x, (2, 2), (2, 2))  # noqa: E731
    return compare_functions(ours, theirs, [np.round(IMAGES)], dtypes=dtypes)

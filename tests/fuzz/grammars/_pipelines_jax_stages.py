"""Random stages of pipelines in JAX: functions ``stage(params, x)`` of random operations, and nnx modules."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

TOKENS = 3
"""Length of a sequence."""
VOCABULARY = 5


class StageSpec(NamedTuple):
    """One stage."""

    operations: tuple[str, ...]
    width: int
    """Width of the output."""
    output: str
    """Key of MESSAGES."""


class _Carried(NamedTuple):
    """What a message contains: hidden values [b, t, w], and whole numbers [b, t] if it has some."""

    h: Array
    ids: Array | None


MESSAGES: dict[str, Callable[[_Carried], Any]] = {
    "array": lambda c: c.h,
    "tuple": lambda c: (c.h, _ids(c)),
    "dict": lambda c: {"h": c.h, "ids": _ids(c)},
    "list": lambda c: [c.h, _ids(c)],
    "nested": lambda c: {"deep": (c.h, {"mask": _ids(c) > 1}), "ids": _ids(c)},
    "halves": lambda c: (c.h[..., :2], c.h[..., 2:]),
    "two types": lambda c: {"h": c.h, "narrow": c.h[:, :1].astype("float32")},
    "none": lambda c: {"h": c.h, "nothing": None},
    "empty": lambda c: (c.h, jnp.zeros((0, 2))),
    "scalar": lambda c: (c.h, c.h.mean()),
    "number": lambda c: {"h": c.h, "factor": 0.5},
    "unread": lambda c: {"h": c.h, "unread": c.h * c.h},
    "same twice": lambda c: (c.h, c.h),
    "constant": lambda c: (c.h, jnp.arange(3.0)),
}
"""Message of a stage by its form."""


def _ids(c: _Carried) -> Array:
    return jnp.zeros(c.h.shape[:2], "int32") if c.ids is None else c.ids


def read_message(form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Carried:
    """Return what a message contains, from the arguments of the stage that receives it."""
    if form in ("array", "tokens", "floats"):
        (only,) = args
        return _Carried(only, only if form == "tokens" else None)
    if form == "tuple":
        return _Carried(*args)
    if form == "dict":
        return _Carried(kwargs["h"], kwargs["ids"])
    if form == "list":
        return _Carried(*args[0])
    if form == "nested":
        h, masks = kwargs["deep"]
        return _Carried(jnp.where(masks["mask"][..., None], h, 0.5 * h), kwargs["ids"])
    if form == "halves":
        return _Carried(jnp.concatenate(args, -1), None)
    if form == "two types":
        return _Carried(kwargs["h"] + kwargs["narrow"].astype("float64"), None)
    if form in ("none", "unread"):
        return _Carried(kwargs["h"], None)
    if form == "number":
        return _Carried(kwargs["h"] * kwargs["factor"], None)
    if form == "scalar":
        return _Carried(args[0] + args[1], None)
    if form == "same twice":
        return _Carried(args[0] - 0.3 * args[1], None)
    if form == "constant":
        return _Carried(args[0] * args[1].sum(), None)
    assert form == "empty", form
    return _Carried(args[0] + args[1].sum(), None)


class Operation(NamedTuple):
    """An operation that keeps the width."""

    shapes: Callable[[int], dict[str, tuple[int, ...]]]
    """Shapes of its parameters by the width."""
    run: Callable[[dict[str, Array], Array, Array | None], Array]


@jax.custom_vjp
def _doubled_gradient(x: Array) -> Array:
    return x


_doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def _scaled_product(x: Array, w: Array) -> Array:
    return x @ w


def _scaled_product_backward(saved: Any, g: Array) -> tuple[Array, Array]:
    x, w = saved
    return 0.5 * (g @ w.T), jnp.einsum("...i,...j->ij", x, g)


_scaled_product.defvjp(lambda x, w: (x @ w, (x, w)), _scaled_product_backward)


def _mlp(p: dict[str, Array], x: Array) -> Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def _attention(p: dict[str, Array], x: Array) -> Array:
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    scores = jnp.einsum("btc,bsc->bts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    return x + jax.nn.softmax(scores) @ v


def _norm(p: dict[str, Array], x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * (1 + p["scale"])


def _layers(p: dict[str, Array], x: Array) -> Array:
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["stacked"])[0]


def _branches(p: dict[str, Array], x: Array) -> Array:
    return jax.lax.cond(x.sum() > 0, lambda w, x: x @ w, lambda w, x: jnp.sin(x @ w), p["w"], x)


def _convolution(p: dict[str, Array], x: Array) -> Array:
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return x + jax.lax.conv_general_dilated(padded, p["taps"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def _by_token(p: dict[str, Array], x: Array, ids: Array | None) -> Array:
    return x if ids is None else x + p["by_token"][ids]


def _square(width: int) -> dict[str, tuple[int, ...]]:
    return {"w": (width, width)}


def _two(width: int) -> dict[str, tuple[int, ...]]:
    return {"up": (width, 2 * width), "down": (2 * width, width)}


def _nothing(width: int) -> dict[str, tuple[int, ...]]:
    del width
    return {}


_checkpointed = jax.checkpoint(_mlp)  # pyright: ignore[reportPrivateImportUsage]
_partly_checkpointed = jax.checkpoint(_mlp, policy=jax.checkpoint_policies.dots_saveable)  # pyright: ignore[reportPrivateImportUsage]

OPERATIONS = {
    "mlp": Operation(_two, lambda p, x, _: _mlp(p, x)),
    "attention": Operation(lambda w: {"qkv": (w, 3 * w)}, lambda p, x, _: _attention(p, x)),
    "norm": Operation(lambda w: {"scale": (w,)}, lambda p, x, _: _norm(p, x)),
    "layers": Operation(lambda w: {"stacked": (2, w, w)}, lambda p, x, _: _layers(p, x)),
    "branches": Operation(_square, lambda p, x, _: _branches(p, x)),
    "convolution": Operation(lambda w: {"taps": (3, w, w)}, lambda p, x, _: _convolution(p, x)),
    "by token": Operation(lambda w: {"by_token": (VOCABULARY, w)}, _by_token),
    "checkpoint": Operation(_two, lambda p, x, _: _checkpointed(p, x)),
    "policy": Operation(_two, lambda p, x, _: _partly_checkpointed(p, x)),
    "jit": Operation(_two, lambda p, x, _: jax.jit(_mlp)(p, x)),
    "custom rule": Operation(_square, lambda p, x, _: _doubled_gradient(x @ p["w"])),
    "custom product": Operation(_square, lambda p, x, _: _scaled_product(x, p["w"])),
    "float32": Operation(_square, lambda p, x, _: (x.astype("float32") @ p["w"].astype("float32")).astype("float64")),
    "twice": Operation(_square, lambda p, x, _: jnp.tanh(x @ p["w"]) @ p["w"].T),
    "product of weights": Operation(_two, lambda p, x, _: x @ (p["up"] @ p["down"])),
    "of weights alone": Operation(_square, lambda p, x, _: x + jnp.tanh(p["w"]).sum(0)),
    "unused": Operation(_square, lambda p, x, _: x),
    "stopped": Operation(_square, lambda p, x, _: x + jax.lax.stop_gradient(x @ p["w"])),
    "batched weights": Operation(
        lambda w: {"heads": (TOKENS, w, w)}, lambda p, x, _: jnp.einsum("btc,tcd->btd", x, p["heads"])
    ),
    "over samples": Operation(_nothing, lambda p, x, _: x - x.mean((0, 1))),
    "sorted": Operation(_nothing, lambda p, x, _: jnp.sort(x, 1)),
    "scatter": Operation(lambda w: {"row": (w,)}, lambda p, x, _: x.at[:, 1].add(p["row"])),
    "slice": Operation(lambda w: {"long": (w + 2,)}, lambda p, x, _: x * (1 + p["long"][1:-1])),
    "scalar": Operation(lambda _: {"factor": ()}, lambda p, x, _: x * (1 + p["factor"])),
    "vmap": Operation(_square, lambda p, x, _: jax.vmap(lambda x: jnp.tanh(x @ p["w"]))(x)),
    "identity": Operation(_nothing, lambda p, x, _: x),
}


def parameters_of(specs: tuple[StageSpec, ...], inputs: str, seed: int) -> list[Any]:
    """Return random parameters of stages of functions."""
    rng = np.random.default_rng(seed)
    trees = []
    before = 4
    for n, spec in enumerate(specs):
        parts = [OPERATIONS[name].shapes(spec.width) for name in spec.operations]
        first = (VOCABULARY, spec.width) if n == 0 and inputs == "tokens" else (before, spec.width)
        shapes = {"first": first, "rest": parts}
        dtype = ("float64", "float64", "float32")[rng.integers(3)]
        trees.append(
            jax.tree.map(
                lambda shape, dtype=dtype: rng.normal(0, 0.4, shape).astype(dtype),
                shapes,
                is_leaf=lambda x: isinstance(x, tuple),
            )
        )
        before = spec.width
    return trees


@cache
def function_of(spec: StageSpec, received: str) -> Callable[..., Any]:
    """Return the function of a stage, which is the same object for equal stages."""

    def stage(params: Any, *args: Any, **kwargs: Any) -> Any:
        h, ids = read_message(received, args, kwargs)
        params = jax.tree.map(lambda x: jnp.asarray(x, "float64"), params)
        h = params["first"][h] if received == "tokens" else h @ params["first"]
        for name, own in zip(spec.operations, params["rest"], strict=True):
            h = OPERATIONS[name].run(own, h, ids)
        return MESSAGES[spec.output](_Carried(h, ids))

    return stage


# Modules.


class Count(nnx.Variable):
    """A number of calls."""


class Counter(nnx.Module):
    """Scale by a count of calls, which it raises."""

    def __init__(self) -> None:
        self.calls = Count(jnp.zeros((), "int32"))

    def __call__(self, x: Array) -> Array:
        self.calls[...] += 1
        return x * (1 + 0.1 * self.calls[...])


class Average(nnx.Module):
    """Subtract a moving average of the inputs."""

    def __init__(self, width: int) -> None:
        self.mean = nnx.BatchStat(jnp.zeros((width,)))

    def __call__(self, x: Array) -> Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1))
        return x - self.mean[...]


class Sine(nnx.Module):
    """A part without variables."""

    def __call__(self, x: Array) -> Array:
        return jnp.sin(x)


class Checkpointed(nnx.Module):
    """Dropout in nnx.remat."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    @nnx.remat
    def __call__(self, x: Array) -> Array:
        return jnp.tanh(self.dropout(jnp.sin(x)))


class Residual(nnx.Module):
    """A residual MLP."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 2 * width, rngs=rngs, param_dtype=jnp.float64)
        self.down = nnx.Linear(2 * width, width, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: Array) -> Array:
        return x + self.down(jnp.tanh(self.up(x)))


MODULES: dict[str, Callable[[int, nnx.Rngs], Any]] = {
    "linear": lambda w, rngs: nnx.Linear(w, w, rngs=rngs, param_dtype=jnp.float64),
    "residual": Residual,
    "layer norm": lambda w, rngs: nnx.LayerNorm(w, rngs=rngs, param_dtype=jnp.float64),
    "batch norm": lambda w, rngs: nnx.BatchNorm(w, rngs=rngs, param_dtype=jnp.float64),
    "dropout": lambda w, rngs: nnx.Dropout(0.3, rngs=rngs),
    "convolution": lambda w, rngs: nnx.Conv(w, w, (3,), rngs=rngs, param_dtype=jnp.float64),
    "attention": lambda w, rngs: nnx.MultiHeadAttention(2, w, rngs=rngs, param_dtype=jnp.float64, decode=False),
    "counter": lambda w, rngs: Counter(),
    "average": lambda w, rngs: Average(w),
    "shared": lambda w, rngs: Residual(w, rngs),
    "sine": lambda w, rngs: Sine(),
    "dropout in a checkpoint": lambda w, rngs: Checkpointed(rngs),
}
STATEFUL = ("batch norm", "dropout", "dropout in a checkpoint", "counter", "average")


class Stage(nnx.Module):
    """A stage of random parts."""

    def __init__(self, spec: StageSpec, received: str, before: int, rngs: nnx.Rngs, shared: Residual | None) -> None:
        self.received = received
        self.output = spec.output
        if received == "tokens":
            self.first = nnx.Embed(VOCABULARY, spec.width, rngs=rngs, param_dtype=jnp.float64)
        else:
            self.first = nnx.Linear(before, spec.width, rngs=rngs, param_dtype=jnp.float64)
        parts = [
            shared if name == "shared" and shared is not None else MODULES[name](spec.width, rngs)
            for name in spec.operations
        ]
        self.parts = nnx.List(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        h, ids = read_message(self.received, args, kwargs)
        h = self.first(h)
        for part in self.parts:
            h = part(h)
        return MESSAGES[self.output](_Carried(h, ids))


def modules_of(specs: tuple[StageSpec, ...], inputs: str, seed: int) -> list[Stage]:
    """Return the nnx modules of stages."""
    rngs = nnx.Rngs(seed)
    shared = Residual(specs[0].width, rngs)
    stages = []
    before = 4
    received = inputs
    for n, spec in enumerate(specs):
        fits = spec.width == specs[0].width
        stages.append(Stage(spec, received, before, nnx.Rngs(seed + n), shared if fits else None))
        before = spec.width
        received = spec.output
    return stages

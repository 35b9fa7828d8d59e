"""Random functions of pytrees with named values, as users write them, and runs of them in transformations of JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

TOKENS, WIDTH = 3, 4
Mark = Callable[[Any], Any]


@dataclass(frozen=True)
class Operation:
    """One operation on two earlier values, and where a name is."""

    kind: str
    reads: tuple[int, int]
    name: str | None
    place: str
    """Of the name: ``result``, ``inside``, ``both`` or ``twice``, a name of a named value."""


@dataclass(frozen=True)
class FunctionProgram:
    """A function, the patterns of its dropped names, and what surrounds it."""

    operations: tuple[Operation, ...]
    results: tuple[int, ...]
    structure: str
    named_argument: bool
    leaves: str
    """Of the arguments: ``jax``, ``numpy`` or ``mixed``, which has numbers, a text and a function too."""
    patterns: tuple[str, ...]
    form: str
    surroundings: str
    calls: int
    seed: int


def _norm(w: Any, a: Any, b: Any, m: Mark) -> Any:
    return m(a * jax.lax.rsqrt(jnp.mean(a * a, -1, keepdims=True) + 1e-6)) * w["scale"]


def _layer_norm(w: Any, a: Any, b: Any, m: Mark) -> Any:
    mean = a.mean(-1, keepdims=True)
    return m((a - mean) / jnp.sqrt(m(((a - mean) ** 2).mean(-1, keepdims=True)) + 1e-5)) * w["scale"] + 0.1 * b


def _attention(w: Any, a: Any, b: Any, m: Mark) -> Any:
    scores = jnp.where(w["mask"], jnp.einsum("btd,bsd->bts", a, b), -1e9)
    return m(jax.nn.softmax(scores)) @ (b @ w["weight"])


def _jitted(w: Any, a: Any, b: Any, m: Mark) -> Any:
    @jax.jit
    def inner(x, y):
        return m(jnp.tanh(x) * y) @ w["weight"] + y

    return inner(a, b)


def _jitted_twice(w: Any, a: Any, b: Any, m: Mark) -> Any:
    inner = jax.jit(lambda x: m(jnp.sin(x)))
    outer = jax.jit(lambda x, y: (inner(x) * inner(y), x))
    return sum(outer(a, b))


def _take(w: Any, a: Any, b: Any, m: Mark) -> Any:
    return jnp.take_along_axis(b, m(jnp.argmax(a, -1, keepdims=True)), -1) * a


def _scan(w: Any, a: Any, b: Any, m: Mark) -> Any:
    found = jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h * x), a[:, 0], jnp.moveaxis(b, 1, 0))
    return m(jnp.moveaxis(found[1], 0, 1)) + found[0][:, None]


def _names_in_scan(w: Any, a: Any, b: Any, m: Mark) -> Any:
    return jax.lax.scan(lambda h, _: (m(jnp.tanh(h)) * b, None), a, None, 2)[0]


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


def _dropout(w: Any, a: Any, b: Any, m: Mark) -> Any:
    return jnp.where(m(jax.random.bernoulli(w["key"], 0.7, a.shape)), a / 0.7, 0.0) + b


def _split(w: Any, a: Any, b: Any, m: Mark) -> Any:
    first, second = jnp.split(a * b, 2, -1)
    return jnp.concatenate([m(jnp.sin(second)), first], -1)


def _python(w: Any, a: Any, b: Any, m: Mark) -> Any:
    act = w.get("act", jnp.cos)
    return m(act(a) * w.get("number", 2)) + (b if w.get("mode") == "fast" else jnp.sin(b))


def _fft(w: Any, a: Any, b: Any, m: Mark) -> Any:
    return jnp.real(m(jnp.fft.fft(a)) * 0.5) + b


def _callback(w: Any, a: Any, b: Any, m: Mark) -> Any:
    jax.debug.callback(lambda x: None, a)
    return m(jnp.tanh(a) * b)


def _narrow(dtype: Any, w: Any, a: Any, b: Any, m: Mark) -> Any:
    return m(jnp.tanh(m(a.astype(dtype)) * w["half"].astype(dtype))).astype(a.dtype) + b


OPERATIONS: dict[str, Callable[[Any, Any, Any, Mark], Any]] = {
    "product": lambda w, a, b, m: m(a @ w["weight"]) + b,
    "norm": _norm,
    "layer norm": _layer_norm,
    "swiglu": lambda w, a, b, m: m(jax.nn.silu(m(a @ w["weight"])) * (b @ w["other"])) @ w["weight"],
    "softmax": lambda w, a, b, m: jax.nn.softmax(m(a * b)),
    "own softmax": lambda w, a, b, m: (lambda e: m(e / e.sum(-1, keepdims=True)))(
        jnp.exp(a - a.max(-1, keepdims=True))
    ),
    "attention": _attention,
    "jitted": _jitted,
    "jitted twice": _jitted_twice,
    "gelu": lambda w, a, b, m: m(jax.nn.gelu(a)) * b,
    "relu": lambda w, a, b, m: m(jax.nn.relu(a)) + 0.1 * b,
    "silu": lambda w, a, b, m: m(jax.nn.silu(m(a))) * b,
    "softplus": lambda w, a, b, m: m(jax.nn.softplus(a)) @ w["weight"],
    "elu": lambda w, a, b, m: m(jax.nn.elu(a)) * jax.nn.relu6(b),
    "log softmax": lambda w, a, b, m: m(jax.nn.log_softmax(a)) * b,
    "logsumexp": lambda w, a, b, m: a - m(jax.nn.logsumexp(b, -1, keepdims=True)),
    "multiply": lambda w, a, b, m: m(a * b) * 0.5,
    "add": lambda w, a, b, m: m(a + b) @ w["other"],
    "where": lambda w, a, b, m: jnp.where(m(a > 0), a, 0.1 * b),
    "take": _take,
    "rounded": lambda w, a, b, m: m((a * 3).astype(jnp.int32)).astype(a.dtype) * b,
    "gathered": lambda w, a, b, m: m(w["table"][w["ids"]]) * a,
    "float32": partial(_narrow, jnp.float32),
    "bfloat16": partial(_narrow, jnp.bfloat16),
    "scan": _scan,
    "names in scan": _names_in_scan,
    "cond": lambda w, a, b, m: m(jax.lax.cond(a.sum() > 0, jnp.sin, jnp.cos, b)) * a,
    "loop": lambda w, a, b, m: m(jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h) * b, a)),
    "checkpointed": lambda w, a, b, m: jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x) * b))(m(jnp.exp(-a * a))),
    "names in checkpoint": lambda w, a, b, m: jax.checkpoint(lambda x: jnp.sin(m(jnp.tanh(x) * b)))(a),
    "custom vjp": lambda w, a, b, m: m(_clipped(a)) * b,
    "dropout": _dropout,
    "split": _split,
    "sorted": lambda w, a, b, m: m(jnp.sort(a, -1)) * b,
    "constant": lambda w, a, b, m: m(jnp.sin(jnp.arange(WIDTH, dtype=a.dtype))) * a,
    "stopped": lambda w, a, b, m: m(jax.lax.stop_gradient(a)) * b,
    "cumulative": lambda w, a, b, m: m(jnp.cumsum(a, 1)) * b,
    "gradient inside": lambda w, a, b, m: jax.grad(lambda t: (m(jnp.sin(t)) * b).sum())(a),
    "vmapped": lambda w, a, b, m: jax.vmap(lambda x, y: m(jnp.tanh(x)) * y)(a, b),
    "fft": _fft,
    "python": _python,
    "reshaped": lambda w, a, b, m: (
        jnp.sin(m((a * b).reshape(-1)).reshape(a.shape)) + m(a.swapaxes(1, 2)).swapaxes(1, 2)
    ),
    "power": lambda w, a, b, m: m((a * a + 1) ** jnp.tanh(b)),
    "clipped": lambda w, a, b, m: m(jnp.clip(a, -0.5, 0.5)) * jnp.maximum(a, b),
    "callback": _callback,
}
"""Operations of arguments w on values a and b, [B, T, D]; m gives a value inside a name."""
NARROW = {"float32": 1e-5, "bfloat16": 5e-2}
"""Relative tolerances of compiled programs with these operations, where XLA may round at other places."""


def make_function(p: FunctionProgram) -> Callable[..., Any]:
    """Return the function of a program."""

    def mark(operation: Operation, x: Any) -> Any:
        return x if operation.name is None else checkpoint_name(x, operation.name)

    def function(w: Any, x: Any, *, y: Any, extra: Any = None) -> Any:
        values = [checkpoint_name(x, "a") if p.named_argument else x, y]
        for each in p.operations:
            named = partial(mark, each)
            inside = named if each.place in ("inside", "both") else lambda value: value
            first, second = each.reads
            found = OPERATIONS[each.kind](w, values[first], values[second], inside)
            for _ in range({"inside": 0, "twice": 2}.get(each.place, 1)):
                found = named(found)
            values.append(found)
        results = [values[k] for k in p.results]
        if p.structure == "array":
            return results[0]
        if p.structure == "dict":
            return {"results": results, "bool": results[0] > 0, "none": None}
        if p.structure == "with a text":
            return {"results": results, "label": "text", "number": 3}
        return (*results, extra["bias"] * results[0])

    return function


def arguments(p: FunctionProgram, batch: int = 2) -> tuple[tuple, dict[str, Any]]:
    """Return positional and keyword arguments."""
    rng = np.random.default_rng(p.seed)

    def normal(*shape: int) -> Any:
        values = rng.standard_normal(shape)
        return values if p.leaves == "numpy" else jnp.asarray(values)

    w = {
        "weight": normal(WIDTH, WIDTH),
        "other": normal(WIDTH, WIDTH),
        "scale": normal(WIDTH),
        "table": normal(5, WIDTH),
    }
    w |= {"mask": jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), "ids": jnp.asarray(rng.integers(0, 5, (batch, TOKENS)))}
    w |= {"half": jnp.asarray(rng.standard_normal(WIDTH), jnp.float32), "key": jax.random.key(p.seed % 97)}
    if p.leaves == "mixed":
        w |= {"number": 3, "mode": "fast", "act": jnp.sin, "nothing": None, "small": np.float64(0.5)}
    shape = (batch, TOKENS, WIDTH)
    return (w, normal(*shape)), {"y": normal(*shape), "extra": {"bias": normal(WIDTH)}}


def closed(function: Callable[..., Any], args: Any) -> tuple[Callable[[dict], Any], dict[int, Any]]:
    """Return a function of the float leaves of the arguments, which returns arrays, and these leaves."""
    leaves, structure = jax.tree.flatten(args)
    floats = {k: leaf for k, leaf in enumerate(leaves) if _is_float(leaf)}

    def run(floats: dict[int, Any]) -> Any:
        given = [floats.get(k, leaf) for k, leaf in enumerate(leaves)]
        positional, keywords = jax.tree.unflatten(structure, given)
        found = function(*positional, **keywords)
        if isinstance(found, dict) and found.get("label", "text") != "text":
            raise AssertionError("label")
        return [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array | np.ndarray)]

    return run, floats


def _is_float(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 0


def loss_of(leaves: Sequence[Any]) -> Any:
    """Return a loss whose cotangents differ."""
    floats = [x.astype(jnp.float64) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in floats)


def run_function(p: FunctionProgram, function: Callable[..., Any]) -> dict[str, Any]:
    """Return outputs, gradients and parameters of a program with a function."""
    run, floats = closed(function, arguments(p))
    x_place = max(k for k in floats if floats[k].shape == (2, TOKENS, WIDTH))

    def forward(floats: dict) -> Any:
        found = run(floats)
        for _ in range(p.calls - 1):
            found = run(
                {**floats, x_place: next(x for x in found if x.shape == (2, TOKENS, WIDTH) and x.dtype == float)}
            )
        return found

    def both(floats: dict) -> Any:
        return forward(floats), *jax.value_and_grad(lambda f: loss_of(forward(f)))(floats)

    def stepped(floats: dict, scale: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda f: loss_of(forward({**f, x_place: f[x_place] * scale})))(floats)
        return jax.tree.map(lambda f, g: f - 1e-3 * g, floats, gradients), value

    if p.surroundings == "eager":
        found = both(floats)
    elif p.surroundings == "jit":
        found = jax.jit(both)(floats)
    elif p.surroundings == "vmap":
        axes = {k: 0 if k == x_place else None for k in floats}
        found = jax.vmap(both, in_axes=(axes,))({**floats, x_place: jnp.stack([floats[x_place], 2 * floats[x_place]])})
    elif p.surroundings == "twice":
        found = jax.grad(lambda f: loss_of(jax.tree.leaves(jax.grad(lambda f: loss_of(forward(f)))(f))))(floats)
    elif p.surroundings == "checkpoint":
        found = jax.value_and_grad(jax.checkpoint(lambda f: loss_of(forward(f))))(floats)
    elif p.surroundings == "scan":
        found = jax.lax.scan(stepped, jax.tree.map(jnp.asarray, floats), jnp.array([1.0, 0.5]))
    elif p.surroundings == "donate":
        found = jax.jit(stepped, donate_argnums=0)({k: jnp.array(f, copy=True) for k, f in floats.items()}, 1.0)
    else:
        raise AssertionError(p.surroundings)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}


BATCH_FOR_BYTES = 64
VALUE_BYTES = BATCH_FOR_BYTES * TOKENS * WIDTH * 8


def saved_bytes(p: FunctionProgram, function: Callable[..., Any]) -> int:
    """Return the bytes of the residuals that are no argument, of a function with a larger batch."""
    run, floats = closed(function, arguments(p, BATCH_FOR_BYTES))
    traced = jax.make_jaxpr(lambda f: jax.vjp(lambda f: loss_of(run(f)), f)[1])(floats).jaxpr
    residuals = {v for v in traced.outvars if not isinstance(v, Literal)} - {*traced.invars, *traced.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in residuals)


def names_of(p: FunctionProgram) -> set[str]:
    """Return the names that a function gives, where each operation inside is counted as one that does."""
    return {each.name for each in p.operations if each.name is not None} | ({"a"} if p.named_argument else set())

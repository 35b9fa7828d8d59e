"""Random models and functions in JAX with recompute, offload and hyper-connections, compared with the plain ones.

A program is either a function of pytrees with named values, or an nnx model of random parts. The techniques are applied
from outside. Outputs, gradients, state and parameters after some steps must be those of the plain program, or an error
of this project must name the cause. Recompute of a function must not save more bytes for backward.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_impl.recompute import recompute_modules
from tests.fuzz.grammars import _modules_jax_functions as functions
from tests.fuzz.grammars import _modules_jax_models as models
from tests.fuzz.grammars import _modules_jax_training as training
from tests.fuzz.grammars._modules_jax_functions import FunctionProgram, Operation
from tests.fuzz.grammars._modules_jax_models import ModelProgram, Technique
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

Program = FunctionProgram | ModelProgram

KNOWN = frozenset({"late optimizer", "optimizer state in a scan", "read outside of its module"})
"""Features that are left out, because the project ends with an error of JAX or flax for each.

read outside of its module: a parameter of an offloaded module that the code of another one reads.
late optimizer: an optimizer that is made after offload.
optimizer state in a scan: moments are on the device before the first step and on the host after it.
"""
SLACK = 1600
"""Bytes that may be saved besides: one reduced value, of which JAX saves a float in the place of a boolean."""
HARD_CASES = frozenset(
    {"function", "model", "recompute", "offload", "hyper-connections", "two techniques", "activations"}
    | {"optimizer state", "eager", "jit", "vmap", "twice", "checkpoint", "scan", "donate", "state", "shared", "removed"}
    | {"called twice", "tuple or dict", "mask", "keywords", "embed", "name of a name", "result has a name"}
    | {
        "argument has a name",
        "read by several",
        "integers or booleans",
        "other dtypes",
        "other leaves",
        "jitted inside",
    }
)
SURROUNDINGS = {"eager": 0.5, "jit": 0.14, "vmap": 0.1, "twice": 0.1, "checkpoint": 0.08, "scan": 0.04, "donate": 0.04}
RARE = {"names in scan": 0.15, "names in checkpoint": 0.3, "scan": 0.4, "loop": 0.4, "cond": 0.4}
"""Probability that a drawn operation stays, of those that are refused or slow."""


def draw(rng: np.random.Generator) -> Program:
    """See tests.fuzz.harness.Fuzzer."""
    return _draw_function(rng) if rng.random() < 0.7 else _draw_model(rng)


def _choice(rng: np.random.Generator, options: Any) -> Any:
    if isinstance(options, dict):
        weights = np.array([*options.values()])
        return [*options][rng.choice(len(options), p=weights / weights.sum())]
    return options[rng.integers(len(options))]


def _draw_function(rng: np.random.Generator) -> FunctionProgram:
    operations = []
    kinds = [*functions.OPERATIONS]
    count = int(rng.integers(2, 6))
    while len(operations) < count:
        kind = _choice(rng, kinds)
        if rng.random() > RARE.get(kind, 1.0):
            continue
        last = len(operations) + 1
        reads = (last if rng.random() < 0.7 else int(rng.integers(last + 1)), int(rng.integers(last + 1)))
        name = None if rng.random() < 0.3 else _choice(rng, ["a", "b", "bc"])
        place = _choice(rng, ["result", "result", "inside", "both", "twice"])
        operations.append(Operation(kind, reads, name, place))
    last = len(operations) + 1
    results = [last] if rng.random() < 0.7 else [last, int(rng.integers(last + 1))]
    named_argument = bool(rng.random() < 0.15)
    names = sorted({each.name for each in operations if each.name is not None} | ({"a"} if named_argument else set()))
    if not names:
        operations[-1] = replace(operations[-1], name="a")
        names = ["a"]
    patterns = [name for name in names if rng.random() < 0.7] or names[:1]
    if rng.random() < 0.2:
        patterns = _choice(rng, [["*"], [f"{names[0]}*"], ["[abc]*"]])
    return FunctionProgram(
        operations=tuple(operations),
        results=tuple(results),
        structure=_choice(rng, ["array", "tuple", "tuple", "dict", "with a text"]),
        named_argument=named_argument,
        leaves=_choice(rng, ["jax", "numpy", "mixed", "mixed"]),
        patterns=tuple(patterns),
        form=_choice(rng, {"plain": 0.7, "jitted": 0.1, "twice": 0.1, "of a method": 0.1}),
        surroundings=_choice(rng, SURROUNDINGS),
        calls=2 if rng.random() < 0.15 else 1,
        seed=int(rng.integers(2**31)),
    )


def _draw_model(rng: np.random.Generator) -> ModelProgram:
    kinds = [*models.PARTS]
    blocks = tuple(
        tuple(_choice(rng, kinds) for _ in range(rng.integers(1, 3))) for _ in range(2 + (rng.random() < 0.2))
    )
    if rng.random() < 0.4:
        blocks = blocks[:1] * len(blocks)
    container = _choice(rng, ["list", "list", "dict", "sequential"])
    surroundings = _choice(rng, SURROUNDINGS | {"vmap": 0.05})
    p = ModelProgram(
        blocks=blocks,
        container=container,
        holder=_choice(rng, ["attributes", "list", "dict"]),
        shared=bool(rng.random() < 0.2),
        twice=bool(rng.random() < 0.25),
        output="array" if container == "sequential" else _choice(rng, ["array", "array", "tuple", "dict"]),
        arguments="none" if container == "sequential" else _choice(rng, ["none", "mask", "keywords"]),
        embedded=_choice(rng, {"none": 0.6, "embed": 0.25, "tied": 0.15}),
        techniques=(),
        surroundings="eager" if surroundings == "twice" else surroundings,
        events=_draw_events(rng, surroundings),
        optimizer=_choice(rng, [*training.OPTIMIZERS]),
        penalty=bool(rng.random() < 0.15),
        late=bool(rng.random() < 0.2 and "late optimizer" not in KNOWN),
        seed=int(rng.integers(2**31)),
    )
    count = 2 if rng.random() < 0.3 else 1
    names = [str(name) for name in rng.permutation(["recompute", "offload", "hyper-connections"])[:count]]
    return replace(p, techniques=tuple(_draw_technique(rng, p, name) for name in names))


def _draw_events(rng: np.random.Generator, surroundings: str) -> tuple[str, ...]:
    if surroundings in ("jit", "scan", "donate"):  # each step is compiled
        return (
            ("none",) if rng.random() < 0.5 else ("none", _choice(rng, ["none", *training.REMOVALS, "again", "eval"]))
        )
    first = _choice(rng, ["none", "none", "none", "eval", "clone", "again"])
    return first, _choice(rng, ["none", "none", *training.REMOVALS, "again", "train", "clone"])


def _draw_technique(rng: np.random.Generator, p: ModelProgram, name: str) -> Technique:
    place = {"list": "blocks.{}", "dict": "blocks.b{}", "sequential": "blocks.layers.{}"}[p.container]
    every = place.format("*")
    each = [place.format(k) for k in range(len(p.blocks))]
    some = [every] if rng.random() < 0.6 else [block for block in each if rng.random() < 0.6] or each[:1]
    if name == "hyper-connections":
        settings = {"num_residual_streams": int(rng.integers(2, 4)), "hidden_size": models.WIDTH}
        return Technique(name, (every,), settings=tuple(settings.items()))
    part = {"attributes": "p{}", "list": "parts.{}", "dict": "parts.p{}"}[p.holder]
    if name == "recompute":
        where = p.blocks if some == [every] else [p.blocks[each.index(block)] for block in some]
        numbers = [k for k in range(3) if all(len(block) > k and block[k] != "function" for block in where)]
        inner = [part.format(k) for k in numbers if rng.random() < 0.6] or [part.format(0)]
        inner = [part.format("*")] if rng.random() < 0.25 else inner
        if rng.random() < 0.1:
            return Technique(name, ("",), tuple(f"{every}.{each}" for each in inner))
        return Technique(name, tuple(some), tuple(inner))
    has_weights = all(block[0] not in ("activation", "function", "counter", "dropout", "average") for block in p.blocks)
    if rng.random() < 0.25 and has_weights:
        some = [f"{block}.{part.format(0)}" for block in some]
    if (
        p.embedded != "none"
        and rng.random() < 0.3
        and not (p.embedded == "tied" and "read outside of its module" in KNOWN)
    ):
        some = [*some, "embed"]
    if rng.random() < 0.1:
        some = [""]
    settings = {"activations": bool(rng.random() < 0.4), "optimizer_state": bool(rng.random() < 0.4)}
    if p.surroundings == "scan" and "optimizer state in a scan" in KNOWN:
        settings["optimizer_state"] = False
    settings |= {"activation_min_bytes": int(rng.choice([0, 0, 100, 2**16]))}
    return Technique(name, tuple(some), settings=tuple(settings.items()))


def features(program: Program) -> Iterator[str]:
    """See tests.fuzz.harness.Fuzzer."""
    p = program
    yield p.surroundings
    if isinstance(p, FunctionProgram):
        yield from _features_of_function(p)
    else:
        yield from _features_of_model(p)


def _features_of_function(p: FunctionProgram) -> Iterator[str]:
    reads = [k for each in p.operations for k in set(each.reads)]
    places = {k + 2 for k, each in enumerate(p.operations) if each.name is not None}
    kinds = {each.kind for each in p.operations}
    inside = {each.kind for each in p.operations if each.name is not None and each.place in ("inside", "both")}
    names = {
        "function": True,
        "recompute": True,
        "name of a name": any(each.place == "twice" for each in p.operations),
        "result has a name": any(k in places for k in p.results),
        "argument has a name": p.named_argument,
        "read by several": any(reads.count(k) > 1 for k in places),
        "integers or booleans": inside & {"where", "take", "rounded", "dropout"},
        "other dtypes": inside & {"float32", "bfloat16"},
        "other leaves": p.leaves == "mixed",
        "jitted inside": inside & {"jitted", "jitted twice"},
    }
    yield from (name for name, is_there in names.items() if is_there)
    yield from kinds


def _features_of_model(p: ModelProgram) -> Iterator[str]:
    settings = {name for each in p.techniques for name, value in each.settings if value is True}
    kinds = {kind for block in p.blocks for kind in block}
    names = {
        "model": True,
        "two techniques": len(p.techniques) == 2,
        "activations": "activations" in settings,
        "optimizer state": "optimizer_state" in settings,
        "state": kinds & {"batch norm", "counter", "average", "dropout"},
        "shared": p.shared,
        "removed": {*p.events} & {*training.REMOVALS},
        "called twice": p.twice,
        "tuple or dict": p.output != "array",
        "mask": p.arguments == "mask",
        "keywords": p.arguments == "keywords",
        "embed": p.embedded != "none",
    }
    yield from (name for name, is_there in names.items() if is_there)
    yield from (each.name for each in p.techniques)
    yield from kinds


def check(program: Program) -> Outcome:
    """See tests.fuzz.harness.Fuzzer."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers", UserWarning)
        warnings.filterwarnings("ignore", "scatter inputs have incompatible types", FutureWarning)
        return _check_function(program) if isinstance(program, FunctionProgram) else _check_model(program)


def _is_ours(error: Exception) -> bool:
    is_kind = isinstance(error, ValueError | TypeError | NotImplementedError)
    return is_kind and re.match(r"[^:\n]+: expected .*, got ", str(error), re.DOTALL) is not None


def _recomputed(p: FunctionProgram, function: Any) -> Any:
    if p.form == "jitted":
        return recompute_modules(jax.jit(function), [*p.patterns])
    if p.form == "twice" and len(p.patterns) > 1:
        return recompute_modules(recompute_modules(function, [*p.patterns[:1]]), [*p.patterns[1:]])
    if p.form == "of a method":
        return recompute_modules(_Callable(function), [*p.patterns])
    return recompute_modules(function, [*p.patterns])


class _Callable:
    """An object that is called."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _check_function(p: FunctionProgram) -> Outcome:
    if p.form == "jitted":
        p = replace(p, leaves="jax", structure="tuple")
    function = functions.make_function(p)
    expected = functions.run_function(p, function)
    other = _recomputed(p, function)
    try:
        found = functions.run_function(p, other)
        saved = functions.saved_bytes(p, other)
    except Exception as error:
        if not _is_ours(error):
            raise
        return Outcome(REFUSED, str(error))
    reorders = p.surroundings in ("jit", "scan", "donate", "twice")
    narrow = max((functions.NARROW.get(each.kind, 0.0) for each in p.operations), default=0.0)
    _compare(found, expected, (narrow if reorders else 0.0) or (1e-9 if p.surroundings == "twice" else 1e-12))
    allowed = functions.saved_bytes(p, function) + _allowance(p)
    if saved > allowed + SLACK:
        values = functions.VALUE_BYTES
        raise Wrong(f"saved bytes: {saved / values:.2f} values of {values} bytes, allowed {allowed / values:.2f}")
    return Outcome(EQUAL)


def _allowance(p: FunctionProgram) -> int:
    """Return the bytes of what operations of named values read, which may stay instead of their results."""
    named = [each for each in p.operations if each.name is not None]
    reads = {k for each in named for k in each.reads} - {0, 1}
    halves = sum(each.kind == "split" for each in named)  # what its concatenation reads, although that is linear
    return len(reads) * functions.VALUE_BYTES + halves * functions.VALUE_BYTES // 2


def _check_model(p: ModelProgram) -> Outcome:
    try:
        expected = training.run_model(p, True)
    except Exception as error:  # such as sow in a scan
        return Outcome(REFUSED, f"plain program: {error}")
    try:
        found = training.run_model(p, False)
    except Exception as error:
        if not _is_ours(error):
            raise
        return Outcome(REFUSED, str(error))
    has_connections = any(each.name == "hyper-connections" for each in p.techniques)
    if found.pop("structure", None) != expected.pop("structure", None):
        raise Wrong("the structure of the model differs after all is removed")
    _compare(found, expected, 1e-10 if has_connections else 1e-12)
    return Outcome(EQUAL)


def _compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compare arrays by name, relative to the largest element of each.

    Raises:
        Wrong: if names, shapes, types or elements differ.
    """
    if found.keys() != expected.keys():
        raise Wrong(f"names {sorted(found.keys() ^ expected.keys())}")
    whole = max((_largest(x) for x in expected.values()), default=0.0)
    for name, value in expected.items():
        ours, theirs = np.asarray(found[name]), np.asarray(value)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise Wrong(f"{name}: expected {theirs.dtype}{theirs.shape}, got {ours.dtype}{ours.shape}")
        if not np.issubdtype(theirs.dtype, np.floating):
            if not np.array_equal(ours, theirs):
                raise Wrong(f"{name}: expected {theirs}, got {ours}")
            continue
        if not (np.isfinite(ours) == np.isfinite(theirs)).all():
            raise Wrong(f"{name}: not finite in one of both")
        difference = _largest(ours - theirs) / max(_largest(theirs), 1e-3 * whole, 1e-30)
        if difference > tolerance:
            raise Wrong(f"{name}: relative difference {difference:.1e}")


def _largest(x: Any) -> float:
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating) or not x.size:
        return 0.0
    return float(np.nanmax(np.where(np.isfinite(x), np.abs(x), 0.0).astype(np.float64)))

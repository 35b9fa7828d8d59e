"""Random models of users with techniques that are applied from outside, compared with the plain model."""

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_torch.offload import OffloadError
from reference_torch.recompute.guards import RecomputeError, RecomputeMismatchError
from tests.fuzz.grammars._modules_model import BlockSpec, Part, Program, Technique
from tests.fuzz.grammars._modules_parts import CALLS, INNER, KINDS, SPECIAL
from tests.fuzz.grammars._modules_run import Run
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

CONTAINERS = ("list", "sequential", "dict")
AROUND = (
    *("nothing", "parameter", "noise", "buffer", "positions", "skip", "parameter list", "tied by a function"),
    *("generator", "autograd function", "attribute"),
)
TECHNIQUES = {
    ("recompute",): 4,
    ("offload",): 4,
    ("split",): 3,
    ("hyper",): 3,
    ("recompute", "offload"): 2,
    ("offload", "recompute"): 2,
    ("recompute", "split"): 1,
    ("split", "recompute"): 1,
    ("split", "offload"): 1,
    ("hyper", "recompute"): 1,
    ("recompute", "hyper"): 1,
    ("hyper", "offload"): 1,
    ("offload", "hyper"): 1,
    ("hyper", "split"): 1,
}
"""Techniques in the order in which they are applied, and their weights."""
ACTIONS = {
    "step": 8,
    "accumulate": 3,
    "forwards": 3,
    "eval": 3,
    "no grad": 2,
    "inference": 3,
    "checkpoint": 3,
    "save on cpu": 1,
    "autocast": 2,
    "penalty": 1,
    "backward twice": 2,
    "deepcopy": 2,
    "pickle": 2,
    "remove": 2,
    "apply again": 2,
    "report": 2,
    "raise in forward": 2,
    "raise in backward": 2,
    "read": 1,
    "load": 2,
    "freeze": 1,
    "capture": 2,
}
COMPILED = 0.005
"""Share of programs that compile the model, which takes seconds."""
HARD_CASES = frozenset(
    {*ACTIONS, *KINDS, *SPECIAL, *CALLS, *CONTAINERS, *AROUND, *(" then ".join(t) for t in TECHNIQUES)}
    | {"tied", "shared part", "repeated", "nested", "in place", "into branch", "mask", "cut inside", "adamw"}
)
TOLERANCE = 1e-10
"""Largest difference of hyper-connections that keep the function, relative to the largest value or to 1."""
STAGED = 1e-13
"""The same for stages, which may add gradients in another order."""


def _weighted(rng: np.random.Generator, weights: Mapping[Any, float]) -> Any:
    values = np.array([*weights.values()], float)
    return [*weights][rng.choice(len(weights), p=values / values.sum())]


def draw(rng: np.random.Generator) -> Program:
    """Draw a model, one or two techniques, and four to eight actions."""
    techniques: tuple[str, ...] = _weighted(rng, TECHNIQUES)
    hyper = "hyper" in techniques
    container = str(rng.choice(CONTAINERS))
    simple = container == "sequential"
    blocks = [_block(rng, simple, hyper) for _ in range(2 if rng.random() < 0.75 else 3)]
    shared = bool(rng.random() < 0.2)
    if shared:
        blocks[-1] = BlockSpec((blocks[0].parts[0], *blocks[-1].parts[1:]), blocks[-1].residual, blocks[-1].output)
    nested = bool(rng.random() < 0.25)
    around = str(rng.choice(AROUND))
    kinds = {part.kind for block in blocks for part in block.parts}
    actions = _actions(rng, techniques, kinds, shared)
    prefix = "core.blocks." if nested else "blocks."
    names = [f"{prefix}layer{k}" if container == "dict" else f"{prefix}{k}" for k in range(len(blocks))]
    return Program(
        blocks=tuple(blocks),
        container=container,
        nested=nested,
        arguments="none" if simple else str(rng.choice(["none", "positional", "keyword"])),
        tied=bool(rng.random() < 0.4),
        shared_part=shared,
        repeated=bool(not simple and not hyper and rng.random() < 0.1),
        around=around,
        output=str(rng.choice(["tensor", "tuple", "dict", "object"], p=[0.4, 0.2, 0.2, 0.2])),
        dtype="float32" if "autocast" in actions else "float64",
        optimizer="adamw" if techniques != ("hyper",) and rng.random() < 0.5 else "sgd",
        techniques=tuple(_technique(rng, name, names, blocks, techniques, shared) for name in techniques),
        actions=tuple((str(name), int(rng.integers(1000))) for name in actions),
    )


def _actions(rng: np.random.Generator, techniques: tuple[str, ...], kinds: set[str], shared: bool) -> list[str]:
    """Draw names of actions, among them at least two steps of an optimizer."""
    weights = np.array([*ACTIONS.values()]) / sum(ACTIONS.values())
    actions = [str(name) for name in rng.choice([*ACTIONS], size=rng.integers(2, 5), p=weights)]
    actions.insert(int(rng.integers(len(actions) + 1)), "step")
    if "remove" in actions and rng.random() < 0.5:
        actions += ["apply again", "step"]
    if rng.random() < COMPILED and "split" not in techniques:
        actions.insert(0, "compile")
    if techniques == ("hyper",):  # compared with a tolerance
        actions = [name for name in actions if name not in ("autocast", "load", "penalty")]
    if "weight norm" in kinds:  # PyTorch does not pickle parametrized modules
        actions = ["deepcopy" if name == "pickle" else name for name in actions]
    return [*actions, "step"]


def _block(rng: np.random.Generator, simple: bool, hyper: bool) -> BlockSpec:
    parts = []
    for _ in range(rng.integers(1, 4) if rng.random() < 0.5 else 2):
        kind = str(rng.choice([*KINDS, *SPECIAL]))
        way = str(rng.choice(CALLS)) if kind in KINDS and rng.random() < 0.5 else "once"
        if kind == "backward hook":  # PyTorch refuses changes in place of its result
            way = "held"
        parts.append(Part(kind, way))
    residuals = ("plain", "into branch") if hyper else ("plain", "into branch", "in place")
    forms = ("tensor",) if simple else ("tensor", "tuple") if hyper else ("tensor", "tuple", "dict")
    residual = "plain" if rng.random() < 0.5 else str(rng.choice(residuals))
    return BlockSpec(tuple(parts), residual, str(rng.choice(forms)))


def _technique(
    rng: np.random.Generator,
    name: str,
    names: list[str],
    blocks: list[BlockSpec],
    together: tuple[str, ...],
    shared: bool,
) -> Technique:
    """Draw the arguments of a technique."""
    if name == "recompute":
        chosen = [k for k in range(len(blocks)) if rng.random() < 0.8] or [0]
        return Technique(name, tuple((names[k], _submodules(rng, blocks[k])) for k in chosen))
    if name == "hyper":
        return Technique(
            name, tuple((block, ()) for block in names), (("num_residual_streams", int(rng.choice([2, 4]))),)
        )
    if name == "split":
        return _split(rng, names, "hyper" in together or shared)
    settings = {
        "activations": bool(rng.random() < 0.5),
        "activation_min_bytes": 1,
        "optimizer_state": bool(rng.random() < 0.5),
        "gradients": bool(rng.random() < 0.4),
        "num_prefetch_layers": int(rng.choice([0, 0, 1, 2])),
    }
    chosen_names = [block for block in names if rng.random() < 0.8] or names[:1]
    if rng.random() < 0.2 and "split" not in together and not shared:
        chosen_names = [f"{block}.parts" if rng.random() < 0.3 else f"{block}.parts.0" for block in chosen_names]
    if shared and rng.random() < 0.8:  # a submodule of two offloaded blocks is refused
        chosen_names = names[:1]
    elif rng.random() < 0.2 and "split" not in together:
        chosen_names = [names[0].rpartition(".")[0] + ".*"]
    return Technique(name, tuple((block, ()) for block in chosen_names), tuple(settings.items()))


def _submodules(rng: np.random.Generator, block: BlockSpec) -> tuple[str, ...]:
    """Draw patterns of submodules of a block."""
    if rng.random() < 0.1:
        return ("norm", "parts.*")
    found = ["norm"] if rng.random() < 0.6 else []
    for k, part in enumerate(block.parts):
        if rng.random() < 0.6:
            inner = INNER.get(part.kind)
            found.append(f"parts.{k}.{inner}" if inner and rng.random() < 0.3 else f"parts.{k}")
    return tuple(found or ["norm"])


def _split(rng: np.random.Generator, names: list[str], whole_blocks: bool) -> Technique:
    """Draw cuts: mostly blocks, sometimes a submodule of a block, or what follows the blocks."""
    cuts = [name for name in names[1:] if rng.random() < 0.6]
    if rng.random() < 0.2 and not whole_blocks:
        cuts = [f"{names[1]}.parts.0"]
    if rng.random() < 0.2:
        cuts.append(names[0].rpartition("blocks")[0] + str(rng.choice(["norm", "head"])))
    cuts = cuts or [names[1]]
    return Technique("split", tuple((name, ()) for name in cuts), (("example", bool(rng.random() < 0.7)),))


def features(program: Program) -> Iterable[str]:
    """Name submodules, calls, techniques and actions."""
    for block in program.blocks:
        yield block.residual
        for part in block.parts:
            yield from (part.kind, part.way)
    yield from (program.container, program.around, program.optimizer)
    yield from (name for name, _ in program.actions)
    yield " then ".join(technique.name for technique in program.techniques)
    if program.arguments != "none":
        yield "mask"
    if any(".parts." in name for t in program.techniques if t.name == "split" for name, _ in t.patterns):
        yield "cut inside"
    marks = {"tied": program.tied, "shared part": program.shared_part, "repeated": program.repeated}
    yield from (name for name, value in (marks | {"nested": program.nested}).items() if value)


def check(program: Program) -> Outcome:
    """Run the actions on both models, and compare their results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _start_compiler()
        return _check(program)


@cache
def _start_compiler() -> None:
    """Compile a function, so that the threads that this starts do not count as a leak of a program."""
    linear = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")
    linear(torch.ones(1, 2)).sum().backward()


def _check(program: Program) -> Outcome:
    names = [technique.name for technique in program.techniques]
    alone = names == ["hyper"]
    tolerance = TOLERANCE if alone else STAGED if "split" in names else 0.0
    if program.dtype == "float32" and "split" in names:
        tolerance = 1e-5
    base = () if alone else tuple(t for t in program.techniques if t.name == "hyper")
    runs = [Run(program, base), Run(program, program.techniques)]
    try:
        try:
            for run in runs:
                run.apply()
        except Exception as error:
            return _refused("the techniques", error)
        for place, (name, number) in enumerate(program.actions):
            where = f"action {place}, {name}"
            expected, found = (run.act(name, number) for run in runs)
            if isinstance(expected, Exception):
                if isinstance(found, Exception) and type(found) is not type(expected):
                    _refused(where, found)
                return Outcome(REFUSED, f"plain program: {str(expected)[:60]}")
            if isinstance(found, Exception):
                return _refused(where, found)
            _compare(where, expected, found, tolerance)
            if alone and name in ("remove", "apply again"):
                tolerance = TOLERANCE if runs[1].handles or runs[1].is_copy else 0.0
                _synchronize(*runs)
        _compare("the end", runs[0].read(), runs[1].read(), tolerance)
        for run in runs:
            run.close()
        _compare("after removal", runs[0].read(), runs[1].read(), tolerance)
    finally:
        for run in runs:
            run.close()
    return Outcome(EQUAL)


def _synchronize(plain: Run, other: Run) -> None:
    """Give both models the same state, since hyper-connections change it by rounding."""
    state = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    other.model.load_state_dict(state, strict=not other.handles and not other.is_copy)
    for run in (plain, other):
        run.model.zero_grad()
        run.make_optimizer()


def _refused(where: str, error: Exception) -> Outcome:
    """Return the refusal of an error of this project.

    Raises:
        Wrong: if the error is of another origin.
    """
    if isinstance(error, RecomputeMismatchError):
        raise Wrong(f"{where}: a replay differs, though each call does the same: {error}") from error
    named = isinstance(error, ValueError | TypeError | NotImplementedError)
    if isinstance(error, RecomputeError | OffloadError) or (named and "expected" in str(error) and "got" in str(error)):
        return Outcome(REFUSED, f"{type(error).__name__}: {error}")
    raise Wrong(f"{where}: {error!r}") from error


def _compare(where: str, expected: dict[str, Any], found: dict[str, Any], tolerance: float) -> None:
    if expected.keys() != found.keys():
        difference = sorted(expected.keys() ^ found.keys())
        raise Wrong(f"{where}: expected the same names, got a difference of {difference}")
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            equal = type(value) is type(other) and value == other
        else:
            equal = _is_equal(value, other, tolerance)
        if not equal:
            raise Wrong(f"{where}: {name}: expected {value}, got {other}")


def _is_equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if values are equal, bitwise without a tolerance."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if tolerance and one.is_floating_point():
        scale = max(1.0, float(one.abs().max())) if one.numel() else 1.0
        return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale, equal_nan=True)
    one, other = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(one, other)

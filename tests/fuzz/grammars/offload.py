"""Random actions on a model with an offload manager, compared with the same model without one."""

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from reference_torch.offload import OffloadError
from reference_torch.recompute.guards import RecomputeError
from tests.fuzz.grammars._offload_model import Program
from tests.fuzz.grammars._offload_user import ALIASES, Run, alias_of
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

LAYERS = ("mlp", "bias", "buffer", "batchnorm", "adapted", "scale", "frozen", "complex", "dropout", "view")
ORDERS = ("plain", "twice", "reversed", "parallel", "checkpoint", "reentrant", "region")
TIES = ("none", "layers", "head", "whole layer")
OPTIMIZERS = ("sgd", "adamw", "adamw fused", "adamw foreach", "in backward")
ACTIONS = {
    "train": 10,
    "forward": 2,
    "backward": 3,
    "no_grad": 3,
    "inference": 4,
    "eval": 2,
    "optimizer step": 3,
    "raise in forward": 2,
    "raise in backward": 2,
    "interrupt": 2,
    "train only norms": 2,
    "hook": 2,
    "alias": 6,
    "write alias": 3,
    "drop aliases": 1,
    "write parameter": 3,
    "keep gradients": 3,
    "write gradients": 3,
    "read parameters": 2,
    "penalty": 4,
    "torch.save": 3,
    "save module": 3,
    "state_dict": 3,
    "safetensors": 1,
    "load": 3,
    "deepcopy": 3,
    "freeze": 1,
    "move": 3,
    "close": 2,
    "drop": 3,
    "register again": 2,
    "grad of input": 2,
    "double backward": 1,
    "functional_call": 1,
}
HARD_CASES = frozenset(
    {
        *ACTIONS,
        *LAYERS,
        *ORDERS,
        *TIES,
        *OPTIMIZERS,
        *ALIASES,
        "activations",
        "gradients",
        "clip",
        "alias before registration",
    }
)


def draw(rng: np.random.Generator) -> Program:
    """Draw a program of three to ten actions."""
    names = list(ACTIONS)
    weights = np.array([*ACTIONS.values()], float)
    actions = rng.choice(names, size=rng.integers(3, 11), p=weights / weights.sum())
    return Program(
        layers=tuple(map(str, rng.choice(LAYERS, size=rng.integers(2, 6)))),
        order=str(rng.choice(ORDERS)),
        tie=str(rng.choice(TIES, p=[0.55, 0.15, 0.15, 0.15])),
        optimizer=str(rng.choice(OPTIMIZERS)),
        num_prefetch_layers=int(rng.choice([0, 0, 1, 1, 2, 9])),
        activations=bool(rng.random() < 0.3),
        clip=bool(rng.random() < 0.4),
        early_alias=bool(rng.random() < 0.2),
        actions=tuple((str(name), int(rng.integers(1000))) for name in actions),
        gradients=bool(rng.random() < 0.4),
    )


def features(program: Program) -> Iterable[str]:
    """Name layers, order, tie, optimizer, options and actions."""
    yield from program.layers
    yield from (program.order, program.tie, program.optimizer)
    yield from (name for name, _ in program.actions)
    yield from (alias_of(number) for name, number in program.actions if name == "alias")
    if program.activations:
        yield "activations"
    if program.gradients:
        yield "gradients"
    if program.clip:
        yield "clip"
    if program.early_alias:
        yield "alias before registration"


@contextlib.contextmanager
def _inputs_without_gradient_do_not_warn() -> Iterator[None]:
    """Reentrant checkpoints and hooks of backward warn about inputs without gradient, also in the plain program."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


@_inputs_without_gradient_do_not_warn()
def check(program: Program) -> Outcome:
    """Run the actions on both models, and compare their results."""
    threads = threading.active_count()
    runs = [Run(program, offload=False), Run(program, offload=True)]
    try:
        for place, (name, number) in enumerate(program.actions):
            results = [run.act(name, number) for run in runs]
            if isinstance(results[1], OffloadError | RecomputeError):
                return Outcome(REFUSED, str(results[1]))
            _compare(f"action {place}, {name}", *results)
            if isinstance(results[0], Exception):  # the state after an exception is unspecified
                return Outcome(EQUAL)
        results = [run.end() for run in runs]
        _compare("the end", *results)
    finally:
        for run in runs:
            run.close()
        del run
    model_reference = weakref.ref(runs[1].model)
    runs.clear()
    if model_reference() is not None or threading.active_count() > threads:
        gc.collect()
    if model_reference() is not None:
        raise Wrong("the model is still there after manager and model have been dropped")
    # After a failed backward, the engine of PyTorch holds the rest of the graph, and with it host memory and links.
    fails = any(name == "raise in backward" for name, _ in program.actions)
    if threading.active_count() > threads and not fails:
        raise Wrong(f"threads grew from {threads} to {threading.active_count()}")
    return Outcome(EQUAL)


def _compare(where: str, expected: Any, found: Any) -> None:
    if isinstance(expected, Exception) or isinstance(found, Exception):
        if isinstance(expected, Exception) and type(expected) is type(found):
            return
        raise Wrong(f"{where}: expected {expected!r}, got {found!r}") from (
            found if isinstance(found, Exception) else None
        )
    if expected.keys() != found.keys():
        raise Wrong(f"{where}: expected {[*expected]}, got {[*found]}")
    for name, value in expected.items():
        other = found[name]
        equal = _is_equal(value, other) if isinstance(value, Tensor) else value == other
        if not equal:
            raise Wrong(f"{where}: {name}: expected {value}, got {other}")


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if values are bitwise equal, including NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.detach().cpu().resolve_conj().contiguous().numpy().tobytes() == (
        other.detach().cpu().resolve_conj().contiguous().numpy().tobytes()
    )

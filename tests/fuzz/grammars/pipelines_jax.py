"""Pipelines of the user's functions and nnx modules in JAX, on several devices, compared with one device.

Stages are unequal, and pytrees of several types are between them. Losses, gradients, outputs and state after some steps
must be those of the same stages one after the other, or an error of this project must name the cause.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from diptych.plans.schedule.placement import SCHEDULES
from tests.fuzz.grammars._pipelines_jax_run import LOSSES, Program
from tests.fuzz.grammars._pipelines_jax_stages import MESSAGES, MODULES, OPERATIONS, STATEFUL, StageSpec
from tests.fuzz.harness import Outcome
from tests.fuzz.jax_child import run_in_child
from tests.fuzz.schedules import VIRTUAL, enough_microbatches, stages_per_rank

FUSED = ("none", "1f1b", "interleaved")
"""Schedules that fused slots accept."""
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb1p", "dualpipe-v")
WITHOUT_SAMPLES = ("scalar", "constant", "empty")
"""Forms of messages with arrays that have no axis of samples."""
HARD_CASES = frozenset(
    {"functions", "modules", "state", "shared", "replicas", "jit", "pmap", "fused", "inputs kept", "split backward"}
    | {"evaluate", "forward", "equal stages", "one rank", "float32", "sum", "loss of the last stage", "evaluation mode"}
    | {"checkpoint", "policy", "layers", "custom product", "product of weights", "unused", "dropout in a checkpoint"}
)


def draw(rng: np.random.Generator) -> Program:
    """See tests.fuzz.harness.Fuzzer."""
    is_functions = rng.random() < 0.6
    name = _choice(rng, [name for name in SCHEDULES if name not in ("none", *VIRTUAL)] + [*VIRTUAL] * 2)
    ranks = 1 if rng.random() < 0.06 else _choice(rng, [2, 2, 2, 3, 4])
    v = stages_per_rank(rng, name)
    if ranks == 1:
        name = "none"
        v = 2
    m = enough_microbatches(name, ranks, int(rng.integers(1, 5)), v)
    parts = [*OPERATIONS] if is_functions else [*MODULES]
    forms = [*MESSAGES]
    stages = [
        StageSpec(
            tuple(_choice(rng, parts) for _ in range(rng.integers(1, 4))),
            int(_choice(rng, [4, 4, 6])),
            "array" if rng.random() < 0.4 else _choice(rng, forms),
        )
        for _ in range(ranks * v)
    ]
    if rng.random() < 0.3:
        stages = [stages[0]._replace(width=4)] * len(stages)
    does = _choice(rng, ["step"] * 8 + ["evaluate", "forward"])
    p = Program(
        ranks=ranks,
        schedule=name,
        stages=tuple(stages),
        num_microbatches=m,
        kind="functions" if is_functions else "modules",
        inputs=_choice(rng, ["floats", "tokens", "tuple", "dict"]),
        loss=_choice(rng, [*LOSSES, "squares", "squares"]),
        loss_reduction=_choice(rng, ["mean", "mean", "sum"]),
        replicas=2 if ranks == 2 and rng.random() < 0.25 else 1,
        saves=_choice(rng, ["residuals", "residuals", "inputs"]),
        slots=_choice(rng, ["canonical", "canonical", "fused"]),
        transform=_choice(rng, ["shard_map", "shard_map", "pmap"]),
        is_jitted=bool(does == "step" and rng.random() < 0.3),
        does=does,
        shares=(),
        evaluates_modules=bool(not is_functions and rng.random() < 0.15),
        seed=int(rng.integers(2**31)),
    )
    return _with_limits(rng, p)


def _choice(rng: np.random.Generator, options: Any) -> Any:
    return options[rng.integers(len(options))]


def _with_limits(rng: np.random.Generator, p: Program) -> Program:
    """Remove what has no meaning, or is refused by name for every program."""
    if p.kind == "modules" and p.loss == "of the last stage":
        p = replace(p, loss="squares")
    if p.replicas > 1:
        loss = "squares" if p.loss == "sum" else p.loss  # losses are means over the replicas
        p = replace(p, transform="shard_map", loss=loss, stages=tuple(_of_one_sample(spec) for spec in p.stages))
    if p.ranks == 1:
        p = replace(p, transform="shard_map")
    if p.transform == "pmap":
        p = replace(p, is_jitted=False)
    if p.schedule not in FUSED and rng.random() < 0.9:
        p = replace(p, slots="canonical")
    if _is_stateful(p) and rng.random() < 0.9:
        p = replace(p, saves="residuals")
    if p.kind == "functions" and rng.random() < 0.3:
        widths = [(spec.width, 4 if n == 0 else p.stages[n - 1].width) for n, spec in enumerate(p.stages)]
        equal = [n for n, shape in enumerate(widths) if shape == widths[-1] and (n or p.inputs != "tokens")]
        if len(equal) > 1:
            p = replace(p, shares=(equal[0], equal[-1]))
    return p


def _of_one_sample(spec: StageSpec) -> StageSpec:
    """Return a stage that computes each sample by itself, as replicas do."""
    mixing = ("over samples", "branches", *STATEFUL)
    operations = tuple("identity" if name == "over samples" or name == "branches" else name for name in spec.operations)
    operations = tuple("sine" if name in mixing else name for name in operations)
    return spec._replace(operations=operations, output="array" if spec.output in WITHOUT_SAMPLES else spec.output)


def _is_stateful(p: Program) -> bool:
    return p.kind == "modules" and any(name in STATEFUL for spec in p.stages for name in spec.operations)


def features(p: Program) -> Iterator[str]:
    """See tests.fuzz.harness.Fuzzer."""
    names = {
        "state": _is_stateful(p),
        "shared": p.shares or (p.kind == "modules" and sum("shared" in spec.operations for spec in p.stages) > 1),
        "replicas": p.replicas > 1,
        "jit": p.is_jitted,
        "fused": p.slots == "fused",
        "inputs kept": p.saves == "inputs",
        "split backward": p.schedule in SPLIT,
        "equal stages": len({*p.stages}) < len(p.stages),
        "one rank": p.ranks == 1,
        "sum": p.loss_reduction == "sum",
        "loss of the last stage": p.loss == "of the last stage",
        "evaluation mode": p.evaluates_modules,
    }
    yield from (name for name, is_there in names.items() if is_there)
    yield from {p.kind, p.transform, p.does, p.schedule}
    yield from {name for spec in p.stages for name in spec.operations}
    yield from {spec.output for spec in p.stages[:-1]}


def check(program: Program) -> Outcome:
    """See tests.fuzz.harness.Fuzzer."""
    return run_in_child("tests.fuzz.grammars._pipelines_jax_run:check_quietly", program)

"""Pipelines of user-written stages on real ranks, compared with the same stages composed in one process.

Most programs train. In some, a stage or a reducer returns a value that a pipeline cannot send or differentiate. In
others, one rank raises an exception. Both must end soon, with an error that names the stage and the returned value, or
with the exception itself.
"""

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch._dynamo  # torch.utils.checkpoint loads it on first use, which is not a leak

from diptych.plans.schedule.placement import SCHEDULES, V_SCHEDULES
from parity.tolerances import GRADIENT
from reference_torch import rank_pool
from reference_torch.rank_pool import RankError, RankPool, preload
from tests.fuzz.grammars import _pipeline_steps as steps
from tests.fuzz.grammars._pipeline_stages import (
    BAD,
    BAD_LOSSES,
    OPERATIONS,
    OUTPUTS,
    Program,
    StageSpec,
)
from tests.fuzz.grammars._pipeline_steps import Cut, Result
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong
from tests.fuzz.schedules import VIRTUAL, enough_microbatches, stages_per_rank

JOB = "tests.fuzz.grammars._pipeline_steps:run"
preload("tests.fuzz.grammars._pipeline_steps")
SECONDS = 15.0
"""Timeout in seconds; programs take milliseconds."""
GRACE = 0.15
"""Seconds in which the other ranks must answer after the first error."""
SHARE = {"bfloat16": 1.0, "float32": 1e-2, "float64": 1e-2}
"""Share of the largest gradient norm below which terms cancel; see parity.tolerances.GRADIENT_FLOOR."""

RARE = ("input in place", "input view in place", "reused scratch", "identity", "unused", "cube", "exp", "checkpoint")
"""Rare operations: in place, without parameters that learn in a first stage, or slow."""

HARD_CASES = frozenset(
    {
        "bad output",
        "bad loss",
        "exception in forward",
        "exception in backward",
        "several tensors",
        "replicas",
        "lengths differ",
        "split backward",
        "neighbours on one rank",
        "stages of one rank share a map",
        "hook",
        "in place",
        "two steps",
        "forward only",
        "reused data",
        "bf16",
    }
)


# Drawing.


def draw(rng: np.random.Generator) -> Program:
    """Draw a program."""
    name = str(rng.choice([name for name in SCHEDULES if name not in ("none", *VIRTUAL)] + [*VIRTUAL] * 2 + ["none"]))
    p = 1 if name == "none" else int(rng.choice([2, 2, 2, 3, 4]))
    v = stages_per_rank(rng, name)
    m = enough_microbatches(name, p, int(rng.integers(1, 7)), v)
    dtype = str(rng.choice(["float64", "float64", "float32"]))
    program = Program(
        p,
        name,
        tuple(_draw_stage(rng) for _ in range(p * v)),
        m,
        v,
        replicas=2 if p == 2 and rng.random() < 0.1 else 1,
        tensors=int(rng.integers(2, 4)) if v == 1 and p > 1 and rng.random() < 0.25 else 1,
        dtype=dtype,
        bf16=dtype == "float32" and rng.random() < 0.25,
        size=int(rng.integers(1, 3)),
        data="reused" if rng.random() < 0.06 else "fresh",
        reducer="tokens" if rng.random() < 0.2 else "mean",
        steps=2 if rng.random() < 0.1 else 1,
        deallocate=rng.random() < 0.8,
        overlap=rng.random() < 0.8,
    )
    return _with_rarities(rng, program)


def _draw_stage(rng: np.random.Generator) -> StageSpec:
    names = OPERATIONS if rng.random() < 0.1 else tuple(name for name in OPERATIONS if name not in RARE)
    operations = tuple(str(each) for each in rng.choice(names, rng.integers(1, 4)))
    return StageSpec(operations, str(rng.choice([*OUTPUTS])) if rng.random() < 0.5 else "tensor")


def _with_rarities(rng: np.random.Generator, program: Program) -> Program:
    """Draw rare properties: lengths, divisions and errors."""
    if rng.random() < 0.15 and program.data == "fresh":
        program = replace(program, lengths=tuple(int(n) for n in rng.integers(1, 6, program.num_microbatches)))
    if program.reducer == "tokens" and rng.random() < 0.5:
        program = replace(program, per_token=True)
    chance = rng.random()
    number = int(rng.integers(len(program.stages)))
    if chance < 0.1 and number < len(program.stages) - 1:
        spec = replace(program.stages[number], output=str(rng.choice([*BAD])))
        return replace(program, stages=(*program.stages[:number], spec, *program.stages[number + 1 :]), steps=1)
    if chance < 0.14:
        return replace(program, reducer=str(rng.choice([*BAD_LOSSES])), per_token=False, steps=1)
    if chance < 0.22:
        raises = str(rng.choice(["F", "B"])), number, int(rng.integers(program.num_microbatches))
        return replace(program, raises=raises, steps=1)
    return replace(program, forward_only=chance > 0.94)


def features(program: Program) -> Iterable[str]:
    """Name the difficult features of a program."""
    names = [name for spec in program.stages for name in spec.operations]
    outputs = {spec.output for spec in program.stages[:-1]}
    hard = {
        "bad output": bool(outputs & {*BAD}),
        "bad loss": program.reducer in BAD_LOSSES,
        "exception in forward": program.raises is not None and program.raises[0] == "F",
        "exception in backward": program.raises is not None and program.raises[0] == "B",
        "several tensors": program.tensors > 1,
        "replicas": program.replicas > 1,
        "lengths differ": program.lengths is not None,
        "split backward": program.schedule in ("zb-h1", "zb-h2", "interleaved-zb1p", *V_SCHEDULES),
        "neighbours on one rank": program.schedule in V_SCHEDULES,
        "stages of one rank share a map": program.virtual > 1 and "shared" in names,
        "hook": any("hook" in name for name in names),
        "in place": any("in place" in name for name in names),
        "two steps": program.steps == 2,
        "forward only": program.forward_only,
        "reused data": program.data == "reused",
        "bf16": program.bf16,
    }
    return [program.schedule, *(name for name, has in hard.items() if has)]


# Judging.

_pools: dict[int, RankPool] = {}


def _pool(size: int) -> RankPool:
    if size not in _pools:
        _pools[size] = RankPool(size, SECONDS)
    return _pools[size]


def _run(program: Program) -> list[tuple[int, Result]]:
    size = program.pp_size * program.replicas
    if size == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [steps.run(program)]
    before = rank_pool.GRACE_SECONDS
    rank_pool.GRACE_SECONDS = GRACE
    try:
        return _pool(size).run(JOB, program)
    finally:
        rank_pool.GRACE_SECONDS = before


def check(program: Program) -> Outcome:
    """Run a program on ranks and composed; judge its error."""
    torch.set_num_threads(1)
    composed = _composed(program)
    bad = f"stage {composed} has an output without gradient" if isinstance(composed, Cut) else _bad(program)
    try:
        found = _run(program)
    except RankError as error:
        return _judge_error(program, bad, composed, str(error))
    except Exception as error:  # a pipeline of one rank runs here
        return _judge_error(program, bad, composed, f"rank 0: {type(error).__name__}: {error}\n{_notes(error)}")
    if bad is not None:
        raise Wrong(f"expected an error, since {bad}, and there was none")
    if isinstance(composed, Exception):
        raise Wrong(f"the composed stages fail and the pipeline does not: {type(composed).__name__}: {composed}")
    _compare(program, found, composed)
    return Outcome(EQUAL)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def _bad(program: Program) -> str | None:
    """Return the reason why a program must be refused, or None."""
    last = len(program.stages) - 1
    for number, spec in enumerate(program.stages[:-1]):
        if spec.output not in BAD:
            continue
        if spec.output == "longer" and program.lengths is not None and program.tensors == 1:
            continue  # lengths vary, so any length may arrive
        if spec.output in ("detached", "made without gradient") and program.forward_only:
            continue
        return f"stage {number} returns {spec.output}"
    if program.reducer in BAD_LOSSES and not (program.forward_only and program.reducer == "loss detached"):
        return f"stage {last} has a {program.reducer}"
    return None


def _composed(program: Program) -> dict[int, Result] | Exception:
    """Return the result or the exception of the composed stages."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from hooks on modules whose input is data
            return steps.plain(program)
    except Exception as error:
        return error


OURS = re.compile(r"^rank \d+: (ValueError|PipelineError|NotImplementedError): (?P<text>.*)", re.MULTILINE)
NAMES_PLACE = re.compile(r"rank \d+, \d+[FBIW]\d+: ")


def _judge_error(program: Program, bad: str | None, composed: dict | Exception, error_text: str) -> Outcome:
    """Accept a required refusal, the exception of the program, and errors that the composed stages also raise."""
    if "no answer in" in error_text:
        raise Wrong(f"no answer: {error_text}")
    if program.raises is not None:
        kind, stage, microbatch = program.raises
        if f"Planned: {'forward' if kind == 'F' else 'backward'} of stage {stage}" in error_text:
            if not re.search(rf"{stage}[{'F' if kind == 'F' else 'BI'}]{microbatch}\b", error_text):
                raise Wrong(f"expected the error to name {stage}{kind}{microbatch}: {error_text}")
            return Outcome(REFUSED, f"the program's own exception in {kind}")
    ours = OURS.search(error_text)
    if ours is not None and NAMES_PLACE.search(error_text) and _may_be_refused(program):
        return Outcome(REFUSED, re.sub(r"\d+", "n", ours["text"]))
    if isinstance(composed, Exception) and f"{type(composed).__name__}: {str(composed)[:40]}" in error_text:
        return Outcome(REFUSED, "as the composed stages")
    sometimes = any("sometimes" in spec.operations for spec in program.stages)
    if (sometimes or isinstance(composed, Cut)) and "that requires a gradient, got a detached one" in error_text:
        # The error names the first such stage and microbatch.
        return Outcome(REFUSED, "an output without gradient" if ours is None else re.sub(r"\d+", "n", ours["text"]))
    if bad is not None:
        stage = re.search(r"stage (\d+)", bad)
        assert stage is not None
        if ours is None or f"stage {stage[1]}" not in error_text:
            raise Wrong(f"expected an error of ours that names stage {stage[1]}, since {bad}: {error_text}")
        return Outcome(REFUSED, re.sub(r"\d+", "n", ours["text"]))
    raise Wrong(f"an error that is not ours, or needless: {error_text}")


def _may_be_refused(program: Program) -> bool:
    """Return True if a pipeline may refuse a program that composed stages can run.

    This holds for memory reused while microbatches are in flight, and for operations in place on received tensors.
    """
    names = {name for spec in program.stages for name in spec.operations}
    return program.data == "reused" or bool(names & {"reused scratch", "input in place", "input view in place"})


def _compare(program: Program, ranks: list[tuple[int, Result]], expected: dict[int, Result]) -> None:
    """Compare losses, gradients and buffers of every rank with those of the composed stages."""
    dtype = program.config.compute_dtype
    tolerance = GRADIENT[dtype]
    for replica, whole in expected.items():
        parts = [result for number, result in ranks if number == replica]
        reports = [loss for part in parts for loss in part.reports]
        if len(reports) != len(whole.reports) or not np.allclose(reports, whole.reports, rtol=tolerance, atol=1e-30):
            raise Wrong(f"losses: expected {whole.reports}, got {reports}")
        for what in ("gradients", "buffers"):
            found = {name: tensor for part in parts for name, tensor in getattr(part, what).items()}
            _compare_tensors(what, found, getattr(whole, what), dtype)


def _compare_tensors(what: str, found: dict, expected: dict, dtype: str) -> None:
    """Compare norm-wise; a gradient whose terms cancel is measured against a share of the largest one."""
    tolerance = GRADIENT[dtype]
    floor = SHARE[dtype] * max((float(tensor.abs().norm()) for tensor in expected.values()), default=0.0)
    for name in sorted({*found, *expected}):
        ours = found.get(name)
        theirs = expected.get(name)
        if ours is None or theirs is None:  # a pipeline sends zeros if the loss does not depend on a tensor
            given = ours if theirs is None else theirs
            if given is not None and bool(given.ne(0).any()):
                raise Wrong(f"{what} {name}: expected {theirs}, got {ours}")
            continue
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            raise Wrong(f"{what} {name}: expected {theirs.dtype} {theirs.shape}, got {ours.dtype} {ours.shape}")
        if torch.equal(ours, theirs):
            continue
        ours, theirs = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (ours, theirs))
        difference = float((ours - theirs).abs().norm())
        scale = max(float(theirs.abs().norm()), floor)
        if not difference <= tolerance * scale:
            raise Wrong(f"{what} {name}: difference {difference:.1e} of {scale:.1e}, tolerance {tolerance:.0e}")

"""Random programs of checkpointed calls, with user operations inside and between them and before backward.

A program is a chain of steps. A step is a call, plain in the oracle and checkpointed in the program under test, or an
operation between calls: in place, a view, an alias, or a change of a closure. The gradients of all leaves under normal
cotangents must be bitwise equal to those of the plain program, or an error of this project must state the reason. If
PyTorch refuses the plain program, any error is accepted.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, RecomputeError, lazy_restore
from reference_torch.recompute.region import in_replay
from tests.fuzz.grammars._recompute_calls import CALLS, COMPLEX_CALLS, COUNTING, REAL_CALLS, N, World
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong


def _augmented(w: World, h: Tensor) -> Tensor:
    h += 1
    return h


def _dropped_view(w: World, h: Tensor) -> Tensor:
    h.view(-1).mul_(1.5)
    return h


def _no_grad_write(w: World, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(1.5)
    return h


def _optimizer_step(w: World, h: Tensor) -> Tensor:
    with torch.no_grad():
        w.linear.weight.mul_(0.5)
        w.weight.mul_(0.5)
    return h


def _write_frozen(w: World, h: Tensor) -> Tensor:
    w.frozen.mul_(2)
    return h


def _write_buffer(w: World, h: Tensor) -> Tensor:
    w.buffer.add_(1)
    return h


def _rescale(w: World, h: Tensor) -> Tensor:
    w.scale = 2.5
    return h


def _replace(w: World, h: Tensor) -> Tensor:
    w.offsets[0] = w.offsets[0] + 1
    return h


def _switch(training: bool) -> Callable[[World, Tensor], Tensor]:
    def switch(w: World, h: Tensor) -> Tensor:
        w.dropout.train(training)
        w.batch.train(training)
        w.norm.train(training)
        return h

    return switch


def _keep_alias(w: World, h: Tensor) -> Tensor:
    w.stash.append(h.detach())
    return h


def _write_alias(w: World, h: Tensor) -> Tensor:
    for alias in w.stash[-1:]:
        alias.mul_(1.5)
    return h


BETWEEN: dict[str, Callable[[World, Tensor], Tensor]] = {
    "nothing": lambda w, h: h,
    "relu in place": lambda w, h: h.tanh_(),
    "augmented": _augmented,
    "view in place": _dropped_view,
    "slice in place": lambda w, h: (h[:1].zero_(), h)[1],
    "detached in place": lambda w, h: (h.detach().mul_(1.5), h)[1],
    "no grad write": _no_grad_write,
    "copy": lambda w, h: h.clone().mul_(2),
    "view": lambda w, h: h.t(),
    "flat view": lambda w, h: h.view(-1).view(N, N) if h.is_contiguous() else h,
    "detached reader": lambda w, h: h * h.detach().sin(),
    "two readers": lambda w, h: h * h.sin() + h.cos(),
    "optimizer step": _optimizer_step,
    "write frozen": _write_frozen,
    "write buffer": _write_buffer,
    "rescale": _rescale,
    "replace closure": _replace,
    "eval": _switch(False),
    "train": _switch(True),
    "keep alias": _keep_alias,
    "write alias": _write_alias,
    "collect garbage": lambda w, h: (gc.collect(), h)[1],
    "inplace on dtype view": lambda w, h: (h.detach().view(torch.int64).bitwise_and_(-2), h)[1],
}
GENTLE = ("nothing", "copy", "view", "flat view", "two readers", "detached reader")
OWNERS = ("checkpoint", "scope", "manager", "scoped manager", "force")
SURROUNDED = ("nothing", "program", "steps")
CONTEXTS = ("none", "flop counter", "dispatch mode", "autocast", "save on cpu", "anomaly", "no grad", "inference")
TRANSFORMS = ("func.grad", "vmap")
"""Contexts in which the whole program is a function that torch.func transforms."""


class PassThrough(TorchDispatchMode):
    """A user-defined dispatch mode without effect."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation."""
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Step:
    """A call, the operation on its result, and whether a separate loss reads it."""

    call: str
    between: str
    read: bool


@dataclass(frozen=True)
class Program:
    """A chain of steps, the owner of its checkpoints, and the context of forward and backward."""

    complex_numbers: bool
    owner: str
    outer_checkpoint: str
    """What PyTorch's checkpoint surrounds, one of SURROUNDED."""
    context: str
    context_around_backward: bool
    steps: tuple[Step, ...]
    late: str
    """The operation between forward and backward."""
    twice: bool
    """True if backward runs twice, with retain_graph."""
    drop_references: bool


HARD_CASES = frozenset(
    {"complex", "dropped references", "changed in place", "closure changed", "mode", "several in a manager"}
    | {"train or eval switched", "late change", "autocast", "inference", "functorch", "nested", "view of another dtype"}
    | {"outer checkpoint", "view of a view in an outer checkpoint"}
)
IN_PLACE = {"relu in place", "augmented", "view in place", "slice in place", "detached in place", "no grad write"}
CLOSURE = {"optimizer step", "write frozen", "write buffer", "rescale", "replace closure"}


TOGETHER = (
    *(("linear", change) for change in sorted(IN_PLACE)),
    *(("linear module", change) for change in sorted(IN_PLACE)),
    *(("frozen weight", change) for change in sorted(IN_PLACE)),
    ("closure weight", "optimizer step"),
    ("frozen weight", "write frozen"),
    ("frozen not saved", "write frozen"),
    ("buffer", "write buffer"),
    ("late scale", "rescale"),
    ("late tensor", "replace closure"),
    ("dropout module", "eval"),
    ("batch norm", "eval"),
    ("gelu", "keep alias"),
    ("frozen weight", "inplace on dtype view"),
    ("linear module", "inplace on dtype view"),
    ("float32 product", "nothing"),
    ("float32 layer", "nothing"),
)
"""Calls followed by a change that a replay could miss."""


def draw(rng: np.random.Generator) -> Program:
    """Draw a program; about half of the programs contain no forbidden change.

    The checkpoint of PyTorch replays silently with the current values of closures, so changes of closures are not drawn
    inside it.
    """
    complex_numbers = bool(rng.random() < 0.3)
    owner = str(rng.choice(OWNERS))
    outer_checkpoint = str(rng.choice(SURROUNDED, p=(0.7, 0.2, 0.1)))
    calls = [*CALLS, *(COMPLEX_CALLS if complex_numbers else REAL_CALLS)]
    rough = rng.random() < 0.6
    betweens = list(BETWEEN) if rough else list(GENTLE)
    if outer_checkpoint != "nothing":
        unnoticed = COUNTING | {"cached", "stashing", "batch norm", "workspace", "drawn by NumPy"}
        unnoticed |= {"drawn by an own generator"}
        calls = [call for call in calls if call not in unnoticed]
        betweens = [name for name in betweens if name in GENTLE or name in IN_PLACE]
    steps = []
    if rng.random() < 0.5 and outer_checkpoint == "nothing":  # a call, and a change that a replay could miss
        call, change = TOGETHER[rng.integers(len(TOGETHER))]
        if call in calls:
            steps.append(Step(call, change, bool(rng.random() < 0.3)))
    for _ in range(rng.integers(1, 4)):
        between = rng.choice(betweens if rng.random() < 0.5 else GENTLE)
        steps.append(Step(str(rng.choice(calls)), str(between), bool(rng.random() < 0.3)))
    late = rough and outer_checkpoint == "nothing" and rng.random() < 0.4
    context = str(rng.choice([*CONTEXTS, *TRANSFORMS])) if rng.random() < 0.4 else "none"
    if context == "autocast" and not complex_numbers:  # autocast does not change float64
        steps[0] = replace(steps[0], call=str(rng.choice(["float32 product", "float32 layer"])))
    return Program(
        complex_numbers=complex_numbers,
        owner=owner,
        outer_checkpoint=outer_checkpoint,
        context=context,
        context_around_backward=bool(rng.random() < 0.5),
        steps=tuple(steps),
        late=str(rng.choice(list(BETWEEN))) if late else "nothing",
        twice=bool(rng.random() < 0.2),
        drop_references=bool(rng.random() < 0.5),
    )


def features(program: Program) -> Iterator[str]:
    """Name the rare features of a program."""
    done = {step.between for step in program.steps} | {program.late}
    if program.complex_numbers:
        yield "complex"
    if program.drop_references:
        yield "dropped references"
    if done & IN_PLACE:
        yield "changed in place"
    if done & CLOSURE:
        yield "closure changed"
    if program.context in ("flop counter", "dispatch mode"):
        yield "mode"
    if program.context == "autocast" and any(step.call.startswith("float32") for step in program.steps):
        yield "autocast"
    if program.context == "inference":
        yield "inference"
    if program.context in TRANSFORMS:
        yield "functorch"
    if any(step.call == "nested" for step in program.steps):
        yield "nested"
    if program.outer_checkpoint != "nothing":
        yield "outer checkpoint"
        if any(step.call == "flat view of result" and step.between == "flat view" for step in program.steps):
            yield "view of a view in an outer checkpoint"
    if "inplace on dtype view" in done:
        yield "view of another dtype"
    if "manager" in program.owner and len(program.steps) > 1:
        yield "several in a manager"
    if done & {"train", "eval"}:
        yield "train or eval switched"
    if program.late != "nothing":
        yield "late change"


def check(program: Program) -> Outcome:
    """Compare the gradients of a program with those of the plain one."""
    plain = (
        replace(program, context="none") if program.context == "save on cpu" else program
    )  # it does not check versions
    try:
        expected = _run(plain, recompute=False)
    except Exception as error:  # PyTorch refuses, so the program under test must raise too
        plain_error: Exception | None = error
        expected = []
    else:
        plain_error = None
    try:
        actual = _run(program, recompute=True)
    except (RecomputeError, NotImplementedError) as error:
        if _is_gentle(program) and plain_error is None:
            raise Wrong(f"refused, though nothing is changed that matters: {error}") from error
        return Outcome(REFUSED, str(error))
    except Exception as error:
        if plain_error is not None and type(error) is type(plain_error):
            return Outcome(REFUSED, "as PyTorch does")
        refusals = ("modified by an inplace operation", "don't yet support saved tensor hooks")
        if program.outer_checkpoint != "nothing" and any(refusal in str(error) for refusal in refusals):
            return Outcome(REFUSED, "PyTorch's checkpoint refuses")
        raise
    if in_replay():
        raise Wrong("a replay did not end")
    if plain_error is not None:
        # A replay recomputes a value that an operation in place destroys in the plain program.
        if bool(actual[0].isfinite()) and any(not bool(value.isfinite().all()) for value in actual):
            raise Wrong(f"values that are not finite where the plain program raises {plain_error}")
        return Outcome(REFUSED, "PyTorch refuses the plain program")
    for place, (ours, plain) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(_bits(ours), _bits(plain)):
            difference = (ours - plain).abs().max().item()
            raise Wrong(f"value {place} differs by {difference:.2e} of {plain.abs().max().item():.2e}")
    return Outcome(EQUAL)


def _is_gentle(program: Program) -> bool:
    """Return True if a program does not change values that its calls read."""
    changing = COUNTING | {"changes input", "saved then changed inside", "gradient inside"}
    if program.context in TRANSFORMS:
        return False  # transformations of torch.func are refused by name
    done = {step.between for step in program.steps} | {program.late}
    return done <= set(GENTLE) and not changing & {step.call for step in program.steps}


def _bits(values: Tensor) -> Tensor:
    """Return the bytes of values; every NaN has the same bytes."""
    values = values.detach().resolve_conj().resolve_neg()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1).contiguous()
    return values.masked_fill(values.isnan(), torch.nan).view(torch.uint8)


def _context(name: str) -> contextlib.AbstractContextManager:
    if name == "flop counter":
        return FlopCounterMode(display=False)
    if name == "dispatch mode":
        return PassThrough()
    if name == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    if name == "save on cpu":
        return torch.autograd.graph.save_on_cpu()
    if name == "anomaly":
        return torch.autograd.set_detect_anomaly(True, check_nan=False)
    if name == "no grad":
        return torch.no_grad()
    if name == "inference":
        return torch.inference_mode()
    return contextlib.nullcontext()


def _run(program: Program, recompute: bool) -> list[Tensor]:
    """Run a program; return the loss values and the gradients of all leaves.

    The plain program runs without PyTorch's checkpoint, which does not check versions of what it recomputes.
    """
    w = World(program.complex_numbers)
    torch.manual_seed(3)
    np.random.seed(3)
    if program.context in TRANSFORMS:
        return _run_transformed(program, w, recompute)
    around = _context(program.context)
    evaluated = program.context in ("no grad", "inference")
    if recompute:
        w.cache["recompute"] = torch.ones(())
    with around:
        surrounded = recompute and program.outer_checkpoint == "program"
        loss = _call(surrounded, lambda h: _forward(program, w, h, recompute), w.leaves[0] * 1)
        if evaluated:
            return [loss]
        if program.context_around_backward:
            return _finish(program, w, loss)
    return _finish(program, w, loss)


def _run_transformed(program: Program, w: World, recompute: bool) -> list[Tensor]:
    """Run a program inside a transformation of torch.func and return its result."""

    def loss(h: Tensor) -> Tensor:
        return _forward(program, w, h * 1, recompute)

    leaf = w.leaves[0].detach()
    if program.context == "func.grad":
        return [torch.func.grad(loss)(leaf)]
    return [torch.vmap(loss, randomness="same")(torch.stack([leaf, leaf * 0.5])).detach()]


def _finish(program: Program, w: World, loss: Tensor) -> list[Tensor]:
    BETWEEN[program.late](w, w.leaves[1].detach())
    results = [loss.detach().clone()]
    for turn in range(1 + program.twice):
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": program.twice and turn == 0}
        if loss.requires_grad:
            results += torch.autograd.grad(loss, w.targets, **options)
    return results


def _call(surrounded: bool, function: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    """Call a function of one tensor, inside PyTorch's checkpoint if ``surrounded``."""
    return torch_checkpoint(function, h, use_reentrant=False) if surrounded else function(h)


def _forward(program: Program, w: World, h: Tensor, recompute: bool) -> Tensor:
    owner = program.owner
    manager = MHCBlockRecomputeManager() if recompute and "manager" in owner else None
    scope: contextlib.AbstractContextManager = contextlib.nullcontext()
    if recompute and owner == "scope":
        scope = lazy_restore()
    elif manager is not None and owner == "scoped manager":
        scope = manager
    checkpoints: list[CheckpointWithoutOutput] = []
    losses: list[Tensor] = []
    referenced: list[Tensor] = []
    with scope:
        for step in program.steps:
            surrounded = recompute and program.outer_checkpoint == "steps"
            run = functools.partial(_step, program, w, step, recompute, manager, checkpoints)
            h = _call(surrounded, run, h)
            if step.read:
                losses.append(_read(h))
            if not program.drop_references:
                referenced.append(h)
            if manager is not None and owner == "scoped manager":
                manager.discard_consumed(h, *referenced)
        total = _read(h * 1) + sum(losses)
        if program.drop_references:
            del h
        if manager is not None:
            manager.discard_all_outputs_and_register_unified_recompute(total)
        for checkpoint in checkpoints:
            if owner == "force" and total.requires_grad:
                checkpoint.discard_output_and_register_recompute(total)
                checkpoint.discard_output()
            else:
                checkpoint.discard_output_and_register_recompute(total)
    return total


def _step(
    program: Program,
    w: World,
    step: Step,
    recompute: bool,
    manager: MHCBlockRecomputeManager | None,
    checkpoints: list[CheckpointWithoutOutput],
    h: Tensor,
) -> Tensor:
    call = {**CALLS, **REAL_CALLS, **COMPLEX_CALLS}[step.call]
    function: Callable = w.linear if step.call == "linear module" else lambda x: call(w, x)
    if not recompute:
        result = function(h)
    elif manager is not None:
        result = manager.checkpoint(function, h)
    else:
        checkpoints.append(CheckpointWithoutOutput(step.call))
        result = checkpoints[-1].checkpoint(function, h)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    h = (
        sum((_square(leaf, program.complex_numbers) for leaf in leaves[1:]), start=0) + leaves[0]
        if leaves[1:]
        else leaves[0]
    )
    h = BETWEEN[step.between](w, h)
    return _square(h, program.complex_numbers) * 0.5 if h.shape != (N, N) else h


def _square(values: Tensor, complex_numbers: bool) -> Tensor:
    """Reshape a result to N x N, by views if possible."""
    if complex_numbers and not values.is_complex():
        values = torch.complex(values, values * 0.5)
    return (
        values.reshape(-1)[: N * N].expand(N * N).reshape(N, N)
        if values.numel() >= N * N
        else values.sum() * _ones(values)
    )


def _ones(values: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=values.dtype)


def _read(h: Tensor) -> Tensor:
    """Reduce under fixed normal weights, reading values, a view and an alias with other strides."""
    weights = torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    read = h * h.sin() * 0.1 + h.t() * 0.2
    read = torch.view_as_real(read).sum(-1) if read.is_complex() else read
    return (read * weights).sum()

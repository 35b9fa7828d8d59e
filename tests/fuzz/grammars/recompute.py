"""Random programs of checkpointed calls: what users write inside them, between them, and before backward.

A program is a chain of steps. A step is a call, plain in the oracle and checkpointed in the program under test, or
something a user does between calls: an operation in place, a view, an alias, a change of a closure. The gradients of
all leaves, under normal cotangents, must be bitwise equal to the plain program's; or an error of this project says
why not. Where the plain program itself is refused by PyTorch, any error will do.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, RecomputeError, lazy_restore
from reference_torch.recompute.region import in_replay
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

N = 4


class World:
    """What closures of a program see: modules, frozen tensors, buffers, counters, a cache."""

    def __init__(self, complex_numbers: bool) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            return torch.complex(values, values.flip(-1)) if complex_numbers else values

        torch.manual_seed(2)
        self.linear = nn.Linear(N, N).to(torch.complex128 if complex_numbers else torch.float64)
        self.frozen = normal(N, N)
        self.buffer = normal(N)
        self.weight = normal(N, N).requires_grad_()
        self.scale = 1.5
        self.offsets = [normal(N, N)]
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(N).double()
        self.batch = nn.BatchNorm1d(N).double()
        self.counter = torch.ones((), dtype=torch.float64)
        self.calls = 0
        self.table = normal(20)
        self.workspace = normal(N, N)
        self.statistics = normal(N)
        self.generator = torch.Generator().manual_seed(4)
        self.cache: dict[str, Tensor] = {}
        self.stash: list[Any] = []
        self.leaves = [normal(N, N).requires_grad_() for _ in range(2)]

    @property
    def targets(self) -> list[Tensor]:
        """Every tensor whose gradient is compared."""
        modules = [self.linear, self.norm, self.batch]
        return [*self.leaves, self.weight, *(p for module in modules for p in module.parameters())]


def _cached(w: World, x: Tensor) -> Tensor:
    if "cos" not in w.cache:
        w.cache["cos"] = torch.arange(N, dtype=torch.float64).cos()
    return (x * w.cache["cos"]).sin()


def _counted(w: World, x: Tensor) -> Tensor:
    w.counter.add_(1)
    return x.sin() * w.counter


def _rebinding(w: World, x: Tensor) -> Tensor:
    w.statistics = 0.9 * w.statistics + 0.1 * x.detach().mean(0)
    return (x - w.statistics).sin()


def _next(w: World) -> int:
    w.calls += 1
    return w.calls


def _workspace(w: World, x: Tensor) -> Tensor:
    w.workspace.copy_(x.detach()).mul_(0.5)
    return x.sin() * w.workspace


def _stashing(w: World, x: Tensor) -> Tensor:
    y = x.sin()
    w.stash.append(y.detach())
    return y


def _inside_in_place(w: World, x: Tensor) -> Tensor:
    y = x * w.scale
    y.add_(1)
    return y.sin().mul_(2)


def _saved_then_changed(w: World, x: Tensor) -> Tensor:
    inner = x.exp()
    product = inner * inner
    inner.add_(1)
    return product + inner


def _nested(w: World, x: Tensor) -> Tensor:
    inner = CheckpointWithoutOutput("inner")
    h = inner.checkpoint(torch.tanh, x) if w.cache.get("recompute") is not None else x.tanh()
    y = h * h.sin()
    if w.cache.get("recompute") is not None:
        inner.discard_output_and_register_recompute(y)
    return y


class Doubling(torch.autograd.Function):
    """A user's own autograd function that saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].conj()


CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "tanh": lambda w, x: x.tanh(),
    "exp sin": lambda w, x: (x * 0.1).exp().sin(),
    "linear": lambda w, x: w.linear(x),
    "linear module": lambda w, x: w.linear,
    "closure weight": lambda w, x: (x @ w.weight).tanh(),
    "frozen weight": lambda w, x: x.sin() @ w.frozen,
    "frozen not saved": lambda w, x: (x + w.frozen.sin()).tanh(),
    "buffer": lambda w, x: (x * w.buffer).sin(),
    "late scale": lambda w, x: x.tanh() * w.scale,
    "late tensor": lambda w, x: x.sin() + w.offsets[0],
    "cached": _cached,
    "counter": _counted,
    "stashing": _stashing,
    "in place inside": _inside_in_place,
    "saved then changed inside": _saved_then_changed,
    "view of result": lambda w, x: x.tanh().t(),
    "two": lambda w, x: (x.tanh(), (x * 2).sin().t()),
    "aliases": lambda w, x: (lambda y: (y, y.view(-1), y.t()))(x.tanh()),
    "tuple and dict": lambda w, x: {"a": [x.sin()], "b": (None, x.cos())},
    "input back": lambda w, x: (x, x.sin()),
    "view of input": lambda w, x: x.view(-1, 2).t(),
    "changes input": lambda w, x: x.mul_(1.5).sin(),
    "custom function": lambda w, x: Doubling.apply(x * 0.1),
    "nested": _nested,
    "expanded": lambda w, x: x.tanh().sum(0, keepdim=True).tanh().expand(N, N),
    "no grad part": lambda w, x: x.tanh() * x.detach().sin(),
    "rebound statistics": _rebinding,
    "next of a table": lambda w, x: x.sin() * w.table[_next(w)],
    "next of a slice of a table": lambda w, x: x.sin() * w.table[_next(w) :][:N],
    "next slice": lambda w, x: x.sin().repeat(1, 3)[:, _next(w) : w.calls + N],
    "next value": lambda w, x: x.sin() * torch.full((N,), float(_next(w))),
    "next list": lambda w, x: x.sin() * torch.tensor([float(_next(w))] * N),
    "next number of NumPy": lambda w, x: x.sin() * np.float32(_next(w)),
    "next after zeros": lambda w, x: x.sin() * (torch.zeros(N) if _next(w) == 1 else torch.ones(N)),
    "next of largest and smallest": lambda w, x: (
        x.sin() * (w.table.abs().amax() if _next(w) == 1 else w.table.abs().amin())
    ),
    "next of a tuple in a list": lambda w, x: x.sin() * torch.tensor([[float(_next(w))] * N]),
    "workspace": _workspace,
    "ensemble": lambda w, x: torch.vmap(lambda row: x.sin() * row)(w.frozen).sum(0),
    "drawn by NumPy": lambda w, x: x.sin() * torch.from_numpy(np.random.rand(N, N)),
    "drawn by an own generator": lambda w, x: x.sin() * torch.rand(N, N, generator=w.generator).double(),
    "constant of a constructor": lambda w, x: x.tanh() * torch.DoubleTensor([1, 2, 3, 4]),
}
COUNTING = frozenset({"counter", "rebound statistics"} | {name for name in CALLS if name.startswith("next ")})
"""Calls that compute something else each time."""
REAL_CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "dropout": lambda w, x: F.dropout(x.sin(), 0.4),
    "dropout module": lambda w, x: w.dropout(x).tanh(),
    "layer norm": lambda w, x: w.norm(x),
    "batch norm": lambda w, x: w.batch(x).tanh(),
    "gelu": lambda w, x: F.gelu(x),
    "softmax": lambda w, x: x.softmax(-1),
    "relu": lambda w, x: F.relu(x),
    "other dtype": lambda w, x: x.float().tanh().double() * x,
    "sparse product": lambda w, x: torch.sparse.mm(torch.eye(N, dtype=torch.float64).to_sparse(), x).tanh(),
    "through complex": lambda w, x: torch.fft.fft(x).exp().conj().real * 0.01,
}
COMPLEX_CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "conjugate product": lambda w, x: (lambda a: (a, (a * a.conj()).real))((x * 0.1).exp()),
    "conjugate result": lambda w, x: (x * 0.1).exp().conj(),
    "imaginary part": lambda w, x: (lambda a: (a, a.conj().imag))((x * 0.1).exp()),
    "resolved": lambda w, x: (x * 0.1).exp().conj().resolve_conj() * x,
    "as real": lambda w, x: torch.view_as_real((x * 0.1).exp()),
}


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
GENTLE = ("nothing", "copy", "view", "two readers", "detached reader")
OWNERS = ("checkpoint", "scope", "manager", "scoped manager", "outer checkpoint", "force")
CONTEXTS = ("none", "flop counter", "dispatch mode", "autocast", "save on cpu", "anomaly", "no grad", "inference")


class PassThrough(TorchDispatchMode):
    """A user's dispatch mode that does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation."""
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Step:
    """A call, what happens to its result, and whether a loss reads it by itself."""

    call: str
    between: str
    read: bool


@dataclass(frozen=True)
class Program:
    """A chain of steps, who owns the checkpoints, and what surrounds forward and backward."""

    complex_numbers: bool
    owner: str
    context: str
    context_around_backward: bool
    steps: tuple[Step, ...]
    late: str
    """What happens after forward, before backward."""
    twice: bool
    """Whether backward runs twice, with retain_graph."""
    drop_references: bool


HARD_CASES = frozenset(
    {"complex", "dropped references", "changed in place", "closure changed", "mode", "several in a manager"}
    | {"train or eval switched", "late change"}
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
)
"""Calls with a change after them that a replay could miss."""


def draw(rng: np.random.Generator) -> Program:
    """Draw a program; about half of them change nothing they should not.

    PyTorch's own checkpoint replays silently with whatever a closure holds by then, so what changes closures is not
    drawn inside one.
    """
    complex_numbers = bool(rng.random() < 0.3)
    owner = str(rng.choice(OWNERS))
    calls = [*CALLS, *(COMPLEX_CALLS if complex_numbers else REAL_CALLS)]
    rough = rng.random() < 0.6
    betweens = list(BETWEEN) if rough else list(GENTLE)
    if owner == "outer checkpoint":
        unnoticed = COUNTING | {"cached", "stashing", "batch norm", "drawn by NumPy", "drawn by an own generator"}
        calls = [call for call in calls if call not in unnoticed]
        betweens = [name for name in betweens if name in GENTLE or name in IN_PLACE]
    steps = []
    if rng.random() < 0.5 and owner != "outer checkpoint":  # a call, and the change that it would not notice
        call, change = TOGETHER[rng.integers(len(TOGETHER))]
        if call in calls:
            steps.append(Step(call, change, bool(rng.random() < 0.3)))
    for _ in range(rng.integers(1, 4)):
        between = rng.choice(betweens if rng.random() < 0.5 else GENTLE)
        steps.append(Step(str(rng.choice(calls)), str(between), bool(rng.random() < 0.3)))
    late = rough and owner != "outer checkpoint" and rng.random() < 0.4
    return Program(
        complex_numbers=complex_numbers,
        owner=owner,
        context=str(rng.choice(CONTEXTS)) if rng.random() < 0.4 else "none",
        context_around_backward=bool(rng.random() < 0.5),
        steps=tuple(steps),
        late=str(rng.choice(list(BETWEEN))) if late else "nothing",
        twice=bool(rng.random() < 0.2),
        drop_references=bool(rng.random() < 0.5),
    )


def features(program: Program) -> Iterator[str]:
    """Name the rare corners a program visits."""
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
    if "manager" in program.owner and len(program.steps) > 1:
        yield "several in a manager"
    if done & {"train", "eval"}:
        yield "train or eval switched"
    if program.late != "nothing":
        yield "late change"


def check(program: Program) -> Outcome:
    """Compare the gradients of a program with those of the plain one."""
    plain = replace(program, context="none") if program.context == "save on cpu" else program  # it checks no versions
    try:
        expected = _run(plain, recompute=False)
    except Exception as error:  # PyTorch itself refuses: the program under test may not be silent either
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
        if program.owner == "outer checkpoint" and "modified by an inplace operation" in str(error):
            return Outcome(REFUSED, "PyTorch's checkpoint refuses")
        raise
    if in_replay():
        raise Wrong("a replay did not end")
    if plain_error is not None:
        # A replay computes what an operation in place destroyed in the plain program: right, if it is finite.
        if bool(actual[0].isfinite()) and any(not bool(value.isfinite().all()) for value in actual):
            raise Wrong(f"values that are not finite where the plain program raises {plain_error}")
        return Outcome(REFUSED, "PyTorch refuses the plain program")
    for place, (ours, plain) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(_bits(ours), _bits(plain)):
            difference = (ours - plain).abs().max().item()
            raise Wrong(f"value {place} differs by {difference:.2e} of {plain.abs().max().item():.2e}")
    return Outcome(EQUAL)


def _is_gentle(program: Program) -> bool:
    """Whether a program changes nothing that its calls read."""
    changing = COUNTING | {"changes input", "saved then changed inside"}
    done = {step.between for step in program.steps} | {program.late}
    return done <= set(GENTLE) and not changing & {step.call for step in program.steps}


def _bits(values: Tensor) -> Tensor:
    values = values.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1).contiguous().view(torch.uint8)


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
    around = _context(program.context)
    evaluated = program.context in ("no grad", "inference")
    if recompute:
        w.cache["recompute"] = torch.ones(())
    with around if not program.context_around_backward or evaluated else contextlib.nullcontext():
        if program.owner == "outer checkpoint" and recompute:
            loss = torch_checkpoint(lambda h: _forward(program, w, h, recompute), w.leaves[0] * 1, use_reentrant=False)
        elif program.context_around_backward and not evaluated:
            with around:
                return _finish(program, w, _forward(program, w, w.leaves[0] * 1, recompute))
        else:
            loss = _forward(program, w, w.leaves[0] * 1, recompute)
    if evaluated:
        return [loss]
    return _finish(program, w, loss)


def _finish(program: Program, w: World, loss: Tensor) -> list[Tensor]:
    BETWEEN[program.late](w, w.leaves[1].detach())
    results = [loss.detach().clone()]
    for turn in range(1 + program.twice):
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": program.twice and turn == 0}
        if loss.requires_grad:
            results += torch.autograd.grad(loss, w.targets, **options)
    return results


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
    kept: list[Tensor] = []
    with scope:
        for step in program.steps:
            h = _step(program, w, step, h, recompute, manager, checkpoints)
            if step.read:
                losses.append(_read(h))
            if not program.drop_references:
                kept.append(h)
            if manager is not None and owner == "scoped manager":
                manager.discard_consumed(h, *kept)
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
    h: Tensor,
    recompute: bool,
    manager: MHCBlockRecomputeManager | None,
    checkpoints: list[CheckpointWithoutOutput],
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
    """Bring any result to N x N, by views where that is possible."""
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

"""Random calls of the gated delta rule, compared with the recurrence in float64.

A program is a call of a chunked or recurrent form in one backend. It varies shapes, documents, types, memory layouts,
arguments with gradients, values that are not finite, wrappers of the call, and errors of the caller.
"""

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from jax_impl import delta_rule as jax_rule
from reference_torch import delta_rule as torch_rule
from reference_torch.delta_rule import chunked
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

HARD_CASES = frozenset(
    {
        *("torch", "jax", "kda", "gated_delta_rule", "empty document", "document of one token", "no documents"),
        *("not finite", "strong decay", "no decay", "shared heads", "initial state", "gate", "some gradients"),
        *("expanded", "transposed", "sliced", "float64", "float32", "bfloat16", "wrong", "no recompute"),
        *("changed in place", "transformed", "several segments"),
    }
)
SHAPES = [  # batch, tokens, heads, group, key, value
    *((1, 1, 1, 1, 1, 1), (2, 9, 2, 1, 3, 2), (1, 24, 1, 3, 5, 4), (1, 70, 2, 2, 4, 3), (1, 33, 2, 1, 8, 1)),
    *((3, 17, 1, 2, 2, 5), (1, 130, 1, 1, 16, 8)),
]
JAX_SHAPES = [(1, 24, 1, 3, 5, 4)]
"""A single shape, because JAX compiles for each."""
WRAPPERS = ("plain",) * 12 + ("checkpoint", "autocast", "no_grad", "inference", "meta", "twice", "vmap", "grad", "jvp")
REFUSED_WRAPPERS = ("twice", "vmap", "grad", "jvp")
WRONG = {
    "k of other channels": lambda a: a.update(k=a["k"][..., :-1]),
    "v of another type": lambda a: a.update(v=a["v"].to(torch.int8)),
    "q of integers": lambda a: a.update(q=a["q"].long()),
    "g of other tokens": lambda a: a.update(g=a["g"][:, :-1]),
    "beta with an axis more": lambda a: a.update(beta=a["beta"][..., None]),
    "no tokens": lambda a: a.update({n: a[n][:, :0] for n in ("q", "k", "v", "g", "beta")}),
    "no values": lambda a: a.update(v=a["v"][..., :0]),
    "offsets of int64": lambda a: a.update(cu_seqlens=torch.tensor([0, a["q"].shape[1]])),
    "offsets that decrease": lambda a: a.update(cu_seqlens=torch.tensor([0, 2, 1, a["q"].shape[1]], dtype=torch.int32)),
    "offsets that end early": lambda a: a.update(cu_seqlens=torch.tensor([0, a["q"].shape[1] - 1], dtype=torch.int32)),
    "offsets as a list": lambda a: a.update(cu_seqlens=[0, a["q"].shape[1]]),
    "v as numpy": lambda a: a.update(v=a["v"].detach().float().numpy()),
    "states of other sequences": lambda a: a.update(initial_state=torch.zeros(5, 1, 1, 1, dtype=a["q"].dtype)),
    "chunks of 48": lambda a: a.update(chunk_size=48),
    "scale NaN": lambda a: a.update(scale=float("nan")),
    "bound without a gate": lambda a: a.update(lower_bound=-1.0),
    "gate without A_log": lambda a: a.update(use_gate_in_kernel=True, A_log=None),
}
TOLERANCES = {"float64": (1e-10, 1e-9), "float32": (2e-4, 2e-3), "bfloat16": (8e-3, 4e-2), "float16": (4e-3, 2e-2)}
"""Norm-wise relative tolerances of outputs and of gradients."""


@dataclass(frozen=True)
class Program:
    """One call."""

    backend: str
    rule: str
    form: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    dtype: str
    narrow: tuple[str, ...]
    """Arguments that have the type of q instead of float32."""
    layouts: tuple[tuple[str, str], ...]
    wanted: tuple[str, ...]
    """Arguments with a gradient."""
    of: str
    """Inputs of the loss: outputs, states or both."""
    strength: float
    state: bool
    gate: bool
    norm: bool
    chunk_size: int
    keep: bool
    poison: tuple[str, int, float] | None
    wrapper: str
    changed: str | None
    """Argument that is changed in place between forward and backward."""
    wrong: str | None
    segment: int
    seed: int


def draw(rng: np.random.Generator) -> Program:
    """See tests.fuzz.harness.Fuzzer."""
    backend = "jax" if rng.random() < 0.08 else "torch"
    rule = str(rng.choice(["kda", "gated_delta_rule"]))
    is_jax = backend == "jax"
    shape = (JAX_SHAPES if is_jax else SHAPES)[rng.integers(len(JAX_SHAPES if is_jax else SHAPES))]
    offsets = None
    if is_jax or (shape[0] == 1 and rng.random() < 0.6):
        inner = rng.integers(0, shape[1] + 1, 4 if is_jax else rng.integers(0, 6))
        if len(inner) > 1 and rng.random() < 0.5:
            inner[1] = min(inner[0] + 1, shape[1])
        offsets = (0, *sorted(int(x) for x in inner), shape[1])
    gate = rule == "kda" and not is_jax and rng.random() < 0.3
    state = is_jax or rng.random() < 0.5
    names = ["q", "k", "v", "g", "beta", *(["initial_state"] if state else []), *(["A_log", "dt_bias"] if gate else [])]
    form = "recurrent" if rng.random() < 0.12 and not is_jax else "chunk"
    layout = {n: str(rng.choice(["transposed", "expanded", "sliced"])) for n in names[:5] if rng.random() < 0.3}
    special = rng.choice(["", "poison", "wrapper", "changed", "wrong"], p=[0.35, 0.3, 0.15, 0.1, 0.1])
    poison = None
    if special == "poison" and shape[1] > 1:
        name = str(rng.choice(names[:5]))
        values = [np.nan, -np.inf] if name == "g" else [np.nan, np.inf, -np.inf]
        poison = name, int(rng.integers(shape[1])), float(rng.choice(values))
        layout.pop(name, None)
    changed = str(rng.choice(names)) if special == "changed" and not is_jax else None
    layout.pop(changed or "", None)
    kinds = [name for name in WRONG if (rule == "kda" and not gate) or "gate" not in name]
    kinds = [name for name in kinds if form == "chunk" or "chunks" not in name]
    return Program(
        backend=backend,
        rule=rule,
        form=form,
        shape=shape,
        offsets=offsets,
        dtype=str(rng.choice(["float64", "float32"] if is_jax else [*TOLERANCES])),
        narrow=() if is_jax else tuple(n for n in ("g", "beta", "A_log", "dt_bias") if rng.random() < 0.5),
        layouts=() if is_jax else tuple(sorted(layout.items())),
        wanted=tuple(n for n in names if is_jax or rng.random() < 0.7),
        of="both" if is_jax else str(rng.choice(["outputs", "states", "both"])),
        strength=float(rng.choice([0.0, 0.01, 1.0, 50.0])),
        state=state,
        gate=gate,
        norm=not is_jax and shape[4] > 1 and rng.random() < 0.3,
        chunk_size=16 if is_jax else int(rng.choice([1, 4, 16, 64, 64])),
        keep=not is_jax and rng.random() < 0.3,
        poison=poison,
        wrapper=str(rng.choice(WRAPPERS[12:])) if special == "wrapper" and not is_jax else "plain",
        changed=changed,
        wrong=str(rng.choice(kinds)) if special == "wrong" and shape[1] > 1 and not is_jax else None,
        segment=int(rng.choice([16, 512])),
        seed=int(rng.integers(2**31)),
    )


def features(program: Program) -> Iterator[str]:
    """See tests.fuzz.harness.Fuzzer."""
    p = program
    steps = np.diff(program.offsets or (0, program.shape[1]))
    yield from (p.backend, p.rule, p.dtype, *(layout for _, layout in p.layouts))
    names = {
        "empty document": (steps == 0).any(),
        "document of one token": p.offsets is not None and (steps == 1).any(),
        "no documents": p.offsets is None,
        "not finite": p.poison is not None,
        "strong decay": p.strength == 50,
        "no decay": p.strength == 0,
        "shared heads": p.shape[3] > 1,
        "initial state": p.state,
        "gate": p.gate,
        "some gradients": 0 < len(p.wanted) < 5,
        "wrong": p.wrong is not None,
        "no recompute": p.keep,
        "changed in place": p.changed is not None,
        "transformed": p.wrapper in REFUSED_WRAPPERS,
        "several segments": p.shape[1] > p.segment and not p.keep,
    }
    yield from (name for name, is_there in names.items() if is_there)


def numbers(program: Program, poisoned: bool = True) -> dict[str, np.ndarray]:
    """Return the arguments, rounded to their types, in float64."""
    p = program
    rng = np.random.default_rng(program.seed)
    batch, length, heads, group, key, value = p.shape
    value_heads = heads * group
    per_head = (batch, length, heads * group)
    sequences = batch if p.offsets is None else len(p.offsets) - 1
    decay = per_head + ((key,) if p.rule == "kda" else ())
    q, k = (rng.standard_normal((batch, length, heads, key)) for _ in range(2))
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((*per_head, value)),
        "g": rng.standard_normal(decay) if p.gate else -p.strength * rng.uniform(size=decay),
        "beta": 1.9 * rng.uniform(size=per_head) * rng.choice([0, 1, 1, 1], size=per_head),
        "initial_state": rng.standard_normal((sequences, value_heads, key, value)),
        "A_log": rng.standard_normal(value_heads),
        "dt_bias": rng.standard_normal(value_heads * key),
    }
    if p.poison is not None and poisoned:
        name, token, number = p.poison
        arrays[name][(0, token, -1, *[-1] * (arrays[name].ndim - 3))] = number
    left = {*([] if p.state else ["initial_state"]), *([] if p.gate else ["A_log", "dt_bias"])}
    return {n: torch.from_numpy(x).to(_dtype(p, n)).double().numpy() for n, x in arrays.items() if n not in left}


def _dtype(p: Program, name: str) -> torch.dtype:
    own = getattr(torch, p.dtype)
    return own if name in ("q", "k", "v", *p.narrow) else torch.promote_types(own, torch.float32)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view of the elements in another layout, or an expanded view of some of them."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[:, :1].expand_as(x)
    if layout == "sliced":
        return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
    return x


def run_torch(p: Program, arrays: dict[str, np.ndarray], exact: bool) -> list[torch.Tensor | None]:
    """Return outputs, states and gradients; if exact, those of the recurrence in float64."""
    leaves = {n: torch.from_numpy(x).to(torch.float64 if exact else _dtype(p, n)) for n, x in arrays.items()}
    leaves = {n: x.requires_grad_(n in p.wanted) for n, x in leaves.items()}
    given: dict[str, Any] = {n: laid_out(x, dict(p.layouts).get(n, "")) for n, x in leaves.items()}
    if p.wrong is not None:
        given = {n: x.detach() for n, x in given.items()}
    if p.offsets is not None:
        given["cu_seqlens"] = torch.tensor(p.offsets, dtype=torch.int32)
    given |= {"use_qk_l2norm_in_kernel": True} if p.norm else {}
    given |= {"use_gate_in_kernel": True} if p.gate else {}
    form = "recurrent" if exact else p.form
    given |= {} if form == "recurrent" else {"chunk_size": p.chunk_size, "disable_recompute": p.keep}
    if p.wrong is not None:
        WRONG[p.wrong](given)
    function = getattr(torch_rule, f"{form}_{p.rule}")
    function = inspect.unwrap(function) if p.wrong is not None else function
    with _wrapped("plain" if exact else p.wrapper):
        o, states = _called("plain" if exact else p.wrapper, function, given)
    if p.wrapper in ("no_grad", "inference", "meta"):
        return [o.detach(), states.detach()]
    used = [x for x, name in ((o, "outputs"), (states, "states")) if p.of in (name, "both") and x.requires_grad]
    if not used or not p.wanted:  # the loss does not depend on these arguments
        return [o.detach(), states.detach(), *(torch.zeros_like(leaves[n]) for n in p.wanted)]
    if p.changed is not None and not exact:
        with torch.no_grad():
            given[p.changed].add_(1)
    found = torch.autograd.grad(
        used,
        [leaves[n] for n in p.wanted],
        [_cotangent(p, place, x) for place, x in enumerate(used)],
        allow_unused=True,
        materialize_grads=True,
        create_graph=not exact and p.wrapper == "twice",
    )
    return [o.detach(), states.detach(), *found]


def _cotangent(p: Program, place: int, x: torch.Tensor) -> torch.Tensor:
    values = torch.from_numpy(np.random.default_rng([p.seed, place]).standard_normal(x.shape))
    return values.to(getattr(torch, p.dtype)).to(x.dtype).to(x.device)


@contextlib.contextmanager
def _wrapped(wrapper: str) -> Iterator[None]:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=wrapper == "autocast")
    with modes.get(wrapper, contextlib.nullcontext)(), autocast, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*torch.jit.script", DeprecationWarning
        )  # from the first call of torch.func.jvp
        yield


def _called(wrapper: str, function: Any, given: dict[str, Any]) -> Any:
    def call(v: Any) -> Any:
        return function(**(given | {"v": v}), output_final_state=True)

    if wrapper == "meta":
        given = {n: x.to("meta") if isinstance(x, torch.Tensor) and n != "cu_seqlens" else x for n, x in given.items()}
    if wrapper == "checkpoint":
        return checkpoint(call, given["v"], use_reentrant=False)
    if wrapper == "vmap":
        return torch.func.vmap(call)(given["v"][None])
    if wrapper == "grad":
        torch.func.grad(lambda v: call(v)[0].sum())(given["v"])
    if wrapper == "jvp":
        torch.func.jvp(call, (given["v"],), (given["v"],))
    return call(given["v"])


_COMPILED: dict[tuple, Any] = {}


def run_jax(p: Program, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return outputs, states and gradients; compiled once for all programs of a rule, a shape and a type."""
    function = getattr(jax_rule, f"chunk_{p.rule}")
    names = [*arrays]
    key = (p.rule, p.shape, p.dtype)

    def both(arrays: dict[str, Any], offsets: Any, cotangents: Any) -> Any:
        def call(arrays: dict[str, Any]) -> Any:
            return function(**arrays, cu_seqlens=offsets, output_final_state=True, chunk_size=p.chunk_size)

        results, pull_back = jax.vjp(call, arrays)
        return results, pull_back(cotangents)[0]

    compute = _COMPILED.setdefault(key, jax.jit(both))
    with jax.enable_x64(True):
        own = {n: jnp.asarray(x, p.dtype) for n, x in arrays.items()}
        value = own["v"].shape, own["initial_state"].shape
        cotangents = tuple(
            jnp.asarray(_cotangent(p, place, torch.empty(shape, dtype=getattr(torch, p.dtype))).numpy())
            for place, shape in enumerate(value)
        )
        results, gradients = compute(own, jnp.asarray(p.offsets, jnp.int32), cotangents)
        return [*map(np.asarray, results), *(np.asarray(gradients[n]) for n in names)]


def check(program: Program) -> Outcome:
    """See tests.fuzz.harness.Fuzzer."""
    if not _COMPILED:
        _begin(program)
    usual = chunked.SEGMENT_SIZE
    chunked.SEGMENT_SIZE = program.segment
    try:
        return _checked(program)
    finally:
        chunked.SEGMENT_SIZE = usual


def _begin(like: Program) -> None:
    """Compile all JAX programs and warm PyTorch up, so that first use does not count as a leak."""
    for rule in ("kda", "gated_delta_rule"):
        for dtype in ("float64", "float32"):
            settings = {"layouts": (), "narrow": (), "state": True, "gate": False, "poison": None, "chunk_size": 16}
            shape = JAX_SHAPES[0]
            offsets = (0, 1, 2, 3, 4, JAX_SHAPES[0][1])
            p = replace(like, rule=rule, dtype=dtype, shape=shape, offsets=offsets, **settings)
            run_jax(p, numbers(p))
            for wrapper in ("meta", "jvp"):
                p = replace(p, backend="torch", wrapper=wrapper, form="recurrent", wrong=None, changed=None, norm=False)
                run_torch(p, numbers(p), exact=False)


def _checked(p: Program) -> Outcome:
    try:
        found = run_jax(p, numbers(p)) if p.backend == "jax" else run_torch(p, numbers(p), exact=False)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return _judged(p, error)
    if p.wrong is not None or (p.wrapper in REFUSED_WRAPPERS and p.form == "chunk" and len(found) > 2):
        raise Wrong("expected a refusal, got results")
    if p.wrapper in REFUSED_WRAPPERS:
        return Outcome(EQUAL)
    exact = [x.numpy() for x in run_torch(p, numbers(p), exact=True)]
    if p.wrapper == "meta":
        if [tuple(x.shape) for x in found] != [x.shape for x in exact[:2]]:
            raise Wrong("shapes of the meta device")
        return Outcome(EQUAL)
    ours = [np.asarray(x.double() if isinstance(x, torch.Tensor) else x, np.float64) for x in found]
    if p.poison is None:
        _assert_close(p, ours, exact)
    else:
        _assert_isolated(p, ours, exact)
    return Outcome(EQUAL)


def _judged(p: Program, error: Exception) -> Outcome:
    """Accept an error of this project if the call is invalid."""
    message = str(error)
    if p.changed is not None and re.search("modified (by an )?inplace", message):
        return Outcome(REFUSED, "changed in place")
    is_ours = re.match(r"[\w ]+: expected .*, got ", message, re.DOTALL) is not None
    is_due = p.wrong is not None or p.wrapper in REFUSED_WRAPPERS
    if p.wrapper in REFUSED_WRAPPERS and p.form == "recurrent" and p.wrong is None and p.offsets is None:
        is_due = False
    if is_ours and is_due:
        return Outcome(REFUSED, message)
    raise error


def _assert_close(p: Program, ours: list[np.ndarray], exact: list[np.ndarray]) -> None:
    whole = max((np.linalg.norm(x) for x in exact[2:]), default=0.0)
    for place, (a, b) in enumerate(zip(ours, exact[: len(ours)], strict=True)):
        floor = 1e-2 * whole + 1e-5 * np.sqrt(b.size) if place > 1 else 1e-3 * np.sqrt(b.size)
        difference = np.linalg.norm(a - b) / max(np.linalg.norm(b), floor, 1e-30)
        if not difference <= TOLERANCES[p.dtype][place > 1]:
            raise Wrong(f"{('o', 'states', *p.wanted)[place]}: relative difference {difference:.1e}")


def _assert_isolated(p: Program, ours: list[np.ndarray], exact: list[np.ndarray]) -> None:
    """Check that values that are not finite do not affect earlier tokens or other documents."""
    assert p.poison is not None
    token = p.poison[1]
    offsets = p.offsets or (0, p.shape[1])
    for name, a, b in zip(("o", "states"), ours, exact, strict=False):
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            raise Wrong(f"{name}: finite where the recurrence is not, or not where it is")
    clean = run_jax(p, numbers(p, False)) if p.backend == "jax" else run_torch(p, numbers(p, False), exact=False)
    clean = [np.asarray(x.double() if isinstance(x, torch.Tensor) else x, np.float64) for x in clean]
    if not np.array_equal(ours[0][0, :token], clean[0][0, :token]):
        raise Wrong("outputs of earlier tokens differ")
    bad = int(np.searchsorted(offsets, token, side="right")) - 1
    tokens = np.r_[0 : offsets[bad], offsets[bad + 1] : p.shape[1]]
    expanded = {n for n, layout in p.layouts if layout == "expanded"}
    for name, a, b in zip(("o", *p.wanted), (ours[0], *ours[2:]), (clean[0], *clean[2:]), strict=False):
        if name in ("A_log", "dt_bias") or name in expanded:
            continue
        own = np.arange(len(a)) != bad if name == "initial_state" else (0, tokens)
        pairs = [(a[own], b[own])] + ([] if name == "initial_state" else [(a[1:], b[1:])])
        if not all(np.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs):
            raise Wrong(f"{name}: of another document")

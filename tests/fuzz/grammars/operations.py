"""Valid and invalid calls of the public operations, in both backends, by the reference and by kernels.

The property: both backends, and reference and kernels, accept and refuse the same call with the same message, or their
results and gradients agree within the tolerances. PyTorch runs some kernels as the operations of torch.library, which
compiled models contain.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diptych_kernels import library
from diptych_kernels.torch_backend import TorchBackend
from jax_impl import hyper_connections as jax_mhc
from jax_impl import ops as jax_ops
from parity.tolerances import OPERATION
from reference_torch import hyper_connections as torch_mhc
from reference_torch import ops as torch_ops
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

HARD_CASES = frozenset(
    {
        *("linear", "add_bias", "rms_norm", "short_convolution", "rotary_embedding", "causal_attention", "dropout"),
        *("fused_attention", "masked_attention", "gelu", "swiglu", "cross_entropy", "sinkhorn", "compute_mappings"),
        *("aggregate", "read_streams", "apply_h_res", "apply_h_post", "write_streams", "dropout_state", "kernels"),
        "library",
        *("bad number", "another shape", "another type", "a list", "numpy", "strided", "transformed"),
        "differentiated twice",
    }
)
B = 2
T = 3
S = 2
D = 4
V = 5
ROWS = (B, T)
STREAMS = (B, T, S, D)
TOKENS = (B, T, D)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"x": TOKENS, "weight": (3, D), "bias": (3,)},
    "add_bias": {"x": TOKENS, "bias": (D,)},
    "rms_norm": {"x": TOKENS, "weight": (D,)},
    "short_convolution": {"x": TOKENS, "weight": (D, 2), "before": (T,)},
    "rotary_embedding": {"x": (B, T, 2, D), "positions": (T,)},
    "causal_attention": {"q": (B, T, 2, D), "k": (B, T, 1, D), "v": (B, T, 1, D)},
    "fused_attention": {"q": (B, T, 2, D), "k": (B, T, 1, D), "v": (B, T, 1, D)},
    "masked_attention": {"q": (B, T, 2, D), "k": (B, 4, 1, D), "v": (B, 4, 1, D), "allowed": (T, 4)},
    "gelu": {"x": TOKENS},
    "swiglu": {"x": TOKENS},
    "cross_entropy": {"logits": (B, T, V), "targets": ROWS},
    "dropout": {"x": STREAMS},
    "dropout_state": {"samples": (B,), "positions": (T,)},
    "sinkhorn": {"logits": (B, T, S, S)},
    "compute_mappings": {"x": STREAMS, "phi": (S * D, 8), "alpha": (3,), "bias": (8,)},
    "read_streams": {"x": STREAMS, "phi": (S * D, 8), "alpha": (3,), "bias": (8,)},
    "contract_streams": {"x": STREAMS, "phi": (S * D, S), "alpha": (1,), "bias": (S,)},
    "aggregate": {"x": STREAMS, "h_pre": (B, T, S)},
    "apply_h_res": {"h_res": (B, T, S, S), "residual": STREAMS},
    "apply_h_post": {"output": TOKENS, "bias": (D,), "h_post": (B, T, S)},
    "write_streams": {"residual": STREAMS, "h_res": (B, T, S, S), "output": TOKENS, "bias": (D,), "h_post": (B, T, S)},
}
"""Names of array arguments."""
NUMBERS: dict[str, dict[str, Any]] = {
    "rms_norm": {"epsilon": 1e-5},
    "rotary_embedding": {"base": 100.0},
    "dropout": {"rate": 0.4, "site": 3},
    "dropout_state": {"seed": 7, "step": 5, "seq_length": T},
    "sinkhorn": {"iterations": 4, "last": "row", "mhc_epsilon": 1e-3},
    "compute_mappings": {
        "iterations": 3,
        "last": "column",
        "rms_epsilon": 1e-5,
        "mhc_epsilon": 1e-2,
        "transposed": True,
    },
    "read_streams": {"iterations": 3, "last": "row", "rms_epsilon": 1e-5, "mhc_epsilon": 1e-2, "transposed": False},
    "contract_streams": {"rms_epsilon": 1e-5, "mhc_epsilon": 1e-2},
    "write_streams": {"rate": 0.4, "site": 2},
}
BAD: dict[str, list[Any]] = {
    "epsilon": [float("nan"), float("inf"), -1.0, "0", None],
    "rms_epsilon": [float("nan"), float("inf"), -1.0, "0", None],
    "mhc_epsilon": [float("nan"), float("inf"), -1.0, "0", None],
    "base": [0.0, -1.0, float("inf"), "10"],
    "rate": [1.0, 1.5, -0.5, float("nan"), "0.1", None, True],
    "site": [-1, 2**32, 1.5, "3", True],
    "seed": [-1, 2**32, 0.5, None],
    "step": [-1, 2**32, 2.5],
    "seq_length": [-1, 2**32, 2.5],
    "iterations": [0, -3, 2.5, True, "4", float("nan")],
    "last": ["both", None, 0],
}
INTEGERS = {"before": T, "positions": 50, "targets": V, "samples": 2**20}
WITH_KERNELS = {"gelu", "swiglu", "sinkhorn", "compute_mappings", "contract_streams", "aggregate"}
WITH_KERNELS |= {"read_streams", "apply_h_res", "apply_h_post", "write_streams"}
TRANSFORMED = ("dropout", "short_convolution", "sinkhorn", "gelu", "swiglu", "read_streams", "write_streams")
"""Operations with a custom backward, in a backend or in kernels."""
DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Program:
    """One call in both backends."""

    name: str
    impl: str
    dtype: str
    change: tuple[str, str, Any] | None
    """The error of the call: its kind, the argument, and a detail."""
    strided: bool
    transform: str
    seed: int
    library: bool = False
    """True if PyTorch calls the operation of torch.library."""


def draw(rng: np.random.Generator) -> Program:
    """See tests.fuzz.harness.Fuzzer."""
    name = str(rng.choice([*SHAPES]))
    kernels = name in WITH_KERNELS and rng.random() < 0.3
    argument = str(rng.choice([*SHAPES[name]]))
    change = None
    kind = str(rng.choice(["", "shape", "type", "kind", "number", "state"], p=[0.3, 0.24, 0.12, 0.12, 0.16, 0.06]))
    if kind == "number" and name not in NUMBERS:
        kind = "ids" if name == "cross_entropy" else "shape"
    if kind == "state" and name not in ("dropout", "write_streams"):
        kind = "kind"
    if kind == "shape":
        change = "another shape", argument, int(rng.integers(6))
    elif kind == "type":
        change = "another type", argument, str(rng.choice(["int32", "bool", "complex64", "float32"]))
    elif kind == "kind":
        change = str(rng.choice(["a list", "numpy", "nothing"])), argument, None
    elif kind == "number" and name in NUMBERS:
        number = str(rng.choice([each for each in NUMBERS[name] if each in BAD]))
        change = "bad number", number, BAD[number][rng.integers(len(BAD[number]))]
    elif kind == "state" and name in ("dropout", "write_streams"):
        change = "state", str(rng.choice(["row_low", "row_high"])), str(rng.choice(["turned", "one", "float32"]))
    elif kind == "ids" and name == "cross_entropy":
        change = "ids", "targets", int(rng.choice([-1, V, -(2**63), 2**63 - 1]))
    transform = ""
    if change is None and name in TRANSFORMED and rng.random() < 0.5:
        transform = "differentiated twice" if kernels else str(rng.choice(["mapped", "differentiated twice"]))
    return Program(
        name=name,
        impl="triton" if kernels else "reference",
        dtype="float64" if change is None or change[0] == "ids" else str(rng.choice(DTYPES)),
        change=change,
        strided=bool(rng.random() < 0.3),
        transform=transform,
        seed=int(rng.integers(3)),
        library=kernels and not transform and bool(rng.random() < 0.4),
    )


def features(program: Program) -> Iterator[str]:
    """See tests.fuzz.harness.Fuzzer."""
    yield program.name
    yield from ("kernels",) * (program.impl == "triton") + ("strided",) * program.strided
    yield from ("library",) * program.library
    if program.change is not None:
        yield program.change[0]
    if program.transform:
        yield "transformed"
        yield program.transform


def values(p: Program) -> dict[str, np.ndarray]:
    """Return the arrays of a valid call, with floating-point arrays in float64."""
    rng = np.random.default_rng(p.seed)
    found = {}
    for name, shape in SHAPES[p.name].items():
        if name in INTEGERS:
            found[name] = rng.integers(0, INTEGERS[name], shape)
        elif name == "allowed":
            found[name] = rng.random(shape) < 0.5
            found[name][:, 0] = True
        else:
            found[name] = rng.standard_normal(shape)
    return found


class Backend:
    """Functions of one framework that create arrays and call operations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_torch = name == "torch"
        self.modules = (torch_ops, torch_mhc) if self.is_torch else (jax_ops, jax_mhc)

    def array(self, x: np.ndarray, dtype: str, strided: bool = False) -> Any:
        """Return an array of a type; if strided, as a view of another array."""
        if not self.is_torch:
            return jnp.asarray(x.astype(jnp.dtype(dtype)))  # in NumPy, because JAX would compile it for every shape
        y = torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))
        return torch.stack([y, y], -1)[..., 0] if strided else y

    def function(self, p: Program) -> Callable[..., Any]:
        """Return the operation, without the annotation checks of the tests."""
        module = next(module for module in self.modules if hasattr(module, p.name))
        return inspect.unwrap(getattr(module, p.name))

    def state(self, p: Program) -> Any:
        """Return a dropout state of the arrays' rows."""
        dtype = "int64" if self.is_torch else "uint32"
        rows = np.random.default_rng(0).integers(0, 2**32, (2, *ROWS))
        low, high = (self.array(x, dtype) for x in rows)
        state = self.modules[0].DropoutState(7, 5, low, high)
        if p.change is not None and p.change[0] == "state":
            _, name, how = p.change
            x = getattr(state, name)
            wrong = {"turned": lambda: x.T, "one": lambda: x[:1, :1], "float32": lambda: self.array(rows[0], "float32")}
            state = state._replace(**{name: wrong[how]()})
        return state


BACKENDS = (Backend("torch"), Backend("jax"))


def arguments(p: Program, backend: Backend) -> dict[str, Any]:
    """Return the arguments for one backend."""
    kind, name, sort = p.change or ("", "", None)
    given = {}
    for key, x in values(p).items():
        dtype = p.dtype if x.dtype == np.float64 else x.dtype.name
        if key == name and kind == "ids":
            x = x.copy()
            x[0, 0] = sort
        if key == name and kind == "another shape":
            x = [x[..., :-1], x[None], x.reshape(-1), x[:1], x[..., :0], x.swapaxes(0, -1)][sort]
        if key == name and kind == "another type":
            dtype = sort
        given[key] = backend.array(x, dtype, p.strided)
        if key == name and kind in ("a list", "numpy", "nothing"):
            given[key] = {"a list": x.tolist(), "numpy": x, "nothing": None}[kind]
    numbers = dict(NUMBERS.get(p.name, {}))
    if kind == "bad number":
        numbers[name] = sort
    given |= numbers
    given |= {"state": backend.state(p)} if p.name in ("dropout", "write_streams") else {}
    return given | ({"impl": p.impl} if p.name in WITH_KERNELS else {})


def run(p: Program, backend: Backend) -> list[np.ndarray] | str:
    """Return outputs and gradients, or the message of the refusal."""
    given = arguments(p, backend)
    floating = [n for n, x in values(p).items() if x.dtype == np.float64 and hasattr(given[n], "dtype")]
    floating = [n for n in floating if "float" in str(given[n].dtype) and not isinstance(given[n], np.ndarray)]
    function = backend.function(p)
    compiled = {"apply": _from_library, "returns_inputs": lambda *_: False}  # as in compiled code
    applied = patch.multiple(TorchBackend, **compiled) if p.library else contextlib.nullcontext()
    try:
        with applied:
            return (_run_torch if backend.is_torch else _run_jax)(p, function, given, floating)
    except (ValueError, IndexError, RuntimeError) as error:
        if not re.match(r"[\w.\[\]]+: expected |differentiating twice: ", str(error)):
            raise
        return str(error)


def _from_library(_: TorchBackend, operation: Any, static: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return library.apply(operation, static, *inputs)


def _cotangents(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    return [np.random.default_rng([0, place]).standard_normal(shape) for place, shape in enumerate(shapes)]


def _run_torch(p: Program, function: Callable, given: dict[str, Any], floating: list[str]) -> list[np.ndarray]:
    if p.transform == "mapped":
        mapped = {n: given[n] for n in floating}
        call = lambda x: function(**(given | x))  # noqa: E731
        outputs = _listed(torch.func.vmap(call)({n: torch.stack([x, 2 * x]) for n, x in mapped.items()}))
        return [x.double().numpy() for x in outputs]
    given |= {n: given[n].requires_grad_() for n in floating}
    outputs = [x for x in _listed(function(**given)) if isinstance(x, torch.Tensor)]
    graded = [x for x in outputs if x.requires_grad]
    if not graded:
        return [x.detach().double().numpy() for x in outputs]
    drawn = zip(_cotangents([x.shape for x in graded]), graded, strict=True)
    cotangents = [torch.from_numpy(c).to(x.dtype) for c, x in drawn]
    leaves = [given[n] for n in floating]
    twice = p.transform == "differentiated twice"
    unused = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(graded, leaves, cotangents, create_graph=twice, **unused)
    if twice:
        total = sum((g.double().sin().sum() for g in gradients if g.requires_grad), torch.zeros(()))
        if total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, **unused)
        else:
            gradients = [torch.zeros_like(x) for x in leaves]
    return [x.detach().double().numpy() for x in (*outputs, *gradients)]


_COMPILED: dict[tuple[str, ...], Any] = {}
"""Compiled valid calls, by the properties that determine compilation."""


def _run_jax(p: Program, function: Callable, given: dict[str, Any], floating: list[str]) -> list[np.ndarray]:
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.Array)}

    def call(own: dict[str, Any]) -> list[Any]:
        return [x for x in _listed(function(**(given | own))) if isinstance(x, jax.Array)]

    if p.change is not None and p.change[0] != "ids":  # accepted nevertheless, and not compiled
        return [np.empty(x.shape) for x in jax.eval_shape(call, arrays)]

    def computed(arrays: dict[str, Any]) -> list[Any]:
        own = {n: arrays[n] for n in floating}
        of_own = lambda own: call(arrays | own)  # noqa: E731
        if p.transform == "mapped":
            return jax.vmap(of_own)({n: jnp.stack([x, 2 * x]) for n, x in own.items()})
        if not own or p.name == "dropout_state":
            return call(arrays)
        outputs, pull_back = jax.vjp(of_own, own)
        drawn = zip(_cotangents([x.shape for x in outputs]), outputs, strict=True)
        cotangents = [jnp.asarray(c).astype(x.dtype) for c, x in drawn]
        gradients = pull_back(cotangents)[0]
        if p.transform == "differentiated twice":

            def total(own: dict[str, Any]) -> Any:
                return sum(jnp.sin(g).sum() for g in jax.vjp(of_own, own)[1](cotangents)[0].values())

            gradients = jax.grad(total)(own)
        return [*outputs, *(gradients[n] for n in floating)]

    compute = _COMPILED.setdefault((p.name, p.impl, p.transform), jax.jit(computed))
    return [np.asarray(x, np.float64) for x in compute(arrays)]


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def check(program: Program) -> Outcome:
    """See tests.fuzz.harness.Fuzzer."""
    if not _BEGUN:
        _BEGUN.append(True)
        _begin()
    p = program
    with jax.enable_x64(True):
        ours, theirs = (run(p, backend) for backend in BACKENDS)
        if isinstance(ours, str) and ours.startswith("targets: expected token ids"):
            if isinstance(theirs, str) or ((p.change is None or p.change[0] == "ids") and not np.isnan(theirs[0])):
                raise Wrong("expected NaN of JAX, which does not look at ids")
            return Outcome(REFUSED, "token ids")
        if isinstance(ours, str) or isinstance(theirs, str):
            if not isinstance(ours, str) or not isinstance(theirs, str) or _words(ours) != _words(theirs):
                raise Wrong(f"PyTorch: {str(ours)[:300]}; JAX: {str(theirs)[:300]}")
            return Outcome(REFUSED, ours)
        _assert_close(p, ours, theirs)
    return Outcome(EQUAL)


_BEGUN: list[bool] = []


def _begin() -> None:
    """Run every valid call and some invalid ones, so that first use does not count as a leak."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        with contextlib.suppress(Exception):
            check(draw(rng))
    for name in SHAPES:
        for impl in ("reference", *["triton"] * (name in WITH_KERNELS)):
            transforms = ["", "mapped", "differentiated twice"] if name in TRANSFORMED else [""]
            for transform in transforms:
                if impl == "reference" or transform != "mapped":
                    check(Program(name, impl, "float64", None, False, transform, 0))
            if impl == "triton":
                check(Program(name, impl, "float64", None, False, "", 0, library=True))


def _words(message: str) -> str:
    """Return a message without the framework's names of arrays."""
    return re.sub(r"(Tensor|ArrayImpl|int64|uint32)", "array", message)


def _assert_close(p: Program, ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    if p.change is not None:
        if [x.shape for x in theirs] != [x.shape for x in ours[: len(theirs)]]:
            raise Wrong(f"shapes {[x.shape for x in ours]} and {[x.shape for x in theirs]}")
        return
    whole = max((np.linalg.norm(x) for x in ours), default=0.0)
    tolerance = 20 * OPERATION[p.dtype]
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape:
            raise Wrong(f"array {place}: shapes {a.shape} and {b.shape}")
        difference = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-2 * whole, 1e-30)
        if not difference <= tolerance and not (np.isnan(a) & np.isnan(b)).all():
            raise Wrong(f"array {place}: relative difference {difference:.1e}")

"""Inspection of a computation: its longest reduction, and whether it computes in a narrower dtype than it was given.

A function that casts to float32 inside returns float32 accuracy also when it is given float64. A float64 comparison has
to know that: where both implementations do so, the difference may be as large as an ulp of float32; where only one
does, that is the difference.
"""

import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core, source_info_util
from torch.utils._python_dispatch import TorchDispatchMode

from parity.pytrees import is_floating

_WIDTHS = {"float64": 64, "complex128": 64, "float32": 32, "complex64": 32, "float16": 16, "bfloat16": 16}
"""Bits of a real part by dtype."""
_REAL = {"complex128": "float64", "complex64": "float32"}
"""Dtype of the parts of complex numbers."""
_DIGITS = {64: 8, 32: 8, 16: 3}
"""Binary digits of a number that is taken for one that a program writes down, by the bits of its dtype."""
_HERE = str(Path(__file__).parent)


class Narrowing(NamedTuple):
    """A place where a computation in float64 goes on in a narrower dtype."""

    dtype: str
    place: str
    """File and line, as far as known."""

    def __str__(self) -> str:
        return f"{self.dtype} at {self.place}" if self.place else self.dtype


def is_exact(values: Any, width: int = 64) -> bool:
    """Return True if rounding to a narrower dtype lost nothing: small integers, masks, powers of two, infinities.

    Args:
        values: the values.
        width: bits of their dtype; narrower ones have fewer digits, so that more of them look exact.
    """
    array = np.asarray(values)
    array = np.stack([np.real(array), np.imag(array)]) if array.dtype.kind == "c" else array
    array = array.astype(np.float64)
    array = array[np.isfinite(array)]
    digits = _DIGITS[width]
    mantissas = np.frexp(array)[0] * 2.0**digits
    is_integer = (array == np.floor(array)) & (np.abs(array) < 2.0 ** (3 * digits))
    return bool(np.all((mantissas == np.floor(mantissas)) | is_integer))


class NarrowingRecorder(TorchDispatchMode):
    """A recorder of the operations of PyTorch that compute in a narrower dtype than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest: Narrowing | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and record if a wider operand loses digits or a narrower operand has lost them."""
        result = func(*args, **(kwargs or {}))
        operands = [x for x in jax.tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        widths = [_width(x) for x in operands]
        widest = max(widths, default=0)
        results = [x for x in jax.tree.leaves(result) if isinstance(x, torch.Tensor) and 0 < _width(x) < widest]
        is_cast = func._schema.name in _CASTS and len(operands) == 1 == len(results)
        narrow = [] if is_cast else results
        narrow += [x for x, width in zip(operands, widths, strict=True) if 0 < width < widest]
        with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
            if is_cast and self._is_news(results[0]) and not _is_equal(operands[0], results[0]):
                self.narrowest = Narrowing(_real(results[0]), _torch_place())
            for tensor in narrow:
                if self._is_news(tensor) and not is_exact(_wide(tensor), _width(tensor)):
                    self.narrowest = Narrowing(_real(tensor), _torch_place())
        return result

    def _is_news(self, tensor: torch.Tensor) -> bool:
        return self.narrowest is None or _width(tensor) < _WIDTHS[self.narrowest.dtype]


_CASTS = frozenset({"aten::_to_copy", "aten::to", "aten::copy"})
"""Operations whose only result is their operand in another dtype."""


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(np.array_equal(_wide(one), _wide(other), equal_nan=True))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor in float64 or complex128."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(kind).resolve_conj().resolve_neg().cpu().numpy()


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _width(tensor: torch.Tensor) -> int:
    return _WIDTHS.get(_name(tensor), 0)


def _real(tensor: torch.Tensor) -> str:
    """Return the dtype of a tensor, or of its real and imaginary parts."""
    return _REAL.get(_name(tensor), _name(tensor))


def _torch_place() -> str:
    """Return file and line of the innermost frame outside of PyTorch and this package."""
    frame = sys._getframe(1)
    libraries = (str(Path(torch.__file__).parent), _HERE, str(Path(jax.__file__).parent))
    while frame is not None:
        if not frame.f_code.co_filename.startswith(libraries):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def longest_reduction(program: core.ClosedJaxpr) -> int:
    """Return the largest number of terms that one operation of a jaxpr adds up, and at least 1."""
    return max((_reduced(equation) for equation in _equations(program.jaxpr)), default=1)


def narrowest_in_jaxpr(program: core.ClosedJaxpr) -> Narrowing | None:
    """Return the narrowest place of a jaxpr in float64 where it goes on in a narrower dtype, or None."""
    constants = zip(program.jaxpr.constvars, program.consts, strict=True)
    exact = {id(v) for v, value in constants if jnp.issubdtype(value.dtype, jnp.inexact) and is_exact(value)}
    return min(_narrowings(program.jaxpr, exact), key=lambda found: _WIDTHS[found.dtype], default=None)


def constants_in(program: core.ClosedJaxpr) -> Iterator[str | bytes]:
    """Yield the names of the primitives and the bytes of the constants of a jaxpr, also of those inside it."""
    yield from map(_bytes, program.consts)
    for equation in _equations(program.jaxpr):
        yield equation.primitive.name
        yield from (_bytes(value.val) for value in equation.invars if isinstance(value, core.Literal))
        for parameter in equation.params.values():
            for inner in jax.tree.leaves(parameter, is_leaf=lambda x: hasattr(x, "consts")):
                yield from map(_bytes, getattr(inner, "consts", ()))


def _bytes(value: Any) -> bytes:
    if jnp.issubdtype(getattr(value, "dtype", np.float64), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


_MOVES = frozenset(
    {"broadcast_in_dim", "reshape", "select_n", "squeeze", "transpose", "slice", "concatenate", "expand_dims"}
)
"""Primitives that only move elements."""


def _narrowings(jaxpr: Any, exact: set[int]) -> Iterator[Narrowing]:
    """Yield the conversions that lose digits, and those of values that have lost them before.

    Args:
        jaxpr: the program.
        exact: ids of the variables whose values lose nothing in a narrower dtype; this function adds to them.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        known = [_is_known(value, exact) for value in equation.invars]
        inners = list(_inner_jaxprs(equation))
        for inner in inners:
            if len(inner.invars) == len(equation.invars):
                exact.update(id(v) for v, is_known in zip(inner.invars, known, strict=True) if is_known)
            yield from _narrowings(inner, exact)
        if name == "convert_element_type":
            before, after = (_bits(v) for v in (equation.invars[0], equation.outvars[0]))
            if before and after and before != after and not known[0]:
                narrow = equation.invars[0] if before < after else equation.outvars[0]
                dtype = str(narrow.aval.dtype)
                yield Narrowing(_REAL.get(dtype, dtype), _jax_place(equation))
        is_exact = name == "iota" or (name in (*_MOVES, "convert_element_type") and all(known))
        if is_exact or (len(inners) == 1 and all(_is_known(v, exact) for v in inners[0].outvars)):
            exact.update(id(v) for v in equation.outvars)


def _bits(value: Any) -> int:
    return _WIDTHS.get(str(getattr(value.aval, "dtype", "")), 0)


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for parameter in equation.params.values():
        for inner in jax.tree.leaves(parameter, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield inner.jaxpr
            elif hasattr(inner, "eqns"):
                yield inner


def _is_known(value: Any, exact: set[int]) -> bool:
    """Return True if a value of a jaxpr is known to be exact."""
    if isinstance(value, core.Literal):
        return not is_floating(np.asarray(value.val)) or is_exact(value.val)
    return id(value) in exact or not jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _jax_place(equation: Any) -> str:
    summary = source_info_util.summarize(equation.source_info)
    return Path(summary.split(" ")[0]).name if summary != "unknown" else ""


def _reduced(equation: Any) -> int:
    name = equation.primitive.name
    shape: tuple[Any, ...] = tuple(getattr(equation.invars[0].aval, "shape", ())) if equation.invars else ()
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        return prod(equation.invars[1].aval.shape[1:])
    if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
        return prod(shape[axis] for axis in equation.params["axes"])
    if name.startswith("cum"):
        return shape[equation.params["axis"]]
    if name == "scan":
        return equation.params["length"]
    return 1


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, also those of jaxprs inside others."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner_jaxprs(equation):
            yield from _equations(inner)

"""Triton's interpreter for CPU tensors, usable in one process with compiled kernels.

Triton reads an environment variable at import that selects the interpreter for all kernels or for none. This module
interprets single launches instead, one at a time under a lock. During a launch it patches the Triton language, so that
calls of jitted functions are interpreted, and afterwards it restores the language. A launch takes milliseconds to
seconds, which suits tests and notebooks.

The module also works around these faults of Triton's interpreter:

- In Triton 3.9, ``tl.dot`` multiplies the bit patterns of bfloat16 operands. Operands are converted to float32 here, in
  which the products are exact.
- In Triton 3.9, casts from float32 to bfloat16 truncate. They round to nearest here.
- In Triton 3.6, ``range`` rejects arrays of one element, because numpy no longer converts them to integers.

The interpreter does not emulate tf32, so products of float32 operands are more exact than on a GPU.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction

_LOCK = threading.RLock()  # the interpreter's grid position is global
_PATCHED = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.condition, tl.core.tensor_descriptor_base)


def interpret(
    kernel: JITFunction, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Run all programs of a launch one after the other.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: number of programs along each of up to three axes.
        arguments: CPU tensors and scalars, in the order of the kernel's arguments. Outputs are written in place.
        constants: values of the kernel's constexpr arguments by name.
    """
    with _LOCK, _interpreting(), np.errstate(all="ignore"):  # a GPU gives no warnings about NaN either
        InterpretedFunction(kernel.fn)[grid](*arguments, **constants)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Patch the Triton language for the interpreter, and restore it afterwards."""
    before = [dict(vars(owner)) for owner in _PATCHED]
    call = JITFunction.__call__
    builder = interpreter.interpreter_builder
    dot: Any = builder.create_dot
    setattr(JITFunction, "__call__", _call_interpreted)  # noqa: B010
    cast: Any = _rounding(builder.cast_impl)
    setattr(builder, "create_dot", lambda a, b, *rest: dot(_widened(a), _widened(b), *rest))  # noqa: B010
    setattr(builder, "cast_impl", cast)  # noqa: B010
    patch: Any = interpreter._patch_lang

    def patch_with_index(function: Any) -> Any:
        scope = patch(function)
        setattr(tl.core.tensor, "__index__", lambda x: int(np.asarray(x.handle.data).item()))  # noqa: B010
        return scope

    setattr(interpreter, "_patch_lang", patch_with_index)  # noqa: B010
    try:
        patch_with_index(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        yield
    finally:
        setattr(interpreter, "_patch_lang", patch)  # noqa: B010
        setattr(JITFunction, "__call__", call)  # noqa: B010
        del builder.create_dot, builder.cast_impl  # uncovers the methods of the builder's class
        for owner, attributes in zip(_PATCHED, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    delattr(owner, name)
                elif attributes[name] is not value:
                    setattr(owner, name, attributes[name])


def _call_interpreted(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Interpret a call of a jitted function inside a kernel."""
    return InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _widened(handle: TensorHandle) -> TensorHandle:
    """Convert bfloat16, which the interpreter stores as 16-bit integers, to float32."""
    if handle.dtype != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounding(cast: Callable[[TensorHandle, Any], TensorHandle]) -> Callable[[TensorHandle, Any], TensorHandle]:
    """Return the cast with float32 rounded to bfloat16 to nearest, ties to even."""

    def rounding(handle: TensorHandle, to: Any) -> TensorHandle:
        if handle.dtype != tl.float32 or to.scalar != tl.bfloat16:
            return cast(handle, to)
        bits = np.ascontiguousarray(handle.data, np.float32).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(np.where(np.isnan(handle.data), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    return rounding

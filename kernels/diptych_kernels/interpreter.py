"""The backend without a GPU: kernels run by Triton's interpreter on CPU tensors, beside compiled ones in one process.

Triton interprets every kernel or none, by an environment variable read when it is imported. Here one launch is
interpreted at a time, under a lock: while it runs, calling a jitted function interprets that function, and afterwards
the language is put back as it was. Interpreting is for tests, notebooks and reading: a launch takes milliseconds to
seconds.

Faults of Triton's interpreter are mended. In 3.9 ``tl.dot`` multiplies the integers that bfloat16 numbers are held as
(products are taken in float32 here, where they are exact), and float32 is cut off to bfloat16 instead of rounded; in
3.6 ``range`` refuses arrays of one element, which numpy no longer takes for numbers. The interpreter knows no tf32:
products of float32 numbers are more exact than on a GPU.
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
    """Run every program of a launch, one after the other.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: number of programs, up to three axes.
        arguments: CPU tensors and numbers, in the kernel's order.
        constants: its constexpr arguments.
    """
    with _LOCK, _interpreting(), np.errstate(all="ignore"):  # a GPU makes NaN without a word, too
        InterpretedFunction(kernel.fn)[grid](*arguments, **constants)


@contextmanager
def _interpreting() -> Iterator[None]:
    before = [dict(vars(owner)) for owner in _PATCHED]
    call, builder = JITFunction.__call__, interpreter.interpreter_builder
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
        del builder.create_dot, builder.cast_impl  # the methods of the class show again
        for owner, attributes in zip(_PATCHED, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    delattr(owner, name)
                elif attributes[name] is not value:
                    setattr(owner, name, attributes[name])


def _call_interpreted(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _widened(handle: TensorHandle) -> TensorHandle:
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

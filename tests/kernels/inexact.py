"""Triton's interpreter, as inexact as a GPU.

A GPU computes exponentials, quotients and roots of float32 to 2 or 3 units in the last place, and products of float32
as three products of tf32.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

UNITS = {"create_fdiv": 2, "create_exp": 3, "create_exp2": 2, "create_sqrt": 2}
"""Largest error of each function in units in the last place, at most as the PTX manual states it."""


@contextmanager
def inexact(seed: int = 0) -> Iterator[Counter[str]]:
    """Make the interpreter inexact, and yield the number of results that were changed, by function."""
    changed: Counter[str] = Counter()
    random = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        for name, units in UNITS.items():
            patch.setattr(InterpreterBuilder, name, _perturbed(name, units, random, changed))
        patch.setattr(InterpreterBuilder, "create_dot", _in_tf32(changed))
        yield changed


def _perturbed(name: str, units: int, random: np.random.Generator, changed: Counter[str]) -> Any:
    exact = getattr(InterpreterBuilder, name)

    def perturbed(self: Any, *arguments: Any) -> TensorHandle:
        result = exact(self, *arguments)
        if result.data.dtype != np.float32:
            return result
        changed[name] += 1
        is_power_of_two = np.frexp(result.data)[0] == 0.5  # a GPU has these exactly
        share = np.where(is_power_of_two, 0.0, random.uniform(-units, units, result.data.shape))
        finite = np.where(np.isfinite(result.data), np.abs(result.data), 0)
        wide = result.data.astype(np.float64) + share * np.spacing(finite).astype(np.float64)
        return TensorHandle(np.where(finite > 0, wide, result.data).astype(np.float32), result.dtype)

    return perturbed


def _in_tf32(changed: Counter[str]) -> Any:
    exact = InterpreterBuilder.create_dot

    def dot(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, precision: Any, *rest: Any) -> TensorHandle:
        if a.data.dtype != np.float32 or a.dtype != b.dtype or "x3" not in str(precision).lower():
            return exact(self, a, b, c, precision, *rest)
        changed["create_dot"] += 1
        high = _rounded_to_tf32(a.data), _rounded_to_tf32(b.data)
        low = _rounded_to_tf32(a.data - high[0]), _rounded_to_tf32(b.data - high[1])
        product = (low[0] @ high[1] + high[0] @ low[1]) + high[0] @ high[1]
        return TensorHandle((product + c.data).astype(c.data.dtype), c.dtype)

    return dot


def _rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """Round float32 to the 10 bits of tf32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & ~np.uint64(0x1FFF)).astype(np.uint32).view(np.float32)

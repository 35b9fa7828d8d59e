"""Equivalence tests of a pair of implementations: an assertion, a fixture of pytest, and sizes that find mistakes.

from hypothesis import given
from parity.testing import assert_equivalent, normal, shapes

@given(shapes(rank=2, block=64))
def test_norm(shape):
    assert_equivalent(torch_norm, jax_norm, {"x": normal(shape)})
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from torch import nn

from parity.functions import DifferenceError, Report, compare_functions
from parity.modules import compare_modules
from parity.pytrees import is_array, map_arrays, to_numpy

__all__ = ["assert_equivalent", "drawn_sizes", "equivalence", "normal", "shapes"]

DIFFICULT = "one, odd, power of two, between powers of two, below a block, above a block, empty"
"""Kinds of sizes that the strategies draw and count."""
_drawn: Counter[str] = Counter()


def assert_equivalent(
    torch_side: Callable | nn.Module,
    jax_side: Any,
    inputs: Any,
    *,
    names: Mapping[str, Any] | None = None,
    static: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = ("float64",),
    seed: int = 0,
) -> Report:
    """Check that two implementations agree, outputs and gradients, up to rounding.

    Args:
        torch_side: a function or a module of PyTorch.
        jax_side: its counterpart; see compare_functions.
        inputs: as in compare_functions.
        names: mapping of parameter names; None: as suggest_names proposes. Modules only.
        static: as in compare_functions.
        dtypes: dtypes to compare in.
        seed: seed of cotangents and perturbations.

    Returns:
        The report.

    Raises:
        DifferenceError: they differ; the message ends with lines that reproduce it.
        ValueError: as in compare_functions and compare_modules.
    """
    if isinstance(torch_side, nn.Module) and any(True for _ in torch_side.parameters()):
        report = compare_modules(torch_side, jax_side, inputs, names=names, static=static, dtypes=dtypes, seed=seed)
    else:
        report = compare_functions(torch_side, jax_side, inputs, static=static, dtypes=dtypes, seed=seed)
    if not report.is_equal:
        lines = "\n".join(_reproduction(torch_side, jax_side, inputs, static, seed))
        error = DifferenceError(f"{report.different[0]}\nTo reproduce:\n{lines}")
        error.add_note(str(report))
        raise error
    return report


@pytest.fixture
def equivalence(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return assert_equivalent with a seed that depends on the name of the test, and show its report if the test fails.

    Import it in ``conftest.py``, or list ``parity.testing`` in ``pytest_plugins`` there.

    Example:
        def test_norm(equivalence):
            equivalence(torch_norm, jax_norm, [normal((3, 5))])
    """
    seed = zlib.crc32(request.node.name.encode())

    def check(torch_side: Any, jax_side: Any, inputs: Any, **settings: Any) -> Report:
        try:
            return assert_equivalent(torch_side, jax_side, inputs, **{"seed": seed, **settings})
        except DifferenceError as error:
            request.node.add_report_section("call", "comparison of PyTorch and JAX", "\n".join(error.__notes__))
            raise

    return check


def _reproduction(torch_side: Any, jax_side: Any, inputs: Any, static: Any, seed: int) -> list[str]:
    """Return lines of Python that repeat a comparison, with the inputs written out if they are few."""
    call = "compare_modules" if isinstance(torch_side, nn.Module) else "compare_functions"
    total = 0

    def written(name: str, value: Any) -> Any:
        nonlocal total
        array = to_numpy(value)
        total += array.size
        return _Code(f"np.array({array.tolist()}, {array.dtype.name!r})")

    words = repr(map_arrays(inputs, written, "inputs") if not is_array(inputs) else written("inputs", inputs))
    if total > 24:
        path = "inputs.npy"
        words = f"...  # {total} numbers: save them with np.save({path!r}, inputs, allow_pickle=True)"
    sides = (getattr(side, "__name__", type(side).__name__) for side in (torch_side, jax_side))
    return [
        "    import numpy as np",
        f"    from parity import {call}",
        f"    inputs = {words}",
        f"    report = {call}({', '.join(sides)}, inputs, static={dict(static or {})!r}, seed={seed})",
        "    print(report)",
    ]


class _Code:
    """Text that repr shows as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shapes(rank: int, block: int = 16, largest: int = 64, *, empty: bool = False) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy of shapes in which difficult sizes are frequent; see DIFFICULT.

    Args:
        rank: number of axes.
        block: a tile size of the implementation; sizes around it and its double are drawn.
        largest: largest size of an axis.
        empty: True: 0 is drawn too.
    """
    special = {1, 2, 3, 7, 8, block - 1, block, block + 1, 2 * block - 1, 2 * block + 1}
    candidates = sorted(size for size in special if 1 <= size <= largest) + ([0] if empty else [])
    sizes = st.one_of(st.sampled_from(candidates), st.integers(1, largest)).map(lambda size: _counted(size, block))
    return st.tuples(*[sizes] * rank)


def _counted(size: int, block: int) -> int:
    """Count what kinds of size a size is."""
    kinds = {
        "empty": size == 0,
        "one": size == 1,
        "odd": size % 2 == 1 and size > 1,
        "power of two": size > 1 and size & (size - 1) == 0,
        "between powers of two": size > 2 and size & (size - 1) != 0,
        "below a block": size > 1 and (size + 1) % block == 0,
        "above a block": size > 1 and size % block == 1,
    }
    _drawn.update(kind for kind, has in kinds.items() if has)
    return size


def drawn_sizes() -> dict[str, int]:
    """Return how many sizes of each difficult kind have been drawn in this process."""
    return {kind: _drawn[kind] for kind in DIFFICULT.split(", ")}


def normal(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return a float64 array of normally distributed values."""
    return np.random.default_rng(seed).standard_normal(shape)

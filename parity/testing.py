"""Equivalence tests of a pair of implementations: an assertion, a fixture of pytest, and sizes that find mistakes.

from hypothesis import given
from parity.testing import assert_equivalent, normal, shapes

@given(shapes(rank=2, block=64))
def test_norm(shape):
    assert_equivalent(torch_norm, jax_norm, {"x": normal(shape)})
"""

import pickle
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from torch import nn

from parity.functions import DifferenceError, Report, compare_functions
from parity.modules import compare_modules
from parity.pytrees import map_arrays, to_numpy

__all__ = ["assert_equivalent", "drawn_sizes", "equivalence", "normal", "shapes"]

DIFFICULT = "one, odd, power of two, between powers of two, below a block, above a block, empty"
"""Kinds of sizes that the strategies draw and count."""
WRITTEN = 24
"""Most elements that a reproduction writes out."""
_drawn: Counter[str] = Counter()


def assert_equivalent(
    torch_side: Callable | nn.Module,
    jax_side: Any,
    inputs: Any,
    *,
    names: Mapping[str, Any] | None = None,
    static: Mapping[str, Any] | None = None,
    dtypes: Any = ("float64",),
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
        DifferenceError: they differ, or a result cannot be judged; the message ends with lines that reproduce it.
        ValueError: as in compare_functions and compare_modules.
    """
    if isinstance(torch_side, nn.Module) and any(True for _ in torch_side.parameters()):
        report = compare_modules(torch_side, jax_side, inputs, names=names, static=static, dtypes=dtypes, seed=seed)
    else:
        report = compare_functions(torch_side, jax_side, inputs, static=static, dtypes=dtypes, seed=seed)
    if not report.is_equal:
        settings = {"names": names, "static": static, "dtypes": dtypes, "seed": seed}
        lines = "\n".join(_reproduction(torch_side, jax_side, inputs, settings))
        error = DifferenceError(f"{report.failure}\nTo reproduce:\n{lines}")
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


def _reproduction(torch_side: Any, jax_side: Any, inputs: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return lines of Python that repeat a comparison, with the inputs written out if they are few."""
    is_module = isinstance(torch_side, nn.Module) and any(True for _ in torch_side.parameters())
    call = "compare_modules" if is_module else "compare_functions"
    given = {name: value for name, value in settings.items() if value is not None and (name != "names" or is_module)}
    if isinstance(given.get("names"), Mapping):
        given["names"] = dict(given["names"])
    imports = []
    found = []
    for name, side in (("torch_side", torch_side), ("jax_side", jax_side)):
        module, known = _importable(side)
        if known:
            imports.append(f"    from {module} import {known} as {name}")
        else:
            found.append(f"    # {name} is {_described(side)}, which no import reaches: define it here")
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return [
        "    import numpy as np",
        f"    from parity import {call}",
        *imports,
        *found,
        f"    inputs = {_written(inputs)}",
        f"    report = {call}(torch_side, jax_side, inputs, {arguments})",
        "    print(report)",
    ]


def _described(side: Any) -> str:
    kind = getattr(side, "__qualname__", type(side).__qualname__)
    code = getattr(side, "__code__", None)
    return f"{kind} of {code.co_filename}:{code.co_firstlineno}" if code is not None else kind


def _importable(side: Any) -> tuple[str, str]:
    """Return the module and the name under which a function is imported, or empty texts."""
    name = getattr(side, "__name__", "")
    for module in (getattr(side, "__module__", None), "torch", "torch.nn.functional", "jax.numpy", "jax.nn", "jax.lax"):
        if module and name.isidentifier() and getattr(sys.modules.get(module), name, None) is side:
            return module, name
    return "", ""


def _written(inputs: Any) -> str:
    """Return an expression for the inputs; many elements, and containers that repr does not write, are in a file."""
    total = 0
    is_plain = True

    def written(name: str, value: Any) -> Any:
        nonlocal total, is_plain
        array = to_numpy(value)
        total += array.size
        is_plain = is_plain and array.dtype.kind in "biufc" and bool(np.all(np.isfinite(array)))
        return _Code(f"np.array({array.tolist()}, {array.dtype.name!r})")

    tree = map_arrays(inputs, written, "inputs")
    is_plain = is_plain and all(type(node) in (list, tuple, dict, _Code, int, float, bool) for node in _nodes(tree))
    if total <= WRITTEN and is_plain:
        return repr(tree)
    data = pickle.dumps(map_arrays(inputs, lambda _, value: to_numpy(value), "inputs"))
    path = Path(tempfile.gettempdir()) / f"diptych-inputs-{zlib.crc32(data):08x}.pickle"
    path.write_bytes(data)
    return f"np.load({str(path)!r}, allow_pickle=True)  # {total} elements"


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        yield from _nodes(value)


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
    """Count the kinds of a size, and return the size."""
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

"""Nested containers of arrays, their leaves by name, and conversions between NumPy, PyTorch and JAX.

Both frameworks nest arrays in dictionaries, sequences and dataclasses, each with rules of its own. Comparison needs one
rule: the name of a leaf is the path to it, with dots between keys, fields and positions, so that equal structures have
equal names in both frameworks.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float64": np.dtype(np.float64), "float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
"""Floating dtypes in which implementations are compared, by name."""
Leaves = dict[str, np.ndarray]
"""Arrays by name."""


def is_array(value: Any) -> bool:
    """Return True for arrays of NumPy, PyTorch and JAX, also of zero dimensions, but not for Python numbers."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def children(tree: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the named children of a container, or None for a leaf."""
    if isinstance(tree, Mapping):
        return ((str(key), value) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return iter(zip(tree._fields, tree, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(tree, (list, tuple)):
        return ((str(place), value) for place, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return ((field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return None


def named_leaves(tree: Any, root: str) -> dict[str, Any]:
    """Return the leaves of nested containers by name, without None.

    Args:
        tree: arrays and other values in dictionaries, sequences, named tuples and dataclasses.
        root: name of a tree that is a single leaf, and prefix of no other.

    Raises:
        ValueError: two leaves have the same name.
    """
    found: dict[str, Any] = {}

    def visit(value: Any, name: str) -> None:
        inside = None if is_array(value) else children(value)
        if inside is not None:
            for key, child in inside:
                visit(child, f"{name}.{key}" if name else key)
        elif value is not None:
            if (name or root) in found:
                raise ValueError(f"{name or root}: expected one value of each name, got two")
            found[name or root] = value

    visit(tree, "")
    return found


def map_arrays(tree: Any, convert: Callable[[str, Any], Any], root: str) -> Any:
    """Return equal containers with each array replaced; other leaves stay.

    Args:
        tree: as in named_leaves.
        convert: receives the name and the array.
        root: as in named_leaves.
    """

    def visit(value: Any, name: str) -> Any:
        if is_array(value):
            return convert(name or root, value)
        inside = children(value)
        if inside is None:
            return value
        parts = {key: visit(child, f"{name}.{key}" if name else key) for key, child in inside}
        if isinstance(value, Mapping):
            return _filled(value, dict(zip(value, parts.values(), strict=True)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts.values())
        if isinstance(value, (list, tuple)):
            return type(value)(list(parts.values()))
        return dataclasses.replace(value, **parts)

    return visit(tree, "")


def _filled(mapping: Mapping, values: dict) -> Mapping:
    """Return a mapping of the same class, which may have its values as attributes too, with other values."""
    if type(mapping) is dict:
        return values
    try:
        copied: Any = copy.copy(mapping)
        for key, value in values.items():
            copied[key] = value
        return copied
    except TypeError:  # a mapping that does not change
        return type(mapping)(values)  # pyright: ignore[reportCallIssue]


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of any framework as NumPy array, with equal values and, where NumPy has it, equal dtype.

    bfloat16 and smaller floats stay what they are, as dtypes of the package ml_dtypes.
    """
    if type(array).__module__.partition(".")[0] == "torch" or hasattr(array, "detach"):
        array = array.detach().resolve_conj().resolve_neg().cpu()
        if str(array.dtype) == "torch.bfloat16":
            return array.float().numpy().astype(BFLOAT16)
        return array.numpy()
    return np.asarray(array)


def is_floating(array: np.ndarray) -> bool:
    """Return True for real and complex floating dtypes, including bfloat16."""
    return array.dtype.kind in "fc" or array.dtype in (BFLOAT16,) or "float" in array.dtype.name


def widened(array: np.ndarray) -> np.ndarray:
    """Return floating values in float64 or complex128, exactly; other arrays unchanged."""
    if not is_floating(array):
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return floating values rounded to one of DTYPES; parts of complex ones have at least 32 bits."""
    if not is_floating(array):
        return array
    if array.dtype.kind == "c":
        return array.astype(np.complex128 if dtype == "float64" else np.complex64)
    return array.astype(DTYPES[dtype])

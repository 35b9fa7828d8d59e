"""Errors of a user's function or model, in terms of the inputs: which side, what was expected, and what to do."""

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from parity.pytrees import Leaves, is_array, is_floating

_UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NO_KERNEL = re.compile(
    r"not implemented for|[Uu]nsupported (data ?type|dtype)|[Ll]ow precision dtypes|does not support|"
    r"not supported for|must have the same dtype|Expected both inputs|expected scalar type|should have the same dtype"
)
_NO_GRADIENT = re.compile(r"is not differentiable with respect to|cannot have requires_grad")
_ARGUMENTS = re.compile(
    r"unexpected keyword argument|missing \d+ required|positional arguments? but|takes .* arguments?|multiple values "
    r"for|positional-only|keyword-only"
)


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of a module."""
    return getattr(function, "__name__", type(function).__name__)


@contextlib.contextmanager
def explained(label: str, function: Any, arrays: Leaves, arguments: tuple[tuple, dict[str, Any]]) -> Iterator[None]:
    """Explain errors about arguments and tracing in terms of the inputs; other errors stay as they are.

    Args:
        label: name of the framework.
        function: the function, module or pytree that is called.
        arrays: the inputs by name.
        arguments: positional and keyword arguments.

    Raises:
        ValueError: the function does not accept the arguments, or jax.jit cannot trace it.
    """
    try:
        yield
    except _UNTRACEABLE as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"{label} function {name_of(function)}: expected a function that jax.jit can trace, got: {first_line}; use "
            "jnp.where in place of conditions on values, and pass what is no array as static"
        ) from error
    except TypeError as error:
        if not _is_about_arguments(error, function, arguments):
            error.add_note(f"raised by the {label} function {name_of(function)}")
            raise
        remedy = (
            "pass inputs as a list to give them by position, or wrap the function"
            if arguments[1]
            else "pass as many inputs as the function has arguments, or wrap the function"
        )
        raise ValueError(
            f"{label} function {name_of(function)}: expected to accept inputs {', '.join(arrays)}, got: {error}; "
            f"{remedy}"
        ) from error


def _is_about_arguments(error: TypeError, function: Any, arguments: tuple[tuple, dict[str, Any]]) -> bool:
    """Return True if a function cannot be called with these arguments at all."""
    called = function[0] if isinstance(function, tuple) else function
    called = getattr(called, "forward", called) if isinstance(called, torch.nn.Module) else called
    if isinstance(function, tuple) or not callable(called):
        return bool(_ARGUMENTS.search(str(error)))
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return "argument" in str(error)
    try:
        signature.bind(*arguments[0], **arguments[1])
    except TypeError:
        return True
    return False


@contextlib.contextmanager
def missing_kernels(label: str, dtype: str | None) -> Iterator[None]:
    """Explain that a framework lacks an operation in a dtype, or its gradient.

    Raises:
        ValueError: an operation or a gradient is missing.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if _NO_GRADIENT.search(text):
            raise ValueError(
                f"{label}: expected operations that are differentiable in all floating inputs, got: {text}; pass this "
                "input as static, or compare outputs only (gradients=False)"
            ) from error
        if not isinstance(error, NotImplementedError) and not (dtype != "float64" and _NO_KERNEL.search(text)):
            raise
        raise ValueError(
            f"{label}: expected operations that exist in {dtype or 'their dtype'}, got: {text}; pass dtypes without it"
        ) from error


def check_outputs(found: Mapping[str, Any], label: str) -> None:
    """Raise a ValueError if an output is no dense array of the framework, or there is none."""
    for name, value in found.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not is_array(value) or is_tensor != (label == "PyTorch"):
            expected = "an array" if not is_array(value) else "a tensor" if label == "PyTorch" else "an array of JAX"
            package = type(value).__module__.partition(".")[0]
            got = f"{package}.{type(value).__name__}" if is_array(value) else type(value).__name__
            raise ValueError(
                f"{label} output {name!r}: expected {expected}, got {got}; return arrays in tuples, dictionaries or "
                "dataclasses, and leave out the rest"
            )
        if is_tensor and value.layout is not torch.strided:
            raise ValueError(
                f"{label} output {name!r}: expected a dense tensor, got the layout {value.layout}; return x.to_dense()"
            )
    if not found:
        raise ValueError(f"{label} outputs: expected at least one array, got none")


def checked_inputs(arrays: Mapping[str, Any]) -> None:
    """Raise a ValueError that names an input whose elements are no numbers, or hidden by a mask."""
    for name, value in arrays.items():
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError(
                f"input {name!r}: expected a plain array, got a masked one; pass x.filled(value), and the mask as an "
                "input"
            )
        array = value if isinstance(value, np.ndarray) else None
        if array is not None and array.dtype.kind not in "biufc" and not is_floating(array):
            raise ValueError(
                f"input {name!r}: expected an array of numbers or truth values, got the dtype {array.dtype}; convert "
                "it with x.astype(np.float64), or pass it as static"
            )


def check_seed(seed: Any) -> None:
    """Raise a ValueError if a seed is no integer of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed!r}")

"""One implementation of a computation, in PyTorch or in JAX, run on NumPy arrays in a given dtype.

Both classes have the same methods, so that comparison is written once. A run starts from given values: a module is
copied, and its parameters and buffers are set before each run, so that runs do not influence each other and the
caller's module does not change.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity.call_errors import check_outputs, checked_inputs, explained, missing_kernels
from parity.jax_programs import JaxProgram, Observe, jax_program, unobserved
from parity.pytrees import Leaves, is_array, is_floating, map_arrays, named_leaves, rounded, to_numpy, widened

TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OUTPUT = "output"
"""Name of an output that is a single array."""


class Inputs(NamedTuple):
    """The inputs of a call.

    Args:
        positional: nested containers of arrays, passed by position.
        keyword: nested containers of arrays, passed by name.
        static: further keyword arguments, passed as they are.
    """

    positional: tuple
    keyword: dict[str, Any]
    static: dict[str, Any]

    @property
    def leaves(self) -> dict[str, Any]:
        """All arrays by name, as they are given."""
        trees = {str(place): tree for place, tree in enumerate(self.positional)} | self.keyword
        return {name: leaf for name, leaf in named_leaves(trees, "input").items() if is_array(leaf)}

    @property
    def arrays(self) -> Leaves:
        """All arrays by name, in the byte order of this machine; positional ones are named by their position."""
        arrays = {name: to_numpy(leaf) for name, leaf in self.leaves.items()}
        return {n: x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")) for n, x in arrays.items()}

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the positional and the keyword arguments with other arrays."""
        trees = {str(place): tree for place, tree in enumerate(self.positional)} | self.keyword
        filled = map_arrays(trees, lambda name, _: arrays[name], "input")
        positional = tuple(filled[str(place)] for place in range(len(self.positional)))
        return positional, {name: filled[name] for name in self.keyword} | self.static


class CallInputs(Protocol):
    """Anything that has the arrays of a call, and makes its arguments from others."""

    @property
    def arrays(self) -> Leaves:
        """All arrays by name."""
        ...

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the positional and the keyword arguments with other arrays."""
        ...


def make_inputs(inputs: Any, static: Mapping[str, Any] | None = None) -> Inputs:
    """Return inputs given as a mapping (passed by name), as a list or tuple (by position), or as one array.

    Raises:
        ValueError: there is no array among the inputs, an array's elements are no numbers, or a name is also among
            the static arguments.
    """
    if static is not None and not isinstance(static, Mapping):
        raise ValueError(f"static: expected a mapping of keyword arguments, got {type(static).__name__}")
    keyword = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = (
        () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    )
    made = Inputs(positional, keyword, dict(static or {}))
    twice = sorted(keyword.keys() & made.static.keys())
    if twice:
        raise ValueError(f"static: expected names that are not inputs, got {', '.join(twice)} in both")
    checked_inputs(made.leaves)
    if not made.arrays:
        raise ValueError("inputs: expected at least one array (of NumPy, PyTorch or JAX), got none")
    return made


class Values(NamedTuple):
    """The values from which a run starts; floating ones in float64."""

    inputs: Leaves
    parameters: Leaves
    """Parameters and buffers of a module by name; empty for a function."""

    def rounded(self, dtype: str) -> "Values":
        """Return floating values that are exact in a dtype."""
        inputs, parameters = ({name: widened(rounded(x, dtype)) for name, x in group.items()} for group in self)
        return Values(inputs, parameters)


class Run(NamedTuple):
    """The results of a run; floating ones are widened to float64, exactly, unless the run had no dtype."""

    outputs: Leaves
    input_gradients: Leaves
    """Gradients of floating inputs by name, under the given cotangents; empty without."""
    parameter_gradients: Leaves
    """Gradients of trainable parameters by name; empty without cotangents."""
    is_floating: dict[str, bool]
    """True for outputs with a floating dtype."""
    updates: Mapping[str, np.ndarray] = MappingProxyType({})
    """Floating buffers and variables that forward has changed, by name."""


Cotangents = Leaves | Callable[[str, Any], np.ndarray]
"""Cotangents of floating outputs by name, or a function of the name and something with the output's shape and dtype."""


class Implementation(Protocol):
    """An implementation that can be run."""

    label: str
    """Name of the framework in reports."""
    parameters: Leaves
    """Parameters and floating buffers of the module as they are, widened to float64."""
    trainable: frozenset[str]
    """Names of the parameters that get a gradient."""

    def run(self, values: Values, dtype: str | None, cotangents: Cotangents | None) -> Run:
        """Run forward, and backward if cotangents of the floating outputs are given.

        Args:
            values: the values to start from.
            dtype: one of pytrees.DTYPES; None: every array keeps its dtype, and so do the results.
            cotangents: as in Cotangents.

        Raises:
            ValueError: outputs are not arrays.
        """
        ...


def _selected(found: dict[str, Any], names: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the outputs that have a new name, under that name; all if there are no new names."""
    return found if names is None else {new: found[old] for old, new in names.items()}


class TorchImplementation:
    """A function or an nn.Module of PyTorch.

    Args:
        function: receives tensors; a module is copied.
        call: its inputs.
        device: device of the tensors.
        outputs: names under which outputs are returned; others are left out. None: all, under their own names.
    """

    label = "PyTorch"

    def __init__(
        self,
        function: Callable,
        call: CallInputs,
        device: str | torch.device = "cpu",
        outputs: Mapping[str, str] | None = None,
    ) -> None:
        self.function = function
        self._call = call
        self._names = outputs
        self._device = device
        self._copies: dict[str | None, nn.Module] = {}
        self._needs_gradients = False
        """True if forward computes gradients itself."""
        self.parameters: Leaves = {}
        self.trainable: frozenset[str] = frozenset()
        if isinstance(function, type) or not callable(function):
            got = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise ValueError(f"PyTorch side: expected a function or an nn.Module that is created, got {got}")
        if isinstance(function, nn.Module):
            values = dict(_torch_values(function))
            inexact = {n: v for n, v in values.items() if v.dtype.is_floating_point or v.dtype.is_complex}
            self.parameters = {n: widened(to_numpy(v)) for n, v in inexact.items()}
            self.trainable = frozenset(n for n, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad)

    def module(self, dtype: str | None) -> nn.Module:
        """Return the copy of the module that runs in a dtype."""
        assert isinstance(self.function, nn.Module), "only modules are copied"
        if dtype not in self._copies:
            copied = copy.deepcopy(self.function)
            if isinstance(copied, torch.jit.ScriptModule):  # whose copy has parameters that are no leaves
                self._convert_scripted(copied, dtype)
            else:
                copied = copied._apply(lambda value: self._converted(value, dtype))
            self._copies[dtype] = copied
        return self._copies[dtype]

    def _convert_scripted(self, module: nn.Module, dtype: str | None) -> None:
        """Set the parameters and buffers of a scripted module to copies in a dtype."""
        for submodule in module.modules():
            for name, value in list(submodule._parameters.items()):
                if value is not None:
                    made = nn.Parameter(self._converted(value.detach(), dtype), requires_grad=value.requires_grad)
                    setattr(submodule, name, made)
            for name, value in list(submodule._buffers.items()):
                if value is not None:
                    setattr(submodule, name, self._converted(value.detach(), dtype))

    def _converted(self, value: torch.Tensor, dtype: str | None) -> torch.Tensor:
        """Return a parameter or buffer on the device and, if it is floating or complex, in a dtype."""
        if dtype is None or not (value.is_floating_point() or value.is_complex()):
            return value.to(self._device)
        wide = torch.complex128 if dtype == "float64" else torch.complex64
        return value.to(self._device, wide if value.is_complex() else TORCH_DTYPES[dtype])

    def run(self, values: Values, dtype: str | None, cotangents: Cotangents | None) -> Run:
        """See Implementation.run."""
        if cotangents is None and not self._needs_gradients:
            try:
                return self._run(values, dtype, None, False)
            except RuntimeError as error:  # forward computes gradients itself, for example forces of an energy
                if "does not require grad" not in str(error):
                    raise
                self._needs_gradients = True
        return self._run(values, dtype, cotangents, True)

    def _run(self, values: Values, dtype: str | None, cotangents: Cotangents | None, has_gradients: bool) -> Run:
        """Run forward, with or without recording of gradients, and backward; see Implementation.run."""
        function, parameters = self._prepared(values, dtype)
        inputs = {name: self._tensor(array, dtype) for name, array in values.inputs.items()}
        # Copies, because a function may change its arguments in place.
        copies = {name: value.clone() for name, value in inputs.items()}
        positional, keyword = self._call.with_arrays(copies)
        with _default_dtype(dtype), torch.set_grad_enabled(has_gradients), missing_kernels(self.label, dtype):
            before = {name: value.clone() for name, value in self._buffers(dtype).items()}
            with explained(self.label, self.function, self._call.arrays, (positional, keyword)):
                found = _selected(named_leaves(function(*positional, **keyword), OUTPUT), self._names)
            check_outputs(found, self.label)
            after = self._buffers(dtype)
            updates = {n: x for n, x in after.items() if n in before and not _is_same(before[n], x)}
            of_inputs: dict[str, torch.Tensor] = {}
            of_parameters: dict[str, torch.Tensor] = {}
            floating = {name: value.is_floating_point() or value.is_complex() for name, value in found.items()}
            if cotangents is not None:
                given = _drawn(cotangents, {name: value for name, value in found.items() if floating[name]})
                of_inputs, of_parameters = _torch_gradients(found, (inputs, parameters), given)
        results = [_results(group, dtype) for group in (found, of_inputs, of_parameters, updates)]
        return Run(results[0], results[1], results[2], floating, {n: x.copy() for n, x in results[3].items()})

    def _buffers(self, dtype: str | None) -> dict[str, torch.Tensor]:
        """Return the floating buffers of the copy."""
        if not isinstance(self.function, nn.Module):
            return {}
        return {
            name.removeprefix("_orig_mod."): value
            for name, value in self.module(dtype).named_buffers()
            if value.is_floating_point() or value.is_complex()
        }

    def _prepared(self, values: Values, dtype: str | None) -> tuple[Callable, dict[str, torch.Tensor]]:
        """Return what is called, with its parameters set, and the trainable parameters by name."""
        if not isinstance(self.function, nn.Module):
            return self.function, {}
        module = self.module(dtype)
        originals = dict(_torch_values(self.function))
        leaves = {}
        with torch.no_grad():
            for name, value in _torch_values(module):
                given = values.parameters.get(name)
                value.copy_(originals[name] if given is None else self._tensor(given, dtype).detach())
                if name in self.trainable:
                    leaves[name] = value
        return module, leaves

    def _tensor(self, array: np.ndarray, dtype: str | None) -> torch.Tensor:
        """Return a tensor of the rounded values, which requires a gradient if it is floating."""
        if not is_floating(array):
            return torch.tensor(array, device=self._device)
        dtype = dtype or array.dtype.name
        kind = None if array.dtype.kind == "c" else TORCH_DTYPES[dtype]
        exact = rounded(array, dtype)
        exact = exact if exact.dtype.kind == "c" else exact.astype(np.float64)
        return torch.tensor(exact, dtype=kind, device=self._device).requires_grad_()


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.shape == after.shape and bool(((before == after) | (before.isnan() & after.isnan())).all())


def _drawn(cotangents: Cotangents, outputs: Mapping[str, Any]) -> Leaves:
    """Return the cotangents of floating outputs."""
    return {n: cotangents(n, value) for n, value in outputs.items()} if callable(cotangents) else cotangents


def _results(found: Mapping[str, Any], dtype: str | None) -> Leaves:
    """Return results as NumPy arrays, widened if the run has a dtype."""
    arrays = {name: to_numpy(value) for name, value in found.items()}
    return arrays if dtype is None else {name: widened(array) for name, array in arrays.items()}


def _torch_gradients(
    outputs: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, torch.Tensor]], cotangents: Leaves
) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of groups of tensors by name; zeros for tensors that no output depends on."""
    given = [value for group in groups for value in group.values() if value.requires_grad]
    reached = {name: value for name, value in outputs.items() if value.requires_grad}
    found: Sequence[torch.Tensor | None] = [None] * len(given)
    if reached and given:
        grads = [torch.tensor(cotangents[n], dtype=out.dtype, device=out.device) for n, out in reached.items()]
        found = torch.autograd.grad([*reached.values()], given, grads, allow_unused=True)
    gradients = iter(torch.zeros_like(x) if grad is None else grad for x, grad in zip(given, found, strict=True))
    return [{n: next(gradients) for n, x in group.items() if x.requires_grad} for group in groups]


def _torch_values(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by name; those of a compiled module have the names of the module it compiles."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        yield name.removeprefix("_orig_mod."), value


@contextlib.contextmanager
def _default_dtype(dtype: str | None) -> Iterator[None]:
    """Let constants that a function creates be float64 in a float64 run, as JAX does with 64-bit types enabled."""
    before = torch.get_default_dtype()
    if dtype == "float64":
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class JaxImplementation:
    """A callable of JAX.

    Args:
        function: a function of arrays; an nnx.Module; a linen module and its variables as a tuple; a function and its
            parameters as a tuple, called with the parameters first; or a callable pytree, as in Equinox.
        call: its inputs.
        outputs: as in TorchImplementation.
    """

    label = "JAX"

    def __init__(self, function: Any, call: CallInputs, outputs: Mapping[str, str] | None = None) -> None:
        self.function = function
        self._call = call
        self._names = outputs
        self._programs: dict[str | None, JaxProgram] = {}
        program = self._program("float32")
        self.stored = {name: to_numpy(value) for name, value in program.parameters.items()}
        """Parameters and floating variables in their own dtypes."""
        self.parameters = {name: widened(array) for name, array in self.stored.items()}
        self.trainable = program.trainable
        self.constants = program.constants
        """Names of parameters that need no counterpart; see JaxProgram."""
        self._runs: dict[tuple[str | None, bool], Callable] = {}

    def _program(self, dtype: str | None) -> JaxProgram:
        """Return the callable as it runs in a dtype."""
        if dtype not in self._programs:
            self._programs[dtype] = jax_program(self.function, dtype)
        return self._programs[dtype]

    def run(self, values: Values, dtype: str | None, cotangents: Cotangents | None) -> Run:
        """See Implementation.run."""
        with contextlib.nullcontext() if dtype is None else jax.enable_x64(dtype == "float64"):
            varied, fixed = self.split(values, dtype)
            gradient = cotangents is not None
            if (dtype, gradient) not in self._runs:
                self._runs[dtype, gradient] = jax.jit(
                    partial(self._differentiated if gradient else self.results, dtype)
                )
            if cotangents is None:
                outputs, updates = self._runs[dtype, gradient](varied, fixed)
                gradients = {}
            else:
                shapes = jax.eval_shape(partial(self.outputs, dtype), varied, fixed) if callable(cotangents) else {}
                given = _drawn(cotangents, {n: x for n, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.inexact)})
                (outputs, updates), gradients = self._runs[dtype, gradient](varied, fixed, given)
            floating = {name: jnp.issubdtype(value.dtype, jnp.inexact) for name, value in outputs.items()}
            of_inputs, of_parameters = (
                _results({name: value for (kind, name), value in gradients.items() if kind == group}, dtype)
                for group in ("inputs", "parameters")
            )
            return Run(_results(outputs, dtype), of_inputs, of_parameters, floating, _results(updates, dtype))

    def split(self, values: Values, dtype: str | None) -> tuple[dict, dict]:
        """Return the arrays that get a gradient and the others, by their kind and name."""
        varied = {}
        fixed = {}
        for kind, arrays, trainable in (
            ("inputs", values.inputs, values.inputs.keys()),
            ("parameters", values.parameters, self.trainable),
        ):
            for name, array in arrays.items():
                is_varied = is_floating(array) and name in trainable
                (varied if is_varied else fixed)[kind, name] = _jax_array(array, dtype)
        return varied, fixed

    def program(self, values: Values) -> Any:
        """Return the jaxpr of forward in float64."""
        with jax.enable_x64(True):
            return jax.make_jaxpr(partial(self.outputs, "float64"))(*self.split(values, "float64"))

    def outputs(
        self, dtype: str | None, varied: Mapping, fixed: Mapping, observe: Observe = unobserved
    ) -> dict[str, jax.Array]:
        """Return all outputs by name; see results."""
        return self.results(dtype, varied, fixed, observe)[0]

    def results(
        self, dtype: str | None, varied: Mapping, fixed: Mapping, observe: Observe = unobserved
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return all outputs, and all parameters and variables that the call has changed, by name.

        Args:
            dtype: dtype in which the callable runs.
            varied: arrays that get a gradient, as split returns them.
            fixed: the other arrays.
            observe: receives the module and a function that calls it; it returns what that returns.
        """
        values = {**varied, **fixed}
        inputs = {name: value for (kind, name), value in values.items() if kind == "inputs"}
        parameters = {name: value for (kind, name), value in values.items() if kind == "parameters"}
        positional, keyword = self._call.with_arrays(inputs)
        with explained(self.label, self.function, self._call.arrays, (positional, keyword)):
            returned, updates = self._program(dtype).apply(observe, parameters, *positional, **keyword)
        found = _selected(named_leaves(returned, OUTPUT), self._names)
        check_outputs(found, self.label)
        return {name: jnp.asarray(value) for name, value in found.items()}, jax.lax.stop_gradient(updates)

    def _differentiated(
        self, dtype: str | None, varied: Mapping, fixed: Mapping, cotangents: Mapping
    ) -> tuple[tuple[dict, dict], dict]:
        """Return all outputs with the changed variables, and the gradients of the varied values.

        JAX's pullback of complex values is the transposed, PyTorch's the conjugated transposed Jacobian: cotangents and
        gradients are conjugated here.
        """

        def floating(varied: Mapping) -> tuple[dict, tuple[dict, dict]]:
            outputs, updates = self.results(dtype, varied, fixed)
            return {n: v for n, v in outputs.items() if jnp.issubdtype(v.dtype, jnp.inexact)}, (outputs, updates)

        found, pullback, outputs = jax.vjp(floating, dict(varied), has_aux=True)
        given = {name: jnp.conj(jnp.asarray(cotangents[name], value.dtype)) for name, value in found.items()}
        (gradients,) = pullback(given)
        return outputs, jax.tree.map(jnp.conj, gradients)


def _jax_array(array: np.ndarray, dtype: str | None) -> jax.Array:
    """Return an array of the rounded values.

    Raises:
        ValueError: an integer does not fit the 32 bits that JAX uses by default.
    """
    if dtype is None:
        return jnp.asarray(array)
    narrow = array.dtype in (np.int64, np.uint64) and dtype != "float64"
    if narrow and array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        raise ValueError(
            f"inputs: expected integers of 32 bits in {dtype}, where JAX has no wider ones, got {array.max()}; "
            "compare in float64 only (dtypes=['float64'])"
        )
    return jnp.asarray(rounded(array, dtype))

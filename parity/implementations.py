"""One implementation of a computation, in PyTorch or in JAX, run on NumPy arrays in a given dtype.

Both classes have the same methods, so that comparison is written once. A run starts from given values: a module is
copied, and its parameters and buffers are set before each run, so that runs do not influence each other and the
caller's module does not change.
"""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from torch import nn

from parity.pytrees import DTYPES, Leaves, is_array, is_floating, map_arrays, named_leaves, rounded, to_numpy, widened

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
    def arrays(self) -> Leaves:
        """All arrays by name; positional ones are named by their position."""
        trees = {str(place): tree for place, tree in enumerate(self.positional)} | self.keyword
        return {name: to_numpy(leaf) for name, leaf in named_leaves(trees, "input").items() if is_array(leaf)}

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
        ValueError: there is no array among the inputs, or a name is also among the static arguments.
    """
    keyword = dict(inputs) if isinstance(inputs, Mapping) else {}
    positional = (
        () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    )
    made = Inputs(positional, keyword, dict(static or {}))
    twice = sorted(keyword.keys() & made.static.keys())
    if twice:
        raise ValueError(f"static: expected names that are not inputs, got {', '.join(twice)} in both")
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


def _check_outputs(found: Mapping[str, Any], label: str) -> None:
    """Raise a ValueError if an output is no array, or there is none."""
    for name, value in found.items():
        if not is_array(value):
            raise ValueError(
                f"{label} output {name!r}: expected an array, got {type(value).__name__}; return arrays in tuples, "
                "dictionaries or dataclasses, and leave out the rest"
            )
    if not found:
        raise ValueError(f"{label} outputs: expected at least one array, got none")


@contextlib.contextmanager
def _named_errors(label: str, function: Any, call: CallInputs) -> Iterator[None]:
    """Explain a TypeError about arguments in terms of the inputs."""
    try:
        yield
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(
            f"{label} function {_name(function)}: expected to accept inputs {', '.join(call.arrays)}, got: {error}; "
            "pass inputs as a list to give them by position, or wrap the function"
        ) from error


@contextlib.contextmanager
def _missing_kernels(label: str, dtype: str | None) -> Iterator[None]:
    """Explain that a framework lacks an operation in a dtype."""
    try:
        yield
    except NotImplementedError as error:
        raise ValueError(
            f"{label}: expected operations that exist in {dtype or 'their dtype'}, got: {error}; pass dtypes without it"
        ) from error


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


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
        self.parameters: Leaves = {}
        self.trainable: frozenset[str] = frozenset()
        if isinstance(function, nn.Module):
            values = dict(_torch_values(function))
            self.parameters = {n: widened(to_numpy(v)) for n, v in values.items() if v.dtype.is_floating_point}
            self.trainable = frozenset(n for n, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad)

    def module(self, dtype: str | None) -> nn.Module:
        """Return the copy of the module that runs in a dtype."""
        assert isinstance(self.function, nn.Module), "only modules are copied"
        if dtype not in self._copies:
            kind = None if dtype is None else TORCH_DTYPES[dtype]
            self._copies[dtype] = copy.deepcopy(self.function).to(self._device, kind)
        return self._copies[dtype]

    def run(self, values: Values, dtype: str | None, cotangents: Cotangents | None) -> Run:
        """See Implementation.run."""
        function, parameters = self._prepared(values, dtype)
        inputs = {name: self._tensor(array, dtype) for name, array in values.inputs.items()}
        # Copies, because a function may change its arguments in place.
        copies = {name: value.clone() for name, value in inputs.items()}
        positional, keyword = self._call.with_arrays(copies)
        with (
            _default_dtype(dtype),
            torch.set_grad_enabled(cotangents is not None),
            _missing_kernels(self.label, dtype),
        ):
            with _named_errors(self.label, self.function, self._call):
                found = _selected(named_leaves(function(*positional, **keyword), OUTPUT), self._names)
            _check_outputs(found, self.label)
            of_inputs: dict[str, torch.Tensor] = {}
            of_parameters: dict[str, torch.Tensor] = {}
            floating = {name: value.is_floating_point() or value.is_complex() for name, value in found.items()}
            if cotangents is not None:
                given = _drawn(cotangents, {name: value for name, value in found.items() if floating[name]})
                of_inputs, of_parameters = _torch_gradients(found, (inputs, parameters), given)
        results = [_results(group, dtype) for group in (found, of_inputs, of_parameters)]
        return Run(results[0], results[1], results[2], floating)

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


Observe = Callable[[Any, Callable[[], Any]], Any]
"""Receives a module and a function that calls it; it returns what that returns."""


def _unobserved(module: Any, call: Callable[[], Any]) -> Any:
    return call()


class _JaxProgram(NamedTuple):
    """A JAX callable in one form: a function of parameters and inputs."""

    apply: Callable[..., Any]
    """Receives an observer, the floating parameters by name, then the arguments; returns outputs."""
    parameters: dict[str, Any]
    """Floating parameters and other variables by name."""
    trainable: frozenset[str]


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
        self._programs: dict[str | None, _JaxProgram] = {}
        program = self._program("float32")
        self.parameters = {name: widened(to_numpy(value)) for name, value in program.parameters.items()}
        self.trainable = program.trainable
        self._runs: dict[tuple[str | None, bool], Callable] = {}

    def _program(self, dtype: str | None) -> _JaxProgram:
        """Return the callable as it runs in a dtype."""
        if dtype not in self._programs:
            self._programs[dtype] = _program(self.function, dtype)
        return self._programs[dtype]

    def run(self, values: Values, dtype: str | None, cotangents: Cotangents | None) -> Run:
        """See Implementation.run."""
        with contextlib.nullcontext() if dtype is None else jax.enable_x64(dtype == "float64"):
            varied, fixed = self.split(values, dtype)
            gradient = cotangents is not None
            if (dtype, gradient) not in self._runs:
                self._runs[dtype, gradient] = jax.jit(
                    partial(self._differentiated if gradient else self.outputs, dtype)
                )
            if cotangents is None:
                outputs, gradients = self._runs[dtype, gradient](varied, fixed), {}
            else:
                shapes = jax.eval_shape(partial(self.outputs, dtype), varied, fixed) if callable(cotangents) else {}
                given = _drawn(cotangents, {n: x for n, x in shapes.items() if jnp.issubdtype(x.dtype, jnp.inexact)})
                outputs, gradients = self._runs[dtype, gradient](varied, fixed, given)
            floating = {name: jnp.issubdtype(value.dtype, jnp.inexact) for name, value in outputs.items()}
            of_inputs, of_parameters = (
                _results({name: value for (kind, name), value in gradients.items() if kind == group}, dtype)
                for group in ("inputs", "parameters")
            )
            return Run(_results(outputs, dtype), of_inputs, of_parameters, floating)

    def split(self, values: Values, dtype: str | None) -> tuple[dict, dict]:
        """Return the arrays that get a gradient and the others, by their kind and name."""
        varied, fixed = {}, {}
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
        self, dtype: str | None, varied: Mapping, fixed: Mapping, observe: Observe = _unobserved
    ) -> dict[str, jax.Array]:
        """Return all outputs by name.

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
        with _named_errors(self.label, self.function, self._call):
            found = named_leaves(self._program(dtype).apply(observe, parameters, *positional, **keyword), OUTPUT)
        found = _selected(found, self._names)
        _check_outputs(found, self.label)
        return {name: jnp.asarray(value) for name, value in found.items()}

    def _differentiated(
        self, dtype: str | None, varied: Mapping, fixed: Mapping, cotangents: Mapping
    ) -> tuple[dict, dict]:
        """Return all outputs, and the gradients of the varied values.

        JAX's pullback of complex values is the transposed, PyTorch's the conjugated transposed Jacobian: cotangents and
        gradients are conjugated here.
        """

        def floating(varied: Mapping) -> tuple[dict, dict]:
            outputs = self.outputs(dtype, varied, fixed)
            return {n: v for n, v in outputs.items() if jnp.issubdtype(v.dtype, jnp.inexact)}, outputs

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


def _program(function: Any, dtype: str | None) -> _JaxProgram:
    """Return any supported JAX callable, as it runs in a dtype, as a function of parameters and inputs."""
    if isinstance(function, nnx.Module):
        return _nnx_program(_computing_in(function, dtype))
    if isinstance(function, linen.Module):
        raise ValueError("jax_module: expected a linen module with its variables, (module, variables), got the module")
    if isinstance(function, tuple) and len(function) == 2 and isinstance(function[0], linen.Module):
        variables = function[1]
        module = _storing_in(function[0], dtype)
        return _pytree_program(
            lambda values, *args, **kwargs: module.apply(values, *args, **kwargs), variables, "params"
        )
    if isinstance(function, tuple) and len(function) == 2 and isinstance(function[1], nnx.Module):
        return _nnx_program(_computing_in(function[1], dtype), function[0])
    if isinstance(function, tuple) and len(function) == 2 and callable(function[0]):
        return _pytree_program(function[0], function[1])
    if not callable(function):
        raise ValueError(
            "jax side: expected a function, an nnx.Module, (linen module, variables), (function, parameters) or a "
            f"callable pytree, got {type(function).__name__}"
        )
    if jax.tree.structure(function) == jax.tree.structure(0):
        return _JaxProgram(lambda observe, values, *args, **kwargs: function(*args, **kwargs), {}, frozenset())
    return _pytree_program(lambda module, *args, **kwargs: module(*args, **kwargs), function)


def _computing_in(module: nnx.Module, dtype: str | None) -> nnx.Module:
    """Return a copy of a module that computes in a dtype, as PyTorch's Module.to does; None: in its own.

    Flax's modules store the dtype in which they compute. It is replaced where it is that of the module's parameters. A
    narrower dtype is a decision of the module, and stays. The dtype of parameters is also that of a recurrent cell's
    first state.
    """
    copied = nnx.clone(module)
    if dtype is None:
        return copied
    for _, node in nnx.iter_graph(copied):
        if isinstance(node, nnx.Module) and getattr(node, "param_dtype", None) is jnp.float32:
            setattr(node, "param_dtype", jnp.dtype(DTYPES[dtype]))  # noqa: B010
        computes = getattr(node, "dtype", None) if isinstance(node, nnx.Module) else None
        if computes is None or isinstance(computes, property):
            continue
        own = {value[...].dtype for value in vars(node).values() if isinstance(value, nnx.Variable)}
        if jnp.dtype(computes) in own and jnp.issubdtype(computes, jnp.inexact):
            setattr(node, "dtype", jnp.dtype(DTYPES[dtype]))  # noqa: B010  # pyright knows no such attribute
    return copied


def _storing_in(module: linen.Module, dtype: str | None) -> linen.Module:
    """Return a linen module whose recurrent cells have a first state of a dtype, and with it those in its fields."""
    if dtype is None:
        return module
    values = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    changed: dict[str, Any] = {
        name: _storing_in(value, dtype)
        for name, value in values.items()
        if isinstance(value, linen.Module) and name != "parent"
    }
    if values.get("param_dtype") is jnp.float32:
        changed["param_dtype"] = jnp.dtype(DTYPES[dtype])
    return module.clone(**changed) if changed else module


def _nnx_program(
    module: nnx.Module, function: Callable = lambda module, *args, **kwargs: module(*args, **kwargs)
) -> _JaxProgram:
    """Return a function of a module's variables.

    Args:
        module: the module.
        function: receives the module, then the arguments.
    """
    graph, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    names = {".".join(map(str, path)): path for path in flat}
    floating = {name: path for name, path in names.items() if jnp.issubdtype(flat[path][...].dtype, jnp.inexact)}

    def apply(observe: Observe, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        filled = {path: variable.copy() for path, variable in flat.items()}
        for name, path in floating.items():
            filled[path] = flat[path].replace(values[name])
        merged = nnx.merge(graph, nnx.from_flat_state(filled))
        return observe(merged, lambda: function(merged, *args, **kwargs))

    parameters = {name: flat[path][...] for name, path in floating.items()}
    trainable = frozenset(name for name, path in floating.items() if isinstance(flat[path], nnx.Param))
    return _JaxProgram(apply, parameters, trainable)


def _pytree_program(apply: Callable, tree: Any, trained: str | None = None) -> _JaxProgram:
    """Return a function over a pytree of parameters.

    Args:
        apply: receives the pytree, then the arguments.
        tree: parameters; leaves that are no floating arrays stay as they are.
        trained: top-level key of the trainable ones, which is left out of their names; None: all are trainable.
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    # A variable of nnx in a pytree has one leaf, its value.
    names = [".".join(str(_key(entry)) for entry in path).removesuffix(".value") for path, _ in paths]
    trainable = frozenset(
        n.removeprefix(f"{trained}.") for n in names if trained is None or n.startswith(f"{trained}.")
    )
    names = [name.removeprefix(f"{trained}.") for name in names]
    leaves = [leaf for _, leaf in paths]
    floating = [is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def filled(observe: Observe, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        new = [values[n] if has else leaf for n, leaf, has in zip(names, leaves, floating, strict=True)]
        tree = jax.tree.unflatten(structure, new)
        return observe(tree, lambda: apply(tree, *args, **kwargs))

    parameters = {name: leaf for name, leaf, has in zip(names, leaves, floating, strict=True) if has}
    return _JaxProgram(filled, parameters, trainable & parameters.keys())


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def accepts(function: Callable, name: str) -> bool:
    """Return True if a function accepts a keyword argument, as far as its signature says."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in found or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())

"""Recording of what every submodule receives and returns, and of the cotangents of what it returns.

PyTorch: forward hooks, and a hook on each returned tensor. JAX: calls of submodules are intercepted while the whole
model is traced; zeros are added to each returned array, and the gradient with respect to those zeros is the cotangent.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx

from parity.implementations import OUTPUT, JaxImplementation, TorchImplementation, Values
from parity.pytrees import Leaves, is_array, map_arrays, named_leaves, to_numpy, widened


class Point(NamedTuple):
    """One call of a submodule."""

    path: str
    """Name of the submodule; empty for the whole model."""
    number: int
    """0 for its first call."""

    def __str__(self) -> str:
        return f"{self.path or 'the whole model'}{f' (call {self.number + 1})' if self.number else ''}"


@dataclass
class Call:
    """What a submodule received and returned; floating values in float64."""

    args: tuple
    kwargs: dict[str, Any]
    inputs: Leaves
    """Arrays among the arguments by name: positions, then keywords."""
    outputs: Leaves
    cotangents: Leaves = field(default_factory=dict)
    """Cotangents of floating outputs by name."""


Calls = dict[Point, Call]
"""Calls in the order in which they began."""


def argument_leaves(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays among arguments by name."""
    trees = {**{str(place): tree for place, tree in enumerate(args)}, **kwargs}
    return {name: leaf for name, leaf in named_leaves(trees, "input").items() if is_array(leaf)}


def _numpy(leaves: Mapping[str, Any]) -> Leaves:
    return {name: widened(to_numpy(leaf)) for name, leaf in leaves.items()}


def _output_leaves(output: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(output, OUTPUT).items() if is_array(leaf)}


def record_torch(implementation: TorchImplementation, values: Values, cotangents: Leaves) -> Calls:
    """Run a module forward and backward in float64, and return the calls of all its submodules."""
    module = implementation.module("float64")
    calls: Calls = {}
    running: dict[str, list[Point]] = {}
    handles = []

    def enter(path: str, _: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        number = sum(point.path == path for point in calls)
        copied = {name: leaf.detach().clone() for name, leaf in argument_leaves(args, kwargs).items()}
        calls[Point(path, number)] = Call(args, kwargs, _numpy(copied), {})
        running.setdefault(path, []).append(Point(path, number))

    def leave(path: str, _: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        call = calls[running[path].pop()]
        for name, leaf in _output_leaves(output).items():
            call.outputs[name] = widened(to_numpy(leaf.detach().clone()))
            if leaf.requires_grad:
                leaf.register_hook(partial(keep, call, name))

    def keep(call: Call, name: str, gradient: torch.Tensor) -> None:
        call.cotangents[name] = widened(to_numpy(gradient))

    for path, submodule in module.named_modules():
        name = path.removeprefix("_orig_mod").removeprefix(".")
        handles.append(submodule.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
        handles.append(submodule.register_forward_hook(partial(leave, name), with_kwargs=True))
    try:
        implementation.run(values, "float64", cotangents)
    finally:
        for handle in handles:
            handle.remove()
    for call in calls.values():
        _fill_cotangents(call)
    return calls


def _fill_cotangents(call: Call) -> None:
    """Add zeros for outputs that the result does not depend on."""
    for name, output in call.outputs.items():
        if output.dtype.kind in "fc":
            call.cotangents.setdefault(name, np.zeros_like(output))


class _JaxTracer:
    """An observer of the calls of submodules while JAX traces the model.

    Args:
        taps: zeros to add to outputs, by point and name; empty while their shapes are not known.
    """

    def __init__(self, taps: Mapping[tuple[Point, str], Any]) -> None:
        self.calls: dict[Point, tuple[tuple, dict, dict, dict]] = {}
        self.modules: dict[str, Any] = {}
        """Submodules of linen by name, detached from the model."""
        self.hidden: set[str] = set()
        """Submodules that only run inside a scan, a jit or another transformation."""
        self._taps = taps
        self._trace = jax.extend.core.get_opaque_trace_state(convention="flax")

    def call(self, path: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a submodule and record the call."""
        if jax.extend.core.get_opaque_trace_state(convention="flax") != self._trace:
            self.hidden.add(path)
            return function(*args, **kwargs)
        point = Point(path, sum(known.path == path for known in self.calls))
        inputs = argument_leaves(args, kwargs)
        self.calls[point] = args, kwargs, inputs, {}
        output = function(*args, **kwargs)
        output = map_arrays(output, lambda name, leaf: self._tapped(point, name, leaf), OUTPUT)
        self.calls[point] = args, kwargs, inputs, _output_leaves(output)
        return output

    def _tapped(self, point: Point, name: str, leaf: Any) -> Any:
        tap = self._taps.get((point, name))
        return leaf if tap is None else leaf + tap.astype(leaf.dtype)


@contextlib.contextmanager
def _intercepted(tracer: _JaxTracer, model: Any) -> Iterator[None]:
    """Send every call of a submodule of a model to the tracer."""
    if not isinstance(model, nnx.Module):

        def intercept(function: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
            if context.method_name != "__call__":
                return function(*args, **kwargs)
            path = ".".join(context.module.path)
            tracer.modules.setdefault(path, context.module.clone(parent=None, name=None))
            return tracer.call(path, function, args, kwargs)

        with linen.intercept_methods(intercept):
            yield
        return
    paths = {id(node): ".".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
    classes = {type(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
    originals = {kind: kind.__dict__["__call__"] for kind in classes if "__call__" in kind.__dict__}

    def wrapped(original: Callable) -> Callable:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None:
                return original(self, *args, **kwargs)
            return tracer.call(path, partial(original, self), args, kwargs)

        return call

    try:
        for kind, original in originals.items():
            kind.__call__ = wrapped(original)
        yield
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


class JaxRecord(NamedTuple):
    """The recording of a JAX model."""

    calls: Calls
    hidden: frozenset[str]
    """Submodules that run only inside another transformation, such as lax.scan, where calls cannot be recorded."""
    modules: dict[str, Any]
    """Submodules of linen by name."""


def record_jax(implementation: JaxImplementation, values: Values, cotangents: Leaves) -> JaxRecord:
    """Run a module forward and backward in float64, and return the calls of all its submodules."""
    records: list[_JaxTracer] = []

    def run(taps: Mapping[tuple[Point, str], Any], varied: Mapping, fixed: Mapping) -> tuple[dict, list]:
        def observed(model: Any, call: Callable) -> Any:
            tracer = _JaxTracer(taps)
            records.append(tracer)
            with _intercepted(tracer, model):
                return call()

        outputs = implementation.outputs("float64", varied, fixed, observed)
        found = [(inputs, outs) for _, _, inputs, outs in records[-1].calls.values()]
        floating = {name: value for name, value in outputs.items() if jnp.issubdtype(value.dtype, jnp.inexact)}
        return floating, found

    with jax.enable_x64(True):
        varied, fixed = implementation.split(values, "float64")
        _, shapes = jax.eval_shape(partial(run, {}), varied, fixed)
        taps = {
            (point, name): jnp.zeros(leaf.shape, leaf.dtype)
            for point, (_, outs) in zip(records[-1].calls, shapes, strict=True)
            for name, leaf in outs.items()
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        }
        keys = list(taps)

        @jax.jit
        def differentiated(zeros: list, varied: Mapping, fixed: Mapping, cotangents: Mapping) -> tuple[list, list]:
            def of_taps(zeros: list) -> tuple[dict, list]:
                return run(dict(zip(keys, zeros, strict=True)), varied, fixed)

            outputs, pullback, found = jax.vjp(of_taps, zeros, has_aux=True)
            given = {n: jnp.conj(jnp.asarray(cotangents[n], out.dtype)) for n, out in outputs.items()}
            return found, jax.tree.map(jnp.conj, pullback(given)[0])

        found, gradients = differentiated(list(taps.values()), varied, fixed, cotangents)
        structure = records[-1].calls
        calls: Calls = {}
        for point, (inputs, outs) in zip(structure, found, strict=True):
            args, kwargs, *_ = structure[point]
            calls[point] = Call(args, kwargs, _numpy(inputs), _numpy(outs))
        for (point, name), gradient in zip(keys, gradients, strict=True):
            calls[point].cotangents[name] = widened(np.asarray(gradient))
    hidden = frozenset(records[-1].hidden - {point.path for point in calls})
    return JaxRecord(calls, hidden, records[-1].modules)

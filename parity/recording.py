"""Recording of the inputs and outputs of every submodule, and of the cotangents of its outputs.

PyTorch: forward hooks, and a hook on each returned tensor. JAX: calls of submodules are intercepted while the whole
model is traced; zeros are added to each returned array, and the gradient with respect to those zeros is the cotangent.
"""

import contextlib
import inspect
from collections import Counter
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
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from parity.array_store import ArrayStore
from parity.implementations import OUTPUT, JaxImplementation, TorchImplementation, Values
from parity.pytrees import Leaves, is_array, map_arrays, named_leaves, to_numpy, widened
from parity.rounding import distance


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
    """The inputs and outputs of one call of a submodule; floating values in float64."""

    args: tuple
    """Positional arguments, with only shapes in place of arrays."""
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    """Names of the positional arguments in the signature; empty if it is not known."""
    parent: Point | None
    """The call inside which this one began."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Arrays among the arguments by name: positions, then keywords. Of JAX, only shapes of floating ones whose elements
    are not all equal."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Inputs that are the same array as an earlier one, by name, and the name of the first."""
    outputs: Leaves = field(default_factory=dict)
    cotangents: Leaves = field(default_factory=dict)
    """Cotangents of floating outputs by name."""


Calls = dict[Point, Call]
"""Calls in the order in which they began."""
Keep = Callable[[Point, str, str, np.ndarray], Any]
"""Receives a point, a field of its call, the name of an array and the array; returns what is stored for it."""


def _bound(function: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], tuple[str, ...]]:
    """Return arguments with as many as possible by position, and the names of those in the signature."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, dict(kwargs), ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)
    return bound.args, bound.kwargs, names[: len(bound.args)]


def _argument_leaves(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays among arguments by name."""
    trees = {**{str(place): tree for place, tree in enumerate(args)}, **kwargs}
    return {name: leaf for name, leaf in named_leaves(trees, "input").items() if is_array(leaf)}


def _repeated(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of arrays that are an earlier array too, and the name of that."""
    first: dict[int, str] = {}
    return {name: first[id(leaf)] for name, leaf in leaves.items() if first.setdefault(id(leaf), name) != name}


def _shapes(tree: Any) -> Any:
    """Return equal containers with the shapes of arrays, so that no array stays in memory."""
    return map_arrays(tree, lambda _, leaf: _shape(leaf), "input")


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array, with the dtype that it has in a recording."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    if "complex" in dtype:
        return jax.ShapeDtypeStruct(tuple(leaf.shape), np.complex128)
    return jax.ShapeDtypeStruct(tuple(leaf.shape), np.float64 if "float" in dtype else np.dtype(dtype))


def _output_leaves(output: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(output, OUTPUT).items() if is_array(leaf)}


class _TorchRecorder:
    """An observer of the calls of submodules of PyTorch."""

    def __init__(self, keep: Keep) -> None:
        self.calls: Calls = {}
        self._keep = keep
        self._counts: Counter[str] = Counter()
        self._running: list[Point] = []
        self._hooked: set[str] = set()
        self._versions = WeakTensorKeyDictionary()
        """Versions of the tensors that were an input or output of a submodule."""
        self._is_over = False

    def observe(self, path: str, module: nn.Module) -> Callable[[], None]:
        """Record the calls of a submodule, through hooks or of its forward; return a function that ends it."""
        enter = partial(self._enter_through_hooks, path)
        handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(lambda m, a, k, output: self._leave(path, output), with_kwargs=True),
        ]
        before = module.__dict__.get("forward")
        forward = module.forward
        is_scripted = isinstance(module, torch.jit.ScriptModule)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if path in self._hooked:
                self._hooked.discard(path)
                return forward(*args, **kwargs)
            self._enter(path, forward, args, kwargs)
            return self._leave(path, forward(*args, **kwargs))

        def end() -> None:
            for handle in handles:
                handle.remove()
            if before is not None:
                module.forward = before
            elif not is_scripted:
                del module.forward

        if not is_scripted:
            observed.__signature__ = inspect.signature(forward)
            module.forward = observed
        return end

    def _enter_through_hooks(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._hooked.add(path)
        self._enter(path, module.forward, args, kwargs)

    def _enter(self, path: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        point = Point(path, self._counts[path])
        parent = self._running[-1] if self._running else None
        self._running.append(point)
        if self._is_over:  # a checkpoint replays forward in backward
            return
        self._counts[path] += 1
        args, kwargs, names = _bound(function, args, kwargs)
        call = Call(_shapes(args), {name: _shapes(tree) for name, tree in kwargs.items()}, names, parent)
        self.calls[point] = call
        inputs = _argument_leaves(args, kwargs)
        call.repeated.update(_repeated(inputs))
        for name, leaf in inputs.items():
            self._versions[leaf] = leaf._version
            call.inputs[name] = self._stored(point, "inputs", name, leaf.detach().clone())

    def _leave(self, path: str, output: Any) -> Any:
        """End a call, and return its output with a new tensor in place of each one that other calls have seen."""
        point = self._running.pop()
        assert point.path == path, "calls end in the order in which they began"
        if self._is_over:
            return output
        count = sum(leaf.requires_grad for leaf in _output_leaves(output).values())
        if count > 1 or any(self._separated(leaf, False) is not leaf for leaf in _output_leaves(output).values()):
            output = map_arrays(output, lambda _, leaf: self._separated(leaf, count > 1), OUTPUT)
        for name, leaf in _output_leaves(output).items():
            self._versions[leaf] = leaf._version
            self.calls[point].outputs[name] = self._stored(point, "outputs", name, leaf.detach().clone())
            if leaf.requires_grad:
                leaf.register_hook(partial(self._receive, point, name))
        self._is_over = not self._running
        return output

    def _separated(self, leaf: torch.Tensor, is_one_of_several: bool) -> torch.Tensor:
        """Return an equal tensor whose gradient is that of this output of a submodule."""
        if not leaf.requires_grad:
            return leaf
        if self._versions.get(leaf) == leaf._version:  # the gradient of the tensor adds up its uses before this call
            return leaf.view_as(leaf)
        is_view = leaf._base is not None and leaf._base not in self._versions
        # A change in place would remove the hook of a view. Another output may depend on this one.
        return leaf.clone() if is_view or is_one_of_several else leaf

    def _receive(self, point: Point, name: str, gradient: torch.Tensor) -> None:
        self.calls[point].cotangents[name] = self._stored(point, "cotangents", name, gradient)

    def _stored(self, point: Point, kind: str, name: str, tensor: torch.Tensor) -> Any:
        return self._keep(point, kind, name, widened(to_numpy(tensor)))


def _observed_run(implementation: TorchImplementation, values: Values, cotangents: Leaves, keep: Keep) -> Calls:
    """Run a module forward and backward in float64, and return the calls of all its submodules."""
    recorder = _TorchRecorder(keep)
    with contextlib.ExitStack() as stack:
        for path, submodule in implementation.module("float64").named_modules():
            stack.callback(recorder.observe(path, submodule))
        implementation.run(values, "float64", cotangents)
    return recorder.calls


def record_torch(implementation: TorchImplementation, values: Values, cotangents: Leaves, store: ArrayStore) -> Calls:
    """Run a module forward and backward in float64, and return the calls of all its submodules."""
    calls = _observed_run(implementation, values, cotangents, lambda point, kind, name, array: store.keep(array))
    for call in calls.values():
        for name, output in call.outputs.items():
            if output.dtype.kind in "fc":  # zero where the result does not depend on an output
                call.cotangents.setdefault(name, np.zeros_like(output))
    return calls


Spreads = dict[tuple[Point, str, str], float]
"""Changes of recorded arrays, by point, field of the call and name."""


def torch_spreads(implementation: TorchImplementation, values: Values, cotangents: Leaves, base: Calls) -> Spreads:
    """Return how far the outputs and cotangents of all submodules are from recorded ones."""
    found: Spreads = {}

    def measure(point: Point, kind: str, name: str, array: np.ndarray) -> None:
        known = getattr(base[point], kind).get(name) if point in base and kind != "inputs" else None
        if known is not None and known.shape == array.shape:
            found[point, kind, name] = distance(array, known)

    _observed_run(implementation, values, cotangents, measure)
    return found


class _Traced(NamedTuple):
    """A call of a submodule while JAX traces the model."""

    call: Call
    inputs: dict[str, Any]
    """Arrays that are not floating, and the extremes of the floating ones, by name."""
    outputs: dict[str, Any]


class _JaxTracer:
    """An observer of the calls of submodules while JAX traces the model.

    Args:
        taps: zeros to add to outputs, by point and name.
    """

    def __init__(self, taps: Mapping[tuple[Point, str], Any]) -> None:
        self.traced: dict[Point, _Traced] = {}
        self.modules: dict[str, Any] = {}
        """Submodules of linen by name, detached from the model."""
        self.hidden: set[str] = set()
        """Submodules that run inside a scan, a jit or another transformation, or through another method."""
        self._taps = taps
        self._counts: Counter[str] = Counter()
        self._running: list[Point] = []
        self._trace = jax.extend.core.get_opaque_trace_state(convention="flax")

    def call(self, path: str, function: Callable, signature: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a submodule and record the call, unless it is inside a call of the same submodule."""
        if any(point.path == path for point in self._running):  # the method of a base class
            return function(*args, **kwargs)
        if jax.extend.core.get_opaque_trace_state(convention="flax") != self._trace:
            self.hidden.add(path)
            return function(*args, **kwargs)
        point = Point(path, self._counts[path])
        self._counts[path] += 1
        bound, keyword, names = _bound(signature, args, kwargs)
        inputs = _argument_leaves(bound, keyword)
        parent = self._running[-1] if self._running else None
        call = Call(_shapes(bound), {name: _shapes(tree) for name, tree in keyword.items()}, names, parent)
        call.inputs.update({name: _shape(leaf) for name, leaf in inputs.items()})
        call.repeated.update(_repeated(inputs))
        recorded = {name: _extremes(leaf) if leaf.size else leaf for name, leaf in _floating(inputs).items()}
        recorded |= {name: leaf for name, leaf in inputs.items() if name not in recorded}
        outputs: dict[str, Any] = {}
        self.traced[point] = _Traced(call, recorded, outputs)
        self._running.append(point)
        try:
            output = function(*args, **kwargs)
        finally:
            self._running.pop()
        output = map_arrays(output, lambda name, leaf: self._tapped(point, name, leaf), OUTPUT)
        outputs.update(_output_leaves(output))
        return output

    def _tapped(self, point: Point, name: str, leaf: Any) -> Any:
        tap = self._taps.get((point, name))
        return leaf if tap is None else leaf + tap.astype(leaf.dtype)


@contextlib.contextmanager
def _intercepted(tracer: _JaxTracer, model: Any) -> Iterator[None]:
    """Send every call of a submodule of a model to the tracer."""
    if not isinstance(model, nnx.Module):

        def intercept(function: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
            path = ".".join(context.module.path)
            if context.method_name != "__call__":
                if path and context.method_name != "setup":
                    tracer.hidden.add(path)
                return function(*args, **kwargs)
            tracer.modules.setdefault(path, context.module.clone(parent=None, name=None))
            return tracer.call(path, function, context.module.__call__, args, kwargs)

        with linen.intercept_methods(intercept):
            yield
        return
    paths = {id(node): path for path, node in nnx_submodules(model).items()}
    # The class that defines __call__ may be a base class of the submodule's.
    classes = {base for node in nnx_submodules(model).values() for base in type(node).__mro__ if _has_call(base)}
    originals = {kind: kind.__dict__["__call__"] for kind in classes}

    def wrapped(original: Callable) -> Callable:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            function = partial(original, self)
            return function(*args, **kwargs) if path is None else tracer.call(path, function, function, args, kwargs)

        return call

    try:
        for kind, original in originals.items():
            kind.__call__ = wrapped(original)
        yield
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


def nnx_submodules(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return the modules of an nnx model by path, itself included; one that is shared has its first path."""
    nodes = nnx.iter_graph(model)
    return {".".join(map(str, path)): node for path, node in nodes if isinstance(node, nnx.Module)}


def _has_call(kind: type) -> bool:
    return issubclass(kind, nnx.Module) and "__call__" in kind.__dict__


class JaxRecord(NamedTuple):
    """The recording of a JAX model."""

    calls: Calls
    hidden: frozenset[str]
    """Submodules that were not recorded: they run only inside another transformation, such as lax.scan, or through
    another method than __call__."""
    modules: dict[str, Any]
    """Submodules of linen by name."""


class _JaxRecording:
    """A run of a JAX module in which submodules are observed."""

    def __init__(self, implementation: JaxImplementation) -> None:
        self._implementation = implementation
        self.tracer = _JaxTracer({})
        """The observer of the latest run."""

    def run(
        self, points: frozenset[Point], taps: Mapping[tuple[Point, str], Any], varied: Mapping, fixed: Mapping
    ) -> tuple[dict, dict]:
        """Return the floating outputs, and integer inputs and all outputs of some points."""

        def observed(model: Any, call: Callable) -> Any:
            self.tracer = _JaxTracer(taps)
            with _intercepted(self.tracer, model):
                return call()

        outputs = self._implementation.outputs("float64", varied, fixed, observed)
        found = {p: (traced.inputs, traced.outputs) for p, traced in self.tracer.traced.items() if p in points}
        return _floating(outputs), found

    def shapes(self, varied: Mapping, fixed: Mapping) -> dict[Point, tuple[dict, dict]]:
        """Return the shapes of integer inputs and of outputs of all points."""
        found: dict[Point, tuple[dict, dict]] = {}

        def traced(varied: Mapping, fixed: Mapping) -> None:
            self.run(frozenset(), {}, varied, fixed)
            for point, one in self.tracer.traced.items():
                shapes = [{n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in group.items()} for group in one[1:]]
                found[point] = shapes[0], shapes[1]

        jax.eval_shape(traced, varied, fixed)
        return found

    def differentiated(self, shapes: Mapping[Point, tuple[dict, dict]], values: tuple, cotangents: Leaves) -> tuple:
        """Run forward and backward, and return what run returns and the cotangents of outputs, of some points."""
        keys = [(point, name) for point, (_, outputs) in shapes.items() for name in _floating(outputs)]
        zeros = [jnp.zeros(shapes[point][1][name].shape, shapes[point][1][name].dtype) for point, name in keys]
        points = frozenset(shapes)

        @jax.jit
        def run(zeros: list, varied: Mapping, fixed: Mapping, cotangents: Mapping) -> tuple:
            def of_taps(zeros: list) -> tuple[dict, list]:
                outputs, found = self.run(points, dict(zip(keys, zeros, strict=True)), varied, fixed)
                return outputs, [found[point] for point in shapes]

            outputs, pullback, found = jax.vjp(of_taps, zeros, has_aux=True)
            given = {name: jnp.conj(jnp.asarray(cotangents[name], out.dtype)) for name, out in outputs.items()}
            return found, jax.tree.map(jnp.conj, pullback(given)[0])

        found, gradients = run(zeros, *values, cotangents)
        return dict(zip(shapes, found, strict=True)), dict(zip(keys, gradients, strict=True))


def _floating(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.inexact)}


def record_jax(
    implementation: JaxImplementation, values: Values, cotangents: Leaves, store: ArrayStore, most: int
) -> JaxRecord:
    """Run a module forward and backward in float64, and return the calls of all its submodules.

    Args:
        implementation: the module.
        values: starting values.
        cotangents: cotangents of the outputs.
        store: receives the arrays.
        most: bytes that one run returns; the module runs again until all points are recorded.
    """
    recording = _JaxRecording(implementation)
    with jax.enable_x64(True):
        split = implementation.split(values, "float64")
        shapes = recording.shapes(*split)
        calls = {point: traced.call for point, traced in recording.tracer.traced.items()}
        modules = recording.tracer.modules
        hidden = frozenset(recording.tracer.hidden - {point.path for point in calls})
        for part in _parts(shapes, most):
            found, gradients = recording.differentiated(part, split, cotangents)
            for point, (inputs, outputs) in found.items():
                for name, array in inputs.items():
                    _fill_input(calls[point], name, np.asarray(array), store)
                for name, array in outputs.items():
                    calls[point].outputs[name] = store.keep(widened(np.asarray(array)))
            for (point, name), gradient in gradients.items():
                calls[point].cotangents[name] = store.keep(widened(np.asarray(gradient)))
    return JaxRecord(calls, hidden, modules)


def _extremes(array: Any) -> jax.Array:
    """Return the smallest and the largest element twice: real and imaginary part."""
    parts = jnp.real(array), jnp.imag(array)
    return jnp.stack([extreme(part) for extreme in (jnp.min, jnp.max) for part in parts])


def _fill_input(call: Call, name: str, array: np.ndarray, store: ArrayStore) -> None:
    """Store an input of JAX; of floating ones there are only the extremes."""
    shape = call.inputs[name]
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        call.inputs[name] = store.keep(array)
    elif array.size == 0:
        call.inputs[name] = np.zeros(shape.shape, shape.dtype)
    elif array[0] == array[2] and array[1] == array[3]:
        value = array[0] + 1j * array[1] if shape.dtype.kind == "c" else array[0]
        call.inputs[name] = np.broadcast_to(np.asarray(value, shape.dtype), shape.shape)


def _parts(shapes: Mapping[Point, tuple[dict, dict]], most: int) -> list[dict[Point, tuple[dict, dict]]]:
    """Return the points in groups of which each has a limited size in bytes, or is a single point."""
    parts: list[dict[Point, tuple[dict, dict]]] = []
    used = 0
    for point, arrays in shapes.items():
        size = 2 * sum(x.size * x.dtype.itemsize for group in arrays for x in group.values())
        if not parts or used + size > most:
            parts.append({})
            used = 0
        parts[-1][point] = arrays
        used += size
    return parts

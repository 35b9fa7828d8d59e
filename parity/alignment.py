"""Alignment of two recorded models: corresponding submodules, arrays and parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from parity.implementations import CallInputs, JaxImplementation
from parity.jax_programs import nnx_variables
from parity.names import Link, Links, star_pattern
from parity.pytrees import Leaves, map_arrays
from parity.recording import Call, Calls, nnx_submodules
from parity.rounding import distance


@dataclass(frozen=True)
class RecordedInputs:
    """The inputs of a recorded call, some of which both sides share."""

    call: Call
    names: Mapping[str, str]
    """Names of the call's shared arrays, and the names under which they are shared."""
    arrays: Leaves
    """The shared arrays by name."""
    convert: Callable[[np.ndarray], Any]
    """Create an array of the framework."""
    moved: frozenset[str] = frozenset()
    """Names of the call's arrays whose channels are last, while those of the shared array are first."""

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with other shared arrays; all others are those of the recorded call."""

        def replaced(name: str, _: Any) -> Any:
            if name not in self.names:
                return self.convert(self.call.inputs[name])
            array = arrays[self.names[name]]
            return jnp.moveaxis(array, 1, -1) if name in self.moved else array

        trees = {**{str(place): tree for place, tree in enumerate(self.call.args)}, **self.call.kwargs}
        filled = map_arrays(trees, replaced, "input")
        return tuple(filled[str(p)] for p in range(len(self.call.args))), {n: filled[n] for n in self.call.kwargs}


class ChannelsFirst(JaxImplementation):
    """A callable of JAX, some of whose outputs get their channels moved from the last axis to the second.

    Args:
        function: as in JaxImplementation.
        call: as in JaxImplementation.
        outputs: as in JaxImplementation.
        moved: new names of the outputs to change.
    """

    def __init__(self, function: Any, call: CallInputs, outputs: Mapping[str, str], moved: frozenset[str]) -> None:
        super().__init__(function, call, outputs)
        self._moved = moved

    def results(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """See JaxImplementation.results."""
        found, updates = super().results(*args, **kwargs)
        return {name: jnp.moveaxis(x, -1, 1) if name in self._moved else x for name, x in found.items()}, updates


def channels_last(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return a PyTorch array with its second axis last if that is closer to the JAX array than the array itself.

    JAX's convolutions have their channels last.
    """
    if array.ndim < 3 or np.moveaxis(array, 1, -1).shape != other.shape:
        return array
    moved = np.moveaxis(array, 1, -1)
    is_closer = array.shape != other.shape or distance(moved, other) < distance(array, other)
    return moved if is_closer else array


def shared_inputs(ours: Call, theirs: Call, is_moved: bool) -> tuple[RecordedInputs, RecordedInputs]:
    """Return the inputs of both calls with PyTorch's arrays.

    Args:
        ours: the call in PyTorch.
        theirs: the call in JAX.
        is_moved: the channels of JAX's outputs are last.

    Raises:
        ValueError: a floating input of either side has no counterpart.
    """
    own, mapping = paired_inputs(ours, theirs)
    shared = {name: ours.inputs[name] for name in own.values()}
    moved = set()
    for name, other in mapping.items():
        shapes = ours.inputs[other].shape, theirs.inputs[name].shape
        if shapes[0] != shapes[1] or (is_moved and _last(shapes[0]) == shapes[1]):
            moved.add(name)
    return (
        RecordedInputs(ours, own, shared, torch.from_numpy),
        RecordedInputs(theirs, mapping, shared, jnp.asarray, frozenset(moved)),
    )


def _last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with its second axis last; () if it has less than three."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else ()


def paired_inputs(ours: Call, theirs: Call) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names under which PyTorch's and JAX's inputs are shared, which are names of PyTorch's inputs.

    Inputs of equal name in both signatures belong together; of the others, those of equal shape, in their order. An
    array that a call receives several times may have one counterpart. One whose elements are equal, such as the initial
    state of a recurrence, needs none.

    Raises:
        ValueError: a floating input of either side has no counterpart.
    """
    named = {_argument(ours, name): name for name in ours.inputs}
    found = {}
    for name, array in theirs.inputs.items():
        other = named.get(_argument(theirs, name))
        if other is not None and _fit(ours.inputs[other], array):
            found[name] = other
    left = [name for name in ours.inputs if name not in found.values()]
    for name, array in theirs.inputs.items():
        match = next((other for other in left if _fit(ours.inputs[other], array)), None)
        if name not in found and match is not None:
            found[name] = match
            left.remove(match)
    own = {name: name for name in ours.inputs if name not in left}
    own |= {name: first for name, first in ours.repeated.items() if name in left and first in own}
    found |= {name: found[first] for name, first in theirs.repeated.items() if name not in found and first in found}
    for side, arrays, known in (("JAX", theirs.inputs, found), ("PyTorch", ours.inputs, own)):
        missing = [name for name in arrays if name not in known and not _is_constant(arrays[name])]
        if missing:
            words = ", ".join(f"{name} {arrays[name].shape}" for name in missing)
            raise ValueError(
                f"inputs: expected inputs of equal shapes, got no counterpart for {words} of {side}; pair other "
                "submodules by modules"
            )
    return own, found


def _is_constant(array: Any) -> bool:
    """Return True for arrays that are not floating, and for those whose elements are all equal."""
    if array.dtype.kind not in "fc":
        return True
    return isinstance(array, np.ndarray) and bool(np.all(array == array[(0,) * array.ndim])) if array.size else True


def _argument(call: Call, name: str) -> str:
    """Return the name of an input with its argument's name in the signature, if that is known."""
    first, dot, rest = name.partition(".")
    is_named = first.isdigit() and int(first) < len(call.names)
    return f"{call.names[int(first)] if is_named else first}{dot}{rest}"


def _fit(one: Any, other: Any) -> bool:
    if other.shape not in (one.shape, _last(one.shape)):
        return False
    kinds = one.dtype.kind, other.dtype.kind
    return kinds[0] == kinds[1] or set(kinds) <= set("iu")


def paired_outputs(ours: Call, theirs: Call) -> dict[str, str]:
    """Return JAX's names of outputs, and which of PyTorch's belong to them.

    Outputs of equal name belong together; if names differ, those in equal places, or of equal shape where one side has
    more outputs.

    Raises:
        ValueError: an output that the model uses has no counterpart.
    """
    first = ours.outputs
    second = theirs.outputs
    if first.keys() == second.keys():
        found = {name: name for name in second}
    elif len(first) == len(second):
        found = dict(zip(second, first, strict=True))
    else:
        found = {}
        for name, output in second.items():
            left = (other for other, array in first.items() if other not in found.values() and _fit(array, output))
            match = next(left, None)
            if match is not None:
                found[name] = match
    for side, call, known in (("JAX", theirs, found.keys()), ("PyTorch", ours, set(found.values()))):
        unknown = [name for name in call.outputs if name not in known and _is_used(call, name)]
        if unknown:
            raise ValueError(
                f"outputs: expected equal outputs, got no counterpart for {', '.join(unknown)} of {side}; pair other "
                "submodules by modules"
            )
    return found


def _is_used(call: Call, name: str) -> bool:
    """Return True if the result depends on an output, or if that is not known."""
    return bool(np.any(call.cotangents[name])) if name in call.cotangents else True


def moved_outputs(ours: Call, theirs: Call, names: Mapping[str, str]) -> frozenset[str]:
    """Return PyTorch's names of those outputs whose channels JAX has last.

    Args:
        ours: the call in PyTorch.
        theirs: the call in JAX.
        names: JAX's names of outputs and PyTorch's.

    Raises:
        ValueError: the outputs have other shapes.
    """
    moved = set()
    for other, name in names.items():
        expected = channels_last(ours.outputs[name], theirs.outputs[other])
        got = theirs.outputs[other]
        if got.shape != expected.shape:
            shape = ours.outputs[name].shape
            raise ValueError(
                f"output {name!r}: expected the shape {shape} of PyTorch, got {got.shape} in JAX; pair other "
                "submodules by modules"
            )
        if expected is not ours.outputs[name]:
            moved.add(name)
    return frozenset(moved)


Names = dict[str, dict[str, str]]
"""Parameters of each submodule: their names in the submodule, and their names in the whole model."""


def torch_names(model: nn.Module) -> Names:
    """Return the parameters and buffers of each submodule; a tied parameter has its first name in the model."""
    whole = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
    return {
        path: {name: whole[id(value)] for name, value in (*module.named_parameters(), *module.named_buffers())}
        for path, module in model.named_modules()
    }


def jax_names(model: Any, paths: Sequence[str]) -> Names:
    """Return the variables of each submodule of an nnx or a linen model.

    Args:
        model: an nnx module, or (linen module, variables).
        paths: submodules of linen.
    """
    if isinstance(model, nnx.Module):
        # nnx names a shared variable by the first of its paths.
        whole = {id(value): name for name, value in nnx_variables(model).items()}
        return {
            path: {name: whole[id(value)] for name, value in nnx_variables(module).items()}
            for path, module in nnx_submodules(model).items()
        }
    found: Names = {}
    for path in paths:
        inside = found.setdefault(path, {})
        for collection, tree in model[1].items():
            # Names of parameters lack the name of their collection.
            start = "" if collection == "params" else f"{collection}."
            for name in _leaf_names(_subtree(tree, path)):
                inside[start + name] = f"{start}{path}.{name}" if path else start + name
    return found


def _subtree(tree: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
    return tree


def _leaf_names(tree: Any) -> list[str]:
    if not isinstance(tree, Mapping):
        return [""]
    return [f"{key}.{name}".removesuffix(".") for key, value in tree.items() for name in _leaf_names(value)]


def jax_submodule(model: Any, path: str, modules: Mapping[str, Any]) -> Any:
    """Return a submodule of an nnx model, or (linen module, variables) of one of a linen model.

    Args:
        model: as in jax_names.
        path: name of the submodule.
        modules: submodules of linen by name.
    """
    if isinstance(model, nnx.Module):
        return nnx_submodules(model)[path]
    return modules[path], {collection: _subtree(tree, path) for collection, tree in model[1].items()}


def links_inside(links: Links, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Links:
    """Return the links between parameters that two submodules have, under the names in those.

    Args:
        links: links of the whole models.
        ours: names in PyTorch's submodule, and in the whole model.
        theirs: names in JAX's.
    """
    own, other = ({whole: name for name, whole in names.items()} for names in (ours, theirs))
    return Links(
        tuple(
            Link(tuple(own[n] for n in link.torch_names), tuple(other[n] for n in link.jax_names), link.convert)
            for link in links.links
            if all(name in own for name in link.torch_names) and all(name in other for name in link.jax_names)
        )
    )


def align_modules(
    ours: Calls, theirs: Calls, links: Links, given: Mapping[str, str], names: tuple[Names, Names]
) -> dict[str, str]:
    """Return which submodules of PyTorch and JAX belong together.

    Submodules belong together if they hold linked parameters and no others; those without parameters, if they have
    equal names inside submodules that belong together.

    Args:
        ours: calls of PyTorch's submodules.
        theirs: calls of JAX's submodules.
        links: linked parameters.
        given: pairs from the caller, which come first.
        names: parameters of the submodules of both sides.
    """
    paths = [list(dict.fromkeys(point.path for point in calls)) for calls in (ours, theirs)]
    found = {"": ""}
    for path in paths[0]:
        for pattern, target in given.items():
            if star_match(pattern, path) is not None:
                found[path] = _star_fill(target, star_match(pattern, path) or ())
    held = [_links_by_module(paths[side], links, names[side], side) for side in (0, 1)]
    groups: list[dict[frozenset, list[str]]] = [{}, {}]
    for side in (0, 1):
        for path in paths[side]:
            if held[side][path]:
                groups[side].setdefault(held[side][path], []).append(path)
    for parameters, members in groups[0].items():
        others = groups[1].get(parameters, [])
        for mine, other in zip(sorted(members, key=len), sorted(others, key=len), strict=False):
            found.setdefault(mine, other)
    for path in paths[0]:
        parent, _, name = path.rpartition(".")
        if path not in found and parent in found:
            candidate = f"{found[parent]}.{name}" if found[parent] else name
            if candidate in paths[1]:
                found[path] = candidate
    return found


def _links_by_module(paths: Sequence[str], links: Links, names: Names, side: int) -> dict[str, frozenset]:
    """Return the numbers of the links whose parameters a submodule holds."""
    found = {}
    for path in paths:
        inside = set(names.get(path, {}).values())
        numbers = enumerate(link.torch_names if side == 0 else link.jax_names for link in links.links)
        found[path] = frozenset(number for number, held in numbers if inside.issuperset(held))
    return found


def star_match(pattern: str, path: str) -> tuple[str, ...] | None:
    """Return the texts in place of the stars of a pattern, or None if a path does not match."""
    match = star_pattern(pattern).fullmatch(path)
    return None if match is None else match.groups()


def _star_fill(pattern: str, texts: tuple[str, ...]) -> str:
    for text in texts:
        pattern = pattern.replace("*", text, 1)
    return pattern

"""Submodules of an nnx model by name, replacement of their classes, and calls of them in transformations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jax_impl.traced_programs import check_same, check_same_contents, contents, is_array, split_arrays


def named_modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Yield the submodules with their dotted names, in the order of the model; the model itself has none."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            yield ".".join(map(str, path)), node


def subclass_with(kind: type, call: Callable[..., Any]) -> type:
    """Return a subclass with another ``__call__`` and the same name."""
    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def change_class(module: nnx.Module, kind: type) -> None:
    """Give an instance another class: a subclass of its class, or the class from which that subclass was made."""
    object.__setattr__(module, "__class__", kind)


def restore_classes(
    modules: Mapping[str, nnx.Module], kinds: Sequence[Callable[[type], type]], operation: str, owner: str
) -> None:
    """Restore the classes that change_class replaced, for all modules or for none.

    Args:
        modules: the modules by name.
        kinds: functions that made the present classes from the former ones.
        operation: name of the caller, for the error.
        owner: name of the function that changed the classes, for the error.

    Raises:
        ValueError: a module got another class later.
    """
    for name, module in modules.items():
        if type(module) not in [kind(type(module).__mro__[1]) for kind in kinds]:
            raise ValueError(
                f"{operation}: expected the class of {owner} in {name!r}, got {type(module).__name__} with changes "
                "made later; undo them first"
            )
    for module in modules.values():
        change_class(module, type(module).__mro__[1])


def call_through(
    transform: Callable[..., Any], call: Callable[..., Any], owner: str, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call a function of nnx modules in a transformation of functions of arrays, and update the state that it changes.

    Args:
        transform: returns the transformed function.
        call: the function, such as the ``__call__`` of a module.
        owner: its name for errors.
        args: positional arguments; arrays and nnx nodes among them are arguments of the transformed function.
        kwargs: keyword arguments, likewise.

    Returns:
        What the call returns. Of its leaves only arrays are results of the transformed function.

    Raises:
        ValueError: the call sets or adds an attribute, or changes an argument, which a function of arrays would lose.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    node_places = [place for place, leaf in enumerate(leaves) if is_node(leaf)]
    array_places = [place for place, leaf in enumerate(leaves) if not is_node(leaf) and is_array(leaf)]
    nodes = [leaves[place] for place in node_places]
    graph, state = nnx.split(nodes)
    changed: list[Any] = []
    result: list[Callable[..., Any]] = []

    def run(state: Any, *arrays: Any) -> Any:
        merged = nnx.merge(graph, state, copy=True)
        found = list(leaves)
        for place, leaf in zip((*node_places, *array_places), (*merged, *arrays), strict=True):
            found[place] = leaf
        args, kwargs = jax.tree.unflatten(structure, found)
        objects = [*found, *_objects_of(merged)]
        before_call = contents(objects, _is_traced)
        output = call(*args, **kwargs)
        check_same(owner, (found, structure), (args, kwargs), is_node)
        graph_after, state_after = nnx.split(merged)
        if graph_after != graph:
            raise ValueError(
                f"{owner}: expected a call that changes the values of Variables only, got one that "
                "sets or adds attributes or Variables, as sow does; keep such state in an nnx.Variable that exists "
                "before the call, or do not choose this module"
            )
        check_same_contents(owner, before_call, contents(objects, _is_traced))
        before = _values(state)
        after = _values(state_after)
        changed[:] = [path for path in after if after[path] is not before[path]]
        outputs, join = split_arrays(owner, output)
        result[:] = [join]
        return outputs, [after[path] for path in changed]

    output, values = transform(run)(state, *[leaves[place] for place in array_places])
    if changed:
        present = dict(nnx.to_flat_state(state))
        updated = {path: _replaced(present[path], value) for path, value in zip(changed, values, strict=True)}
        nnx.update(nodes, nnx.from_flat_state(updated))
    return result[0](output)


def _objects_of(nodes: Sequence[Any]) -> list[Any]:
    """Return the attributes of all modules, without the bookkeeping of nnx."""
    modules = [node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module)]
    return [value for module in modules for name, value in vars(module).items() if not name.startswith("_pytree__")]


def _is_traced(value: Any) -> bool:
    """Return True for an nnx node or an array, which a traced function receives as an argument."""
    return is_node(value) or is_array(value)


def _values(state: Any) -> dict[Any, Any]:
    """Return the arrays of a state by path."""
    return {
        path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in nnx.to_flat_state(state)
    }


def _replaced(leaf: Any, value: Any) -> Any:
    """Return the leaf of a state with another value: a Variable, or an array that is an attribute."""
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def is_node(value: Any) -> bool:
    """Return True for a part of an nnx model, which is a leaf of a tree of arguments."""
    return isinstance(value, nnx.Module | nnx.Rngs | nnx.Variable)

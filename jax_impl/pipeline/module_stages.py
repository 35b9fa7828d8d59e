"""Stages of a user: functions ``stage_fn(params, x)`` or nnx modules, with pytrees between them and any loss.

One program runs on every rank, so whatever differs between stages is packed: parameters and state into one vector per
rank and dtype (packed_layout.py), messages into one vector per dtype that is as long as the longest message.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.extend.core.primitives import convert_element_type_p
from jax.typing import DTypeLike

from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.pipeline.packed_layout import PackedLayout
from jax_impl.pipeline.packing import is_key, longest_vectors, pack, unpack
from jax_impl.pipeline.programs import StageProgram, Task
from jax_impl.traced_programs import passed_through

LossFunction = Callable[[Any, Any], Array]
"""``loss_fn(output, target) -> loss``, a scalar."""


class Microbatches(NamedTuple):
    """The data of one step, with leaves [m, ...]."""

    inputs: Any
    targets: Any

    def microbatch(self, number: Any) -> "Microbatches":
        """Return one microbatch."""
        return jax.tree.map(lambda x: x[number], self)

    def varying(self) -> "Microbatches":
        """Return True for every array: all of them may lead to values saved for backward."""
        return jax.tree.map(lambda _: True, self)


@dataclass(frozen=True)
class UserStage:
    """A stage as the user gives it.

    Args:
        key: equal for stages that compute the same with the same parameters.
        apply: ``apply(params, state, x) -> (output, state, params)``; parameters and state are lists of arrays. The
            parameters after the call must be those before it.
        structure: structure of the parameters.
        names: dotted name of each parameter.
        params: the parameters, or their shapes.
        state: initial values of the other variables of an nnx module.
        identities: identity of each parameter, for nnx modules, which may share variables.
        state_identities: name of each other variable by its identity.
        state_names: dotted name of each entry of the state.
        static: Python numbers of the state, by index, that the last trace read from the module and left unchanged.
    """

    key: Any
    apply: Callable[[list[Any], list[Any], Any], tuple[Any, list[Any], list[Any]]] = field(repr=False)
    structure: Any = field(repr=False)
    names: tuple[str, ...]
    params: tuple[Any, ...] = field(repr=False)
    state: tuple[Any, ...] = field(default=(), repr=False)
    identities: tuple[Any, ...] = field(default=(), repr=False)
    state_identities: Mapping[Any, str] = field(default_factory=dict, repr=False)
    state_names: tuple[str, ...] = field(default=(), repr=False)
    static: dict[int, Any] = field(default_factory=dict, repr=False)


class StageLayouts(NamedTuple):
    """The places of the parameters and the state of all stages."""

    params: PackedLayout
    """Those of the parameters that are not shared."""
    state: PackedLayout
    """Those of the state."""
    shared_by: Sequence[Mapping[int, int]]
    """For each stage, index of a shared parameter by the index of the parameter."""

    def key(self, stage: int) -> tuple:
        """Return a key that is equal for stages with the same places."""
        return self.params.key(stage), self.state.key(stage), tuple(self.shared_by[stage].items())


class _Message(NamedTuple):
    """Structure of a message."""

    structure: Any
    likes: tuple[jax.ShapeDtypeStruct, ...]


def stage_of_function(function: Callable[..., Any], params: Any) -> UserStage:
    """Return the stage of a function ``stage_fn(params, x)``."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)

    def apply(leaves: list[Any], state: list[Any], x: Any) -> tuple[Any, list[Any], list[Any]]:
        return _call(function, jax.tree.unflatten(structure, leaves), x), state, leaves

    return UserStage(_hashable(function), apply, structure, names, tuple(leaf for _, leaf in paths))


def stage_of_module(module: nnx.Module) -> UserStage:
    """Return the stage of an nnx module; what is not an nnx.Param is its state.

    A Python number in a variable is static, like a mode, unless the call changes it.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(".".join(map(str, _path_of(path))) for path, _ in paths)
    values, rest_structure = jax.tree.flatten(rest)
    others = [_path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(rest)[0]]
    numbers = {place: value for place, value in enumerate(values) if _is_number(value)}
    unchanged: dict[int, Any] = {}

    def run(leaves: list[Any], given: list[Any], x: Any) -> tuple[Any, list[Any], list[Any]]:
        own = nnx.merge(graph, jax.tree.unflatten(structure, leaves), jax.tree.unflatten(rest_structure, given))
        y = _call(own, None, x)
        _, params_after, rest_after = nnx.split(own, nnx.Param, ...)
        found, found_structure = jax.tree.flatten(rest_after)
        if found_structure != rest_structure:
            raise ValueError(_other_variables(module))
        return y, found, jax.tree.leaves(params_after)

    def apply(leaves: list[Any], state: list[Any], x: Any) -> tuple[Any, list[Any], list[Any]]:
        as_arrays = [*map(_given, values, state)]
        static = dict(numbers)
        y = None
        given = found = as_arrays
        params_after = leaves
        changed: Any = None  # numbers that were static in the last run, but must not be
        while changed is None or changed:
            given = [static.get(i, array) for i, array in enumerate(as_arrays)]
            with _naming_numbers(module, [others[i] for i in numbers if i not in static]):
                y, found, params_after = run(leaves, given, x)
            changed = [i for i, number in static.items() if not _is_same_number(found[i], number)]
            static = {i: number for i, number in static.items() if i not in changed}
        if [*map(_like, found)] != [*map(_like, given)]:
            raise ValueError(_other_variables(module))
        unchanged.clear()
        unchanged.update(static)
        new_state = [
            _as_state(static[i], old) if i in static else old if after is before else _numbers(after)
            for i, (old, before, after) in enumerate(zip(state, given, found, strict=True))
        ]
        return y, new_state, params_after

    variables = dict(nnx.iter_graph(module))
    return UserStage(
        _hashable((graph, rest_structure, tuple((i, type(value), repr(value)) for i, value in numbers.items()))),
        apply,
        structure,
        names,
        tuple(leaf for _, leaf in paths),
        tuple(map(_numbers, values)),
        tuple(_identity(variables, _path_of(path)) for path, _ in paths),
        {_identity(variables, path): ".".join(map(str, path)) for path in others},
        tuple(".".join(map(str, path)) for path in others),
        unchanged,
    )


_NEEDS_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of code that reads a traced array as a Python number."""


@contextmanager
def _naming_numbers(module: nnx.Module, paths: Sequence[tuple]) -> Iterator[None]:
    """Raise an error that names the traced numbers of a module, if a call needs one of them as a Python number.

    Raises:
        ValueError: the call needs a traced number.
    """
    try:
        yield
    except _NEEDS_NUMBER as error:
        if not paths:
            raise
        names = ", ".join(repr(".".join(map(str, path))) for path in paths)
        raise ValueError(
            "stages: expected numbers of Python in variables that decide shapes or branches, or that the call changes, "
            f"got {names} of {type(module).__name__}, where one does both; compute with jnp.where or jax.lax.cond "
            "instead"
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def _is_same_number(found: Any, number: Any) -> bool:
    return found is number or (type(found) is type(number) and found == number)


def _as_state(number: Any, old: Any) -> Any:
    """Return a Python number as an entry of the state, with the type of its previous value."""
    return jnp.where(old == old, number, number).astype(old.dtype)  # varies over the mesh as the old entry does


def is_number_in_state(number: Any, leaf: Any) -> bool:
    """Return True if an entry of a state is equal to a Python number."""
    own = np.asarray(_numbers(number))
    return np.array_equal(own, np.asarray(leaf), equal_nan=np.issubdtype(own.dtype, np.inexact))


def _given(value: Any, array: Any) -> Any:
    """Return an array of the state as its module holds it: as a typed key, or weakly typed for a Python number."""
    if is_key(value):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(value))
    if _is_number(value) and not isinstance(value, bool):
        return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)
    return array


def _other_variables(module: nnx.Module) -> str:
    return (
        "stages: expected a module whose variables have the same names, shapes and dtypes after a call, got "
        f"{type(module).__name__}, which adds or reshapes some; create them before"
    )


def _identity(variables: Mapping[tuple, Any], path: tuple) -> Any:
    """Return the identity of a leaf: its variable, and its place in the variable's value if that is a tree."""
    end = next(end for end in range(len(path), 0, -1) if path[:end] in variables)
    return id(variables[path[:end]]), path[end:]


def state_of_module(module: nnx.Module, leaves: Sequence[Any]) -> nnx.State:
    """Return the variables of a module that are not parameters, with other values, in the order of UserStage.state."""
    old, structure = jax.tree.flatten(nnx.split(module, nnx.Param, ...)[2])
    return jax.tree.unflatten(structure, map(_updated, old, leaves))


def _updated(old: Any, leaf: Any) -> Any:
    """Return the new value of a variable, which stays a Python number if its value is unchanged."""
    if is_key(old):
        return jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(old))
    if _is_number(old) and is_number_in_state(old, leaf):
        return old
    return jnp.asarray(leaf)


@dataclass(frozen=True, eq=False)
class ModuleProgram(StageProgram):
    """The program of stages of a user that differ in their parameters and state alone.

    Values saved for backward and parameters stay on the device, and jax.checkpoint in the user's function decides what
    is saved.
    """

    stages: "ModuleStages" = field(repr=False)
    number: int
    """Number of the first stage with this program."""
    user: UserStage
    received: _Message
    sent: _Message

    def select(self, task: Task) -> dict[str, Array]:
        """Return the parameters of a stage by index (as text), because their names need not be unique."""
        own = self.stages.layouts.params.select(task.params.layers, self.number, task.stage)
        shared = self.stages.layouts.shared_by[self.number]
        return {str(i): task.params.replicated[shared[i]] if i in shared else value for i, value in enumerate(own)}

    def add(self, sums: Any, task: Task, gradients: Mapping[str, Array]) -> Any:
        """Add the gradients of a stage to the sums of a rank, in the dtype of the sums, and return the sums."""
        shared = self.stages.layouts.shared_by[self.number]
        values = {int(index): gradient for index, gradient in gradients.items()}
        own = {i: gradient for i, gradient in values.items() if i not in shared}
        layers = self.stages.layouts.params.update(sums.layers, self.number, task.stage, own, jnp.add)
        replicated = list(sums.replicated)
        for i, gradient in values.items():
            if i in shared:
                replicated[shared[i]] += gradient.astype(replicated[shared[i]].dtype)
        return sums._replace(layers=layers, replicated=replicated)

    def run(self, parameters: Mapping[str, Array], x: Any, task: Task) -> tuple[Any, Any]:
        """Return the packed message of a stage, or the loss or output of the last one, and the rank's new state."""
        received = task.batch.inputs
        if not self.first:
            received = jax.tree.unflatten(self.received.structure, unpack(x, self.received.likes))
        layout = self.stages.layouts.state
        state = layout.select(task.state, self.number, task.stage)
        y, new, _ = self.user.apply([parameters[str(i)] for i in range(len(parameters))], state, received)
        changed = {i: value for i, (old, value) in enumerate(zip(state, new, strict=True)) if value is not old}
        new_state = layout.update(task.state, self.number, task.stage, changed, lambda _, value: value)
        if self.last:
            return _varying_like(self.stages.finish(y, task.batch.targets), x), new_state
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(y)]
        return _varying_like(pack(leaves, self.stages.vectors), x), new_state


class ModuleStages:
    """The stages of a user for one shape of the data; see StagePrograms.

    Args:
        users: all stages.
        layouts: places of their parameters and state.
        data: microbatches, of the shape that a rank has.
        loss_fn: the loss; None: the output of the last stage is the loss.
        loss_weight: factor of each loss in the gradients; None: 1 / m.
        collects_losses: if False, the outputs of the last stage are collected.

    Raises:
        ValueError: an output or the loss is not as expected.
    """

    def __init__(
        self,
        users: Sequence[UserStage],
        layouts: StageLayouts,
        data: Microbatches,
        loss_fn: LossFunction | None,
        loss_weight: float | None,
        collects_losses: bool,
    ) -> None:
        self.layouts = layouts
        self.loss_weight = loss_weight
        self.collects_losses = collects_losses
        self._loss_fn = loss_fn
        self.changed_state: list[str] = []
        """Stages that change variables in forward."""
        like = jax.eval_shape(lambda data: data.microbatch(0), data)
        messages = self._find_messages(users, like)
        self.vectors = longest_vectors([message.likes for message in messages[1:-1]])
        self.vectors = self.vectors or {"float32": jax.ShapeDtypeStruct((1,), "float32")}
        """Shapes of the packed messages."""
        self._collected = jax.tree.unflatten(*messages[-1])
        ranks = layouts.params.ranks
        self.placement = [(rank, ranks[:n].count(rank)) for n, rank in enumerate(ranks)]
        self.first_layers = [0] * len(users)
        programs: dict[Any, ModuleProgram] = {}
        self.program_of: list[int] = []
        for n, user in enumerate(users):
            ends = n == 0, n == len(users) - 1
            key = (user.key, user.structure, ends, layouts.key(n), *messages[n : n + 2])
            if key not in programs:
                programs[key] = ModuleProgram(*ends, self, n, user, *messages[n : n + 2])
            self.program_of.append([*programs].index(key))
        self.programs = [*programs.values()]

    def gradient_dtype(self, parameter: Array) -> DTypeLike:
        """Return the type of a parameter, in which its gradients are summed."""
        return parameter.dtype

    def message(self, batch: Any) -> dict[str, Array]:
        """Return a packed message of zeros."""
        del batch
        return {dtype: jnp.zeros(like.shape, like.dtype) for dtype, like in self.vectors.items()}

    def collected(self, batch: Any) -> Any:
        """Return the loss or the output of a microbatch, as zeros."""
        del batch
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), self._collected)

    def finish(self, y: Any, target: Any) -> Any:
        """Return the loss of the last stage's output, or the output if outputs are collected."""
        if not self.collects_losses:
            return jax.tree.map(jnp.asarray, y)
        if self._loss_fn is not None and not jax.tree.leaves(target):
            raise ValueError(
                "targets: expected arrays [m, ...] for loss_fn, got none; pass targets, or leave out loss_fn"
            )
        loss = y if self._loss_fn is None else self._loss_fn(y, target)
        what = "loss_fn" if self._loss_fn is not None else "stages: without loss_fn, the last stage"
        likes = jax.tree.map(_like, loss)
        like = likes if isinstance(likes, jax.ShapeDtypeStruct) else None
        if like is None or like.shape != () or not jnp.issubdtype(like.dtype, jnp.floating):
            got = f"{like.dtype}{[*like.shape]}" if like is not None else likes
            raise ValueError(
                f"{what}: expected a scalar loss of a floating-point dtype, got {got}; take its mean() or sum()"
            )
        return jnp.asarray(loss)

    def _find_messages(self, users: Sequence[UserStage], data: Any) -> list[_Message]:
        """Return the structure of the message to each stage, and of the loss or the last output."""
        messages = [_message(data.inputs)]
        for n, user in enumerate(users):
            last = n == len(users) - 1

            def run(params: Any, state: Any, x: Any, target: Any, n: int = n, last: bool = last) -> Any:
                y, new, params_after = users[n].apply(params, state, x)
                if any(a is not b for a, b in zip(state, new, strict=True)):
                    self.changed_state.append(str(n))
                y = _arrays(y, n)
                return (self.finish(y, target) if last else y), params_after

            x = jax.tree.unflatten(*messages[-1])
            shapes = [[*map(_like, user.params)], [*map(_like, user.state)]]
            try:
                traced, (y, _) = jax.make_jaxpr(run, return_shape=True)(*shapes, x, data.targets)
                _check_parameters_are_read(traced.jaxpr, users[n].names)
            except Exception as error:
                error.add_note(f"in stage {n} of the pipeline")
                raise
            messages.append(_message(y))
        return messages


def _check_parameters_are_read(program: Any, names: Sequence[str]) -> None:
    """Check that a stage returns its first arguments, the parameters, as its last results."""
    results = program.outvars[len(program.outvars) - len(names) :]
    written = [
        name
        for name, before, after in zip(names, program.invars, results, strict=False)
        if passed_through(program, after) is not before
    ]
    if written:
        raise ValueError(
            f"stages: expected modules that read their parameters only, got a call that writes {', '.join(written)}, "
            "as that of nnx.SpectralNorm does; compute with a new value instead, or make it another nnx.Variable"
        )


def _call(function: Callable[..., Any], params: Any, x: Any) -> Any:
    """Call a stage: a tuple becomes positional arguments, a dict keyword arguments, anything else one argument."""
    own = () if isinstance(function, nnx.Module) else (params,)
    if type(x) is tuple:
        return function(*own, *x)
    if type(x) is dict:
        return function(*own, **x)
    return function(*own, x)


def _arrays(y: Any, stage: int) -> Any:
    """Check an output, and return it with arrays in place of numbers."""
    for leaf in jax.tree.leaves(y):
        if not isinstance(leaf, Array | np.ndarray | np.generic | int | float | complex):
            raise ValueError(
                f"stages: expected a pytree of arrays from stage {stage}, got one with {type(leaf).__name__}"
            )
        if isinstance(leaf, Array) and is_key(leaf):
            raise ValueError(
                f"stages: expected arrays of numbers from stage {stage}, got a typed random key; send "
                "jax.random.key_data(key)"
            )
    return jax.tree.map(jnp.asarray, y)


def _message(tree: Any) -> _Message:
    leaves, structure = jax.tree.flatten(tree)
    return _Message(structure, tuple(map(_like, leaves)))


def _like(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, a jax.ShapeDtypeStruct or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x))


def _numbers(x: Any) -> Any:
    """Return the data of a typed random key, a number as an array, or any other array itself."""
    return jax.random.key_data(x) if is_key(x) else x if hasattr(x, "dtype") else jnp.asarray(x)


def _hashable(key: Any) -> Any:
    """Return a key, wrapped if it has no hash, such as that of a module with a list or a dict as an attribute."""
    try:
        hash(key)
    except TypeError:
        return _ByEquality(copy.deepcopy(key))  # a value without a hash may be changed in place
    return key


class _ByEquality:
    """A value without a hash as a key of a dict."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return hash(_ByEquality)

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _ByEquality) and bool(self._value == other._value)
        except (TypeError, ValueError):  # arrays among its fields
            return False


def _path_of(path: Any) -> tuple:
    """Return the path of a variable in an nnx graph from that of its leaf in a state."""
    return tuple(entry.key for entry in path if hasattr(entry, "key"))


def _varying_like(tree: Any, x: Any) -> Any:
    """Return a pytree whose arrays vary over the mesh axes of another one."""
    (reference,) = jax.tree.leaves(x)[:1]
    return jax.tree.map(lambda leaf: match_varying_axes((leaf, reference))[0], tree)

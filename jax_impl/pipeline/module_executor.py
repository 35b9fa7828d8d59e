"""Pipelines of any stages: functions ``stage_fn(params, x)`` or nnx modules of the user."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from diptych.plans.offload import MoveCounter
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.lockstep import SAVES, SLOTS, Saves, compile_lockstep
from diptych.plans.schedule.named import forwards_of, schedule_of_stages
from jax_impl.pipeline.executor import run_lockstep
from jax_impl.pipeline.module_stages import (
    LossFunction,
    Microbatches,
    ModuleStages,
    StageLayouts,
    UserStage,
    is_number_in_state,
    stage_of_function,
    stage_of_module,
    state_of_module,
)
from jax_impl.pipeline.packed_layout import PackedLayout
from jax_impl.pipeline.transforms import (
    TRANSFORMS,
    by_pmap,
    by_shard_map,
    check_axes,
    check_options,
    unsharded_array,
)
from jax_impl.staged_parameters import DATA_AXIS, PIPELINE_AXIS, StagedParameters, shardings_of


class PipelineExecutor:
    """A pipeline whose stages are functions or nnx modules of the user.

    Usage::

        pipeline = PipelineExecutor([first, middle, last], "1f1b", 8, loss_fn, parameters=[p0, p1, p2])
        staged = pipeline.stage_parameters([p0, p1, p2])
        losses, gradients = pipeline.step(staged, split_batch(x, 8), split_batch(y, 8))
        staged = jax.tree.map(lambda p, g: p - 0.1 * g, staged, gradients)
        p0, p1, p2 = pipeline.join_parameters(staged)

    Staged parameters are one vector per device and dtype, so that stages may be unequal. Gradients are staged in the
    same way, and optimizers that treat every element alike, such as optax.adamw, work on them directly. Norms are those
    of the model, because padding has gradient 0. What depends on the parameter, such as a mask of weight decay, can be
    staged too.

    A stage is called with the output of the previous one: a tuple as positional arguments, a dict as keyword arguments,
    anything else as one argument; functions get their parameters first. An output is an array or a pytree of arrays.
    Stages must not contain collectives over the pipeline.

    Values and modes of nnx modules are read when they are staged and at each step: ``module.eval()`` is heeded, and
    compiles the step again.

    Variables of nnx modules that are not nnx.Param, such as the statistics of a batch norm or the counters of dropout,
    are state: give ``initial_state()`` to a step, which returns the new one.

    Args:
        stages: all stages of the model, in order. Stages are compiled once if they are the same function (or modules of
            equal structure) with parameters of the same shapes.
        schedule: name of a schedule (docs/pipeline.md lists them), or a table. With one rank, the stages run in order
            for each microbatch, and a name has no effect.
        num_microbatches: number of microbatches per step; None: that of the table.
        loss_fn: ``loss_fn(output, target) -> loss``; None: the last stage returns the loss.
        parameters: for functions, the parameters of each stage, or their shapes; None: stages are nnx modules.
        mesh: mesh with an axis "pp"; the number of stages is a multiple of its size. With shard_map it may have an axis
            "dp", which divides the samples of every microbatch. None: one device for each stage.
        loss_reduction: "mean": gradients of the mean of the microbatches' losses; "sum": of their sum. Over replicas
            their mean is taken.
        shared_parameters: parameters that several stages share, such as a tied embedding, each as a dict from stage to
            dotted name. They are equal on every rank, and their gradients are summed. None: variables that nnx modules
            share, nothing for functions.
        saves: values that a stage saves for backward: its "inputs" (backward replays the stage) or the "residuals" of
            its derivative; jax.checkpoint within a stage decides which these are.
        slots: "canonical" or "fused"; see make_pipeline_step.
        transform: "shard_map" or "pmap", which run the same function.

    Raises:
        ValueError: the stages do not match the schedule, the parameters or the devices; the message names the remedy.
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        schedule: str | Schedule,
        num_microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        *,
        parameters: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
        loss_reduction: str = "mean",
        shared_parameters: Sequence[Mapping[int, str]] | None = None,
        saves: str = "residuals",
        slots: str = "canonical",
        transform: str = "shard_map",
    ) -> None:
        check_options(loss_reduction=(loss_reduction, ("mean", "sum")), saves=(saves, SAVES))
        check_options(slots=(slots, SLOTS), transform=(transform, TRANSFORMS))
        self._users = _user_stages(stages, parameters)
        self._modules = [stage for stage in stages if isinstance(stage, nnx.Module)]
        self.mesh = _mesh(mesh, len(stages), transform)
        self.schedule = schedule_of_stages(schedule, self.mesh.shape[PIPELINE_AXIS], len(stages), num_microbatches)
        ranks = [self.schedule.rank_of(n) for n in range(len(stages))]
        self._saves: Saves = cast("Saves", saves)
        self._fused = slots == "fused"
        self._transform = transform
        self._loss_fn = loss_fn
        self._loss_weight = None if loss_reduction == "mean" else 1.0
        shared = _found_shared(self._users) if shared_parameters is None else shared_parameters
        self._shared = _shared_indices(self._users, shared)
        shared_by: list[dict[int, int]] = [{} for _ in stages]
        for index, places in enumerate(self._shared):
            for stage, i in places.items():
                shared_by[stage][i] = index
        own = [
            [None if i in shared_by[n] else _shape_of(leaf) for i, leaf in enumerate(user.params)]
            for n, user in enumerate(self._users)
        ]
        state = [[*map(_shape_of, user.state)] for user in self._users]
        self._layouts = StageLayouts(PackedLayout(own, ranks), PackedLayout(state, ranks), shared_by)
        self._static: dict[tuple, list[dict[int, Any]]] = {}
        """Python numbers in the state of every stage that a step reads from the modules, by the key of _runs."""
        self._own_state: tuple[Any, list[Set[int]]] = (None, [])
        """The last returned state, and for every stage the indices of its Python numbers that came from the modules.

        These numbers need no check: a mode may change during training."""
        self._runs: dict[tuple, Any] = {}
        """Compiled steps by kind, whether a state is given, and the stages, whose mode may change."""

    def stage_parameters(self, parameters: Sequence[Any] | None = None) -> StagedParameters:
        """Distribute parameters, moments, or other trees of their structure over the ranks.

        Args:
            parameters: a pytree for each stage, in the structure of its parameters. A shared parameter is read from its
                first stage. Leaves are broadcast to the shapes of the parameters. None: those of the nnx modules.

        Raises:
            ValueError: the structure or a shape differs from that of the parameters.
        """
        if parameters is None:
            self._read_modules()
            values = [list(user.params) for user in self._users]
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaves in values for leaf in leaves):
                raise ValueError("parameters: expected arrays, got shapes; give the parameters of each stage")
        else:
            values = [*map(self._leaves_of, range(len(self._users)), _of_all(parameters, len(self._users)))]
        layers = self._layouts.params.stack([[*map(unsharded_array, leaves)] for leaves in values])
        replicated = []
        for places in self._shared:
            stage, i = min(places.items())
            replicated.append(np.broadcast_to(unsharded_array(values[stage][i]), self._users[stage].params[i].shape))
        staged = StagedParameters(layers, replicated)
        return jax.tree.map(jax.device_put, staged, shardings_of(staged, self.mesh))

    def join_parameters(self, staged: Any) -> list[Any]:
        """Return staged parameters or gradients as one pytree for each stage, on the default device."""
        if not isinstance(staged, StagedParameters):
            raise ValueError(
                f"staged: expected StagedParameters, got {type(staged).__name__}; pass the result of stage_parameters "
                "or the gradients of a step"
            )
        host = jax.tree.map(unsharded_array, staged)
        values = self._layouts.params.unstack(host.layers)
        for index, places in enumerate(self._shared):
            for stage, i in places.items():
                values[stage][i] = host.replicated[index]
        return [
            jax.tree.unflatten(user.structure, map(jnp.asarray, leaves))
            for user, leaves in zip(self._users, values, strict=True)
        ]

    def initial_state(self) -> dict[str, Array]:
        """Return the state of the nnx modules, distributed over the ranks."""
        state = self._state_of_modules()
        self._own_state = state, [set(range(len(user.state))) for user in self._users]
        return state

    def update_modules(self, params: Any = None, state: Any = None) -> None:
        """Write staged parameters and a state back into the nnx modules."""
        self._read_modules()
        if params is not None:
            for module, values in zip(self._modules, self.join_parameters(params), strict=True):
                nnx.update(module, values)
        if state is not None:
            values = self._layouts.state.unstack(jax.tree.map(unsharded_array, state))
            for module, leaves in zip(self._modules, values, strict=True):
                nnx.update(module, state_of_module(module, leaves))

    def step(self, params: Any, inputs: Any, targets: Any = None, state: Any = None) -> Any:
        """Run forward and backward of all microbatches.

        Args:
            params: staged parameters.
            inputs: microbatches for the first stage, with leaves [m, ...]; split_batch makes them of a batch.
            targets: second argument of loss_fn, with leaves [m, ...].
            state: from initial_state or the previous step; None: the initial one, which no stage may change.

        Returns:
            Losses of the microbatches [m] and gradients staged as params; with a state, also the new state.

        Raises:
            ValueError: the data, an output or a loss are not as expected, or a stage changes its state and none is
                given.
        """
        (losses, result), static = self._run("step", params, inputs, targets, state)
        gradients = result._replace(layers=result.layers[0])
        if state is None:
            return losses, gradients
        self._own_state = result.layers[1], [numbers.keys() for numbers in static]
        return losses, gradients, result.layers[1]

    def evaluate(self, params: Any, inputs: Any, targets: Any = None, state: Any = None) -> Array:
        """Return the losses [m], without gradients; changes of state are dropped. Arguments are those of ``step``."""
        return self._run("evaluate", params, inputs, targets, state)[0][0]

    def forward(self, params: Any, inputs: Any, state: Any = None) -> Any:
        """Return the outputs of the last stage, with leaves [m, ...]. Arguments are those of ``step``."""
        return self._run("forward", params, inputs, None, state)[0][0]

    def _state_of_modules(self) -> dict[str, Array]:
        """Return the state of the nnx modules, distributed over the ranks; see initial_state."""
        self._read_modules()
        state = StagedParameters(self._layouts.state.stack([[*user.state] for user in self._users]), [])
        return jax.tree.map(jax.device_put, state, shardings_of(state, self.mesh)).layers

    def _run(
        self, kind: str, params: Any, inputs: Any, targets: Any, state: Any
    ) -> tuple[Any, Sequence[Mapping[int, Any]]]:
        """Check the data, run a step, and return its result and the Python numbers that stages read from modules."""
        if not isinstance(params, StagedParameters):
            raise ValueError(
                f"params: expected the result of stage_parameters, got {type(params).__name__}; call "
                "pipeline.stage_parameters(parameters)"
            )
        m = self.schedule.num_microbatches
        parts = self.mesh.shape.get(DATA_AXIS, 1)
        for name, tree in (("inputs", inputs), ("targets", targets)):
            leaves = jax.tree.leaves(tree)
            if name == "inputs" and not leaves:
                raise ValueError(f"inputs: expected arrays [{m}, ...], got none; pass split_batch(batch, {m})")
            for leaf in leaves:
                shape = np.shape(leaf)
                if not shape or shape[0] != m:
                    raise ValueError(
                        f"{name}: expected arrays [{m}, ...], with one entry for each microbatch, got shape "
                        f"{[*shape]}; make them of a batch by split_batch(batch, {m})"
                    )
                if parts > 1 and (len(shape) < 2 or shape[1] % parts):
                    raise ValueError(
                        f"{name}: expected a number of samples that mesh axis {DATA_AXIS!r} of size {parts} divides, "
                        f"got shape {[*shape]}; use larger batches, fewer microbatches or a smaller axis"
                    )
        given = self._state_of_modules() if state is None else state
        self._read_modules()
        key = kind, state is not None, *(user.key for user in self._users)
        if key not in self._runs:
            self._runs[key] = self._make_run(kind, state is not None)
        try:
            result = self._runs[key](
                StagedParameters((params.layers, given), params.replicated), Microbatches(inputs, targets)
            )
        except Exception:
            if key not in self._static:  # the next call has to trace the stages again, which finds their numbers
                del self._runs[key]
            raise
        static = self._static.setdefault(key, [dict(user.static) for user in self._users])
        if state is not None:
            self._check_numbers(static, state)
        return result, static

    def _check_numbers(self, static: Sequence[Mapping[int, Any]], state: Any) -> None:
        """Check that a state, such as one from a checkpoint, has the Python numbers that a step reads from the modules.

        Raises:
            ValueError: a number of the state differs from that of its module.
        """
        own, from_modules = self._own_state
        known = from_modules if state is own else [set() for _ in static]
        checked = [
            {i: n for i, n in numbers.items() if i not in stage} for numbers, stage in zip(static, known, strict=True)
        ]
        if not any(checked):
            return
        values = self._layouts.state.unstack(jax.tree.map(unsharded_array, state))
        for stage, (user, numbers, leaves) in enumerate(zip(self._users, checked, values, strict=True)):
            for i, number in numbers.items():
                if not is_number_in_state(number, leaves[i]):
                    raise ValueError(
                        f"state: expected {number!r} for {user.state_names[i]!r} of stage {stage}, the number of its "
                        f"module, which the call reads and does not change, got {leaves[i]!s}; set it in the module"
                    )

    def _read_modules(self) -> None:
        """Read the present values and modes of the nnx modules, such as training or evaluation.

        Raises:
            ValueError: a module has got other variables since the executor was made.
        """
        if not self._modules:
            return
        users = [*map(stage_of_module, self._modules)]
        for number, (old, new) in enumerate(zip(self._users, users, strict=True)):
            if [*map(_shape_of, (*old.params, *old.state))] != [*map(_shape_of, (*new.params, *new.state))]:
                raise ValueError(
                    f"stages: expected the variables that stage {number} had when the executor was made, got others; "
                    "make a new PipelineExecutor"
                )
        self._users = users

    def _leaves_of(self, stage: int, tree: Any) -> list[Any]:
        """Return the leaves of a tree in the structure of a stage's parameters."""
        user = self._users[stage]
        leaves, structure = jax.tree.flatten(tree)
        if structure != user.structure:
            raise ValueError(
                f"parameters: expected the structure of stage {stage}, {user.structure}, got {structure}; pass a "
                "pytree like the one that PipelineExecutor was given"
            )
        for name, own, leaf in zip(user.names, user.params, leaves, strict=True):
            try:
                fits = np.broadcast_shapes(np.shape(leaf), own.shape) == own.shape
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"parameters: expected shape {own.shape} for {name!r} of stage {stage}, or one that broadcasts to "
                    f"it, got {np.shape(leaf)}; reshape it, or make a new executor"
                )
        return leaves

    def _make_run(self, kind: str, has_state: bool) -> Any:
        """Return the function that runs a kind of step on all devices."""

        def local(params: StagedParameters, batch: Microbatches) -> tuple[Any, StagedParameters]:
            return self._local(kind, has_state, params, batch)

        if self._transform == "pmap":
            return by_pmap(local, self.mesh)
        data = PartitionSpec(None, DATA_AXIS) if DATA_AXIS in self.mesh.axis_names else PartitionSpec()
        return by_shard_map(local, self.mesh, data, data if kind == "forward" else PartitionSpec())

    def _local(
        self, kind: str, has_state: bool, params: StagedParameters, batch: Microbatches
    ) -> tuple[Any, StagedParameters]:
        """Run a step on one device."""
        packed, state = params.layers
        schedule = self.schedule if kind == "step" else forwards_of(self.schedule)
        stages = ModuleStages(
            self._users, self._layouts, batch, self._loss_fn, self._loss_weight, collects_losses=kind != "forward"
        )
        if kind == "step" and stages.changed_state:
            self._check_state(stages.changed_state, has_state)
        saves = self._saves if kind == "step" else "inputs"
        table = compile_lockstep(schedule, self._fused and kind == "step", saves)
        axes = tuple(self.mesh.axis_names)
        params = StagedParameters(packed, params.replicated)
        result = run_lockstep(stages, table, saves, axes, params, batch, MoveCounter(), state)
        state = result.stage_state
        gradients = result.gradients
        if DATA_AXIS in axes:
            state = jax.tree.map(_mean_of_replicas, state)
            gradients = jax.lax.pmean(gradients, DATA_AXIS)
        return result.collected, gradients._replace(layers=(gradients.layers, state))

    def _check_state(self, changed: list[str], has_state: bool) -> None:
        """Check that the state of stages that change it is given and can be saved for backward."""
        who = f"stages {', '.join(changed)} change variables that are not nnx.Param"
        if not has_state:
            raise ValueError(
                f"state: expected pipeline.initial_state() or the state of the previous step, since {who}, got None; "
                "pass initial_state() to the first step, then the state that each step returns"
            )
        if self._saves == "inputs":
            raise ValueError(
                f"saves: expected 'residuals', since {who} and backward would replay the stages with the changed "
                "values, got 'inputs'; leave saves out"
            )


def split_batch(batch: Any, num_microbatches: int) -> Any:
    """Split a batch into microbatches of equal size.

    Args:
        batch: an array, or a pytree of arrays [B, ...].
        num_microbatches: number m of microbatches.

    Returns:
        Arrays [m, B/m, ...] in the same structure.

    Raises:
        ValueError: an array cannot be split evenly.
    """
    m = num_microbatches
    if not isinstance(m, int | np.integer) or m < 1:
        raise ValueError(
            f"num_microbatches: expected a whole number of at least 1, got {m!r}; pass an int that divides the batch"
        )

    def split(x: Any) -> Any:
        if not np.ndim(x) or np.shape(x)[0] % m:
            raise ValueError(
                f"batch: expected arrays whose axis 0 is a multiple of {m}, the number of microbatches, got shape "
                f"{[*np.shape(x)]}; leave out or repeat some samples, or change the number of microbatches"
            )
        return x.reshape(m, np.shape(x)[0] // m, *np.shape(x)[1:])

    return jax.tree.map(split, batch)


def _mean_of_replicas(x: Array) -> Array:
    """Return the mean over replicas, or the maximum of integers, because counters are equal on all replicas."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, DATA_AXIS)
    return jax.lax.pmax(x, DATA_AXIS)


def _user_stages(stages: Sequence[Any], parameters: Sequence[Any] | None) -> list[UserStage]:
    """Return the stages of functions with their parameters, or of nnx modules."""
    if isinstance(stages, nnx.List):
        stages = [*stages]
    if isinstance(stages, nnx.Module) or callable(stages) or not stages:
        got = "an empty list" if stages == [] else type(stages).__name__
        raise ValueError(f"stages: expected a list with at least one stage, got {got}; pass [stage] for a single one")
    for number, stage in enumerate(stages):
        if isinstance(stage, linen.Module):
            raise ValueError(
                f"stages: expected a function or an nnx module for stage {number}, got the linen module "
                f"{type(stage).__name__}; give lambda params, x: module.apply(params, x), and its variables as "
                "parameters"
            )
        if not callable(stage):
            raise ValueError(
                f"stages: expected a function or an nnx module for stage {number}, got {type(stage).__name__}; pass a "
                "function (params, x) -> y"
            )
    modules = [isinstance(stage, nnx.Module) for stage in stages]
    if any(modules):
        if not all(modules) or parameters is not None:
            raise ValueError(
                "stages: expected nnx modules alone, without parameters, or functions with parameters, got "
                f"{'nnx modules with parameters' if all(modules) else 'a mixture'}; leave out parameters, or make "
                "every stage a function"
            )
        result = [*map(stage_of_module, stages)]
        _check_own_state(result)
    else:
        if parameters is None:
            raise ValueError(
                "parameters: expected a pytree for each stage, since stages are functions, got None; pass a list, "
                "with {} for a stage without parameters"
            )
        result = [*map(stage_of_function, stages, _of_all(parameters, len(stages)))]
    for number, user in enumerate(result):
        for name, leaf in zip(user.names, user.params, strict=True):
            dtype = getattr(leaf, "dtype", type(leaf).__name__)
            if not hasattr(leaf, "dtype") or not jnp.issubdtype(dtype, jnp.inexact):
                raise ValueError(
                    f"parameters: expected floating-point arrays, got {dtype} for {name!r} of stage {number}; let the "
                    "function read other values from elsewhere"
                )
    return result


def _check_own_state(users: Sequence[UserStage]) -> None:
    """Check that no two modules share a variable that a forward may change."""
    owners: dict[Any, tuple[int, str]] = {}
    for number, user in enumerate(users):
        for identity, name in user.state_identities.items():
            if owners.setdefault(identity, (number, name))[0] != number:
                other, other_name = owners[identity]
                raise ValueError(
                    f"stages: expected modules with variables of their own, got {name!r} of stage {number}, which is "
                    f"{other_name!r} of stage {other}; create it twice, e.g. with a separate nnx.Rngs"
                )


def _of_all(trees: Sequence[Any], num_stages: int) -> Sequence[Any]:
    """Check that there is one tree for each stage, and return the trees."""
    if not isinstance(trees, list | tuple) or len(trees) != num_stages:
        got = len(trees) if isinstance(trees, list | tuple) else type(trees).__name__
        raise ValueError(
            f"parameters: expected a list of {num_stages}, one pytree for each stage, got {got}; pass {{}} for a stage "
            "without parameters"
        )
    return trees


def _found_shared(users: Sequence[UserStage]) -> list[dict[int, str]]:
    """Return the parameters that nnx modules share, each as a dict from stage to the first name in it."""
    owners: dict[Any, dict[int, str]] = {}
    for number, user in enumerate(users):
        for identity, name in zip(user.identities, user.names, strict=False):
            owners.setdefault(identity, {}).setdefault(number, name)
    return [names for names in owners.values() if len(names) > 1]


def _shared_indices(users: Sequence[UserStage], shared: Sequence[Mapping[int, str]]) -> list[dict[int, int]]:
    """Return the shared parameters, each as a dict from stage to the index of the parameter, after a check."""
    result = []
    for names in shared:
        places = {}
        for stage, name in names.items():
            if not 0 <= stage < len(users):
                raise ValueError(f"shared_parameters: expected stages below {len(users)}, got {dict(names)}")
            known = users[stage].names
            if known.count(name) != 1:
                raise ValueError(
                    f"shared_parameters: expected one parameter of stage {stage}, which has {', '.join(known[:8])}, "
                    f"got {name!r}"
                )
            places[stage] = known.index(name)
        likes = {_shape_of(users[stage].params[i]) for stage, i in places.items()}
        if len(likes) != 1:
            raise ValueError(
                f"shared_parameters: expected equal shapes and dtypes for {dict(names)}, got "
                f"{sorted(map(str, likes))}; convert them, or do not share them"
            )
        result.append(places)
    return result


def _mesh(mesh: Mesh | None, num_stages: int, transform: str) -> Mesh:
    """Check a mesh, or create one with a device for each stage."""
    if mesh is None:
        devices = jax.devices()
        if len(devices) < num_stages:
            raise ValueError(
                f"mesh: expected one with fewer ranks than the {num_stages} stages, since JAX has {len(devices)} "
                f'devices, got None; give Mesh(jax.devices()[:p], ("{PIPELINE_AXIS}",)), or on a CPU call '
                f"jax.config.update('jax_num_cpu_devices', {num_stages}) before JAX is used"
            )
        return Mesh(np.array(devices[:num_stages]), (PIPELINE_AXIS,))
    if PIPELINE_AXIS not in mesh.axis_names or not {*mesh.axis_names} <= {PIPELINE_AXIS, DATA_AXIS}:
        raise ValueError(
            f"mesh: expected an axis {PIPELINE_AXIS!r}, and besides at most an axis {DATA_AXIS!r}, got "
            f"{dict(mesh.shape)}; rename its axes"
        )
    check_axes(transform, mesh)
    return mesh


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

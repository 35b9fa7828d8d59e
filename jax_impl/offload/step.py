"""A training step with offload: one plan for the passes of microbatches and the optimizer's update."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    EMPTY_PLAN,
    MoveCounter,
    UseMoves,
    layer_storages,
    layers_after,
    pass_uses,
    plan_offload,
    plan_statistics,
    split_first_pass,
    step_uses,
    total_statistics,
    unmoved,
)
from diptych.plans.recompute import recompute_blocks
from jax_impl.offload.residency import Layers, Pass
from jax_impl.offload.stack import plan_saved
from jax_impl.offload.update import LAYERS, OffloadedParameters, Parts, UpdateFunction, layer_numbers

_NOT_OFFLOADED = (
    "loss_fn: expected a model that runs its layers by jax_impl.offload.run_offloaded, as GPTModel does where its "
    "configuration enables offload, got one that never calls it, so nothing would be offloaded; call run_offloaded in "
    "the model, or disable offload in its configuration"
)


class PlannedOffload:
    """What a training step with offload knows on one device and in a pipeline.

    Args:
        config: configuration of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.trace: list[str] | None = None
        """Moves and uses of a step while it is traced, in the order of the program, if the caller sets it to a list;
        see TensorOffloadManager.trace. In a pipeline, those of the optimizer's update."""
        self.moves_parameters = config.enable_tensor_offload
        self.enabled = self.moves_parameters or config.enable_activation_offload
        self.steps_run = 0
        """Number of training steps, for stats."""
        self.forwards_run = 0
        """Number of evaluated microbatches, for stats."""
        self._parameters: OffloadedParameters
        """Set by the subclass if parameters move, as _update_moves."""
        self._update_moves: Sequence[UseMoves] = ()

    def place(self, params: Any) -> Any:
        """Return the parameters as a step expects them, with those of layers in pinned host memory."""
        return self._parameters.place(params) if self.moves_parameters else params

    def update(
        self, update_function: UpdateFunction, params: Any, state: Any, gradients: Any, on_device: Any
    ) -> tuple[Any, Any]:
        """Return new parameters and optimizer state; OffloadedParameters.update documents the arguments."""
        if not self.moves_parameters:
            return update_function(params, state, gradients)
        arguments = (self._update_moves, update_function, params, state, gradients, on_device)
        return self._parameters.update(*arguments, self.trace)


class OffloadedStep(PlannedOffload):
    """A training step with parameters on the host between steps, or activations between forward and backward.

    If the configuration does not enable offload, the same calls compute the same results and move nothing. The model
    must have its layers at ``decoder.layers.<number>`` and run them by run_offloaded, as GPTModel does.

    Args:
        config: configuration of the model on one device.
        params: its parameters, or their shapes.
        num_microbatches: number of microbatches of one step.

    Raises:
        ValueError: the parameters have other layers than the configuration.
    """

    def __init__(self, config: TransformerConfig, params: nnx.State, num_microbatches: int = 1) -> None:
        super().__init__(config)
        self._has_run = False
        self.plan = EMPTY_PLAN
        """Moves of a step; at its end every layer is evicted."""
        self._parameters = OffloadedParameters(params, layer_numbers(params))
        self._num_microbatches = num_microbatches
        self._moved = MoveCounter()
        self._evaluation = self.plan
        if not self.enabled:
            return
        layers = sorted(self._parameters.split(params).layers)
        blocks = recompute_blocks(config)
        _check_layers(layers, params, config)
        self._saved = plan_saved(config, step_uses(layers, 1, blocks), blocks)
        uses = step_uses(layers, num_microbatches, blocks)
        if self.moves_parameters:
            self.plan = plan_offload(uses, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=())
            forward = pass_uses(layers, backward=False)
            self._evaluation = plan_offload(
                forward, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=()
            )
        moves = self.plan.moves or unmoved(uses)
        length = (len(moves) - len(layers)) // num_microbatches
        passes = [moves[k * length : (k + 1) * length] for k in range(num_microbatches)]
        begin, looped = split_first_pass(passes)
        self._initial_layers = begin
        self._pass_moves = (looped[: len(layers)], looped[len(layers) :])
        self._update_moves = moves[num_microbatches * length :]
        self._final_layers = layers_after(looped, begin)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of ``steps_run`` steps and ``forwards_run`` forwards, by the plan; see plan_statistics."""
        arrays = Counter(self._parameters.numbers)
        moved = self._moved.times(self._num_microbatches)
        training = plan_statistics([self.plan], arrays, moved, self.steps_run)
        evaluation = plan_statistics([self._evaluation], arrays, MoveCounter(), self.forwards_run)
        return total_statistics([training, evaluation])

    def begin(self, params: Any) -> Layers:
        """Fetch the layers that must be on the device at the start of every iteration of the loop over microbatches."""
        if not self.moves_parameters:
            return {}
        host_layers = self._parameters.split(params).layers
        self._record(f"+{number}" for number in self._initial_layers)
        return {number: jax.device_put(host_layers[number], jax.memory.Space.Device) for number in self._initial_layers}

    def value_and_grad(
        self, loss_fn: Callable[..., Array], params: Any, on_device: Layers, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], Layers]:
        """Return the loss and the gradients of one microbatch.

        Args:
            loss_fn: ``loss_fn(params, *args, **kwargs)`` runs the model once.
            params: parameters, with those of layers on the host.
            on_device: layers on the device, from begin or the previous microbatch.
            args: positional arguments of the loss.
            kwargs: keyword arguments of the loss.

        Returns:
            Loss and gradients, all on the device, and the layers that are now on the device.

        Raises:
            ValueError: the loss does not run its layers by run_offloaded, so nothing would move.
        """
        if not self.enabled:
            return jax.value_and_grad(loss_fn)(params, *args, **kwargs), on_device
        trace: list[str] = []
        self._moved = MoveCounter()
        context = Pass(*self._pass_moves, on_device, activations=self._saved, moved=self._moved, trace=trace)
        if not self.moves_parameters:
            with context.active(), self._check_moved(trace):
                result = jax.value_and_grad(loss_fn)(params, *args, **kwargs)
            self._record_passes(trace)
            return result, on_device
        parts = self._parameters.split(params)
        zeros = self._parameters.split(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)).layers
        resident = {number: zeros[number] for number in self._final_layers}

        def run(rest: dict[int, Array], gradients: Layers, resident: Layers) -> Array:
            with context._replace(gradient_taps=gradients, resident_taps=resident).active():
                return loss_fn(self._parameters.join(Parts(rest, parts.layers)), *args, **kwargs)

        with self._check_moved(trace):
            loss, gradients = jax.value_and_grad(run, argnums=(0, 1, 2))(parts.rest, zeros, resident)
        self._record_passes(trace)
        return (loss, self._parameters.join(Parts(*gradients[:2]))), gradients[2]

    @contextlib.contextmanager
    def _check_moved(self, trace: Sequence[str]) -> Iterator[None]:
        """Check that a loss runs its layers by the plan; only the first trace of the loss records events."""
        try:
            yield
        except ValueError as error:
            if trace or self._has_run or "memory_space" not in str(error):
                raise
            raise ValueError(_NOT_OFFLOADED) from error
        if not trace and not self._has_run:
            raise ValueError(_NOT_OFFLOADED)
        self._has_run = True

    def _record(self, events: Iterable[str]) -> None:
        """Add events to the trace, if there is one."""
        if self.trace is not None:
            self.trace.extend(events)

    def _record_passes(self, trace: list[str]) -> None:
        """Record the events of one pass for every microbatch, with the microbatch in events of activations."""
        for microbatch in range(self._num_microbatches):
            self._record(re.sub(r"(a\d+)\.0$", rf"\1.{microbatch}", event) for event in trace)


def _check_layers(layers: Sequence[int], params: Any, config: TransformerConfig) -> None:
    """Check that the parameters contain all layers, because other layers would not be offloaded.

    Raises:
        ValueError: the layers are not those of the configuration.
    """
    if list(layers) == list(range(config.num_layers)):
        return
    paths = (path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0])
    found = dict.fromkeys(jax.tree_util.keystr(path[:3], simple=True, separator=".") for path in paths)
    names = ", ".join([*found][:4])
    raise ValueError(
        f"params: expected layers 0 to {config.num_layers - 1} at {'.'.join(LAYERS)}.<number>, as GPTModel has them, "
        f"got layers {list(layers)} there, among parameters at {names}; name the layers so and run them by "
        "jax_impl.offload.run_offloaded, or disable offload in the configuration"
    )

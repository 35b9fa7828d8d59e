"""The layers on the device while a plan is traced, and the context of a pass through the layers."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from jax import Array

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import ActivationMoves, MoveCounter, Use, UseMoves

Layers = dict[int, list[Array]]
"""Arrays of each layer by its number, in the order of its tree."""

State = TypeVar("State")
M = TypeVar("M", bound=nnx.Module)


class Residency:
    """The layers on the device, while the moves of a plan are traced.

    Args:
        host_layers: parameters of every layer as they are placed between steps.
        on_device: layers that are already on the device.
        trace: list to which every move and use is appended, as in the trace of the PyTorch manager; None: no trace.
    """

    def __init__(
        self, host_layers: Mapping[int, list[Array]], on_device: Mapping[int, list[Array]], trace: list[str] | None
    ):
        self.host_layers = dict(host_layers)
        self.on_device = dict(on_device)
        self._trace = [] if trace is None else trace

    def begin(self, moves: UseMoves, state: State) -> State:
        """Start the copies to the device of a use.

        Args:
            moves: the use and its moves.
            state: inputs of the use. The copies start as soon as these exist, because then the memory of the evicted
                layer is free.

        Returns:
            The state, which replaces the argument.
        """
        # A list, because JAX sorts the keys of a dictionary, and copies are issued in this order.
        host_arrays = [self.host_layers[layer] for layer in moves.fetches]
        if host_arrays:
            host_arrays, state = jax.lax.optimization_barrier((host_arrays, state))
        for layer, arrays in zip(moves.fetches, host_arrays, strict=True):
            assert layer not in self.on_device, (
                f"the plan fetches layer {layer} at {moves.use}, where it is on the device"
            )
            self.on_device[layer] = jax.device_put(arrays, jax.memory.Space.Device)
            self._trace.append(f"+{layer}")
        assert moves.use.layer in self.on_device, (
            f"the plan uses layer {moves.use.layer} at {moves.use} before it fetches it"
        )
        self._trace.append(str(moves.use))
        return state

    def end(self, moves: UseMoves, changed: bool = False) -> None:
        """Evict layers after a use.

        Args:
            moves: the use and its moves.
            changed: True if the evicted layers have new values, which are copied to the host.
        """
        for layer in moves.evictions:
            arrays = self.on_device.pop(layer)
            if changed:
                self.host_layers[layer] = array_to_host(arrays)
            self._trace.append(f"-{layer}")


class Pass(NamedTuple):
    """The pass of one microbatch through the layers, as part of a training step."""

    forward: Sequence[UseMoves]
    backward: Sequence[UseMoves]
    on_device: Layers = {}  # noqa: RUF012
    """Layers that are on the device when forward begins."""
    gradient_taps: dict[int, list[Any]] | None = None
    """Arrays on the device that receive gradients, by layer: for each parameter, zeros of its shape or a
    linear_products.LinearTap. JAX would place the gradient of a parameter on the host beside the parameter. None:
    gradients are placed with the parameters."""
    resident_taps: Layers = {}  # noqa: RUF012
    """Zeros with the shapes of the layers that stay on the device after backward. Backward returns these layers as the
    "gradients" of the zeros, because it has no other outputs."""
    activations: Mapping[Use, ActivationMoves] = {}
    """Moves of the values saved for backward; a use that is missing moves none."""
    moved: MoveCounter | None = None
    """Counter of the activations that move."""
    saves_named_only: bool = False
    """True if only named values are saved, even if nothing is recomputed."""
    trace: list[str] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which run_offloaded uses this pass."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def active_pass() -> Pass | None:
    """Return the active pass of a training step, if any."""
    return _ACTIVE.get()


_ACTIVE: ContextVar[Pass | None] = ContextVar("pass through offloaded layers", default=None)


def offloads_layers(config: TransformerConfig) -> bool:
    """Return True if a model runs its layers by run_offloaded."""
    return (config.enable_tensor_offload or config.enable_activation_offload) and not _SUSPENDED.get()


@contextlib.contextmanager
def without_offload() -> Iterator[None]:
    """Return a context in which layers run without offload, for inspection of their computation."""
    token = _SUSPENDED.set(True)
    try:
        yield
    finally:
        _SUSPENDED.reset(token)


_SUSPENDED: ContextVar[bool] = ContextVar("layers run without offload", default=False)


def copy_to_device(module: M) -> M:
    """Return a module with copies of its arrays on the device."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(array_to_device, state))


def array_to_device(array: Array) -> Array:
    """Copy an array to the device if it is on the host."""
    return jax.device_put(array, jax.memory.Space.Device) if is_on_host(array) else array


def array_to_host(array: Any) -> Any:
    """Copy an array, or a tree of arrays, to the host."""
    return jax.device_put(array, jax.memory.Space.Host)


def is_on_host(array: Array) -> bool:
    """Return True if an array is placed in host memory, according to its type."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host

"""Which layers are on the device while a plan is walked, and what a pass through the layers is told by its step."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from jax import Array

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import ActivationStep, Step, Use

Layers = dict[int, list[Array]]
"""By number: a layer's arrays, in the order of its tree."""

State = TypeVar("State")
M = TypeVar("M", bound=nnx.Module)


class Device:
    """The layers that are on the device, while a plan's steps are traced one by one.

    Args:
        hosts: every layer's parameters where they lie between steps.
        here: layers that are there already.
        trace: gets every move and use, as the PyTorch manager's trace does; None: nobody reads it.
    """

    def __init__(self, hosts: Mapping[int, list[Array]], here: Mapping[int, list[Array]], trace: list[str] | None):
        self.hosts, self.here = dict(hosts), dict(here)
        self._trace = [] if trace is None else trace

    def begin(self, step: Step, state: State) -> State:
        """Issue what a use fetches.

        Args:
            step: the use and its moves.
            state: the arrays the use begins from. A copy starts when they are there: not before, when its memory is
                still another layer's, and not after, for nothing else has to be waited for.

        Returns:
            The state, to be used from now on.
        """
        asked = [self.hosts[layer] for layer in step.fetches]  # a dictionary would come back in another order
        if asked:
            asked, state = jax.lax.optimization_barrier((asked, state))
        for layer, arrays in zip(step.fetches, asked, strict=True):
            assert layer not in self.here, f"the plan fetches layer {layer} at {step.use}, where it is on the device"
            self.here[layer] = jax.device_put(arrays, jax.memory.Space.Device)
            self._trace.append(f"+{layer}")
        assert step.use.layer in self.here, f"the plan uses layer {step.use.layer} at {step.use} before it fetches it"
        self._trace.append(str(step.use))
        return state

    def end(self, step: Step, changed: bool = False) -> None:
        """Let go what a use evicts.

        Args:
            step: the use and its moves.
            changed: whether what leaves has new values, which go to the host.
        """
        for layer in step.evictions:
            arrays = self.here.pop(layer)
            if changed:
                self.hosts[layer] = jax.device_put(arrays, jax.memory.Space.Host)
            self._trace.append(f"-{layer}")


@dataclass
class Moved:
    """Activations that go to the host and come back."""

    arrays: int = 0
    bytes: int = 0

    def note(self, nbytes: int) -> None:
        """One more."""
        self.arrays, self.bytes = self.arrays + 1, self.bytes + nbytes

    def times(self, count: int) -> "Moved":
        """So often."""
        return Moved(self.arrays * count, self.bytes * count)


class Pass(NamedTuple):
    """One microbatch's way through the layers, as part of a training step."""

    forward: Sequence[Step]
    backward: Sequence[Step]
    here: Layers = {}  # noqa: RUF012
    """Layers that are on the device when forward begins."""
    gradients: dict[int, list[Any]] | None = None
    """By layer: of each parameter, zeros of its shape, whose gradient is the parameter's, and on the device, where a
    gradient for what lies on the host would have to lie there too; or the pair of an ops._LinearTaps. None: gradients
    belong to the parameters and lie where they do."""
    stay: Layers = {}  # noqa: RUF012
    """Zeros of the shapes of the layers that the plan leaves on the device after backward. Their "gradients" are those
    layers: the only way out of a backward."""
    activations: Mapping[Use, ActivationStep] = {}
    """When what is kept of a layer leaves and comes back; a use without a step moves none."""
    moved: Moved | None = None
    """Told what activations leave."""
    named: bool = False
    """Whether named values alone are kept, also where nothing is recomputed."""
    trace: list[str] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, this is how layers are run that offload is asked to run."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def active_pass() -> Pass | None:
    """The pass that a training step has begun, if one has."""
    return _ACTIVE.get()


_ACTIVE: ContextVar[Pass | None] = ContextVar("pass through offloaded layers", default=None)


def offloads_layers(config: TransformerConfig) -> bool:
    """Whether a model runs its layers by run_offloaded."""
    return (config.enable_tensor_offload or config.enable_activation_offload) and not _SUSPENDED.get()


@contextlib.contextmanager
def without_offload() -> Iterator[None]:
    """While active, layers are run as if nothing were offloaded: for looking at what they compute."""
    token = _SUSPENDED.set(True)
    try:
        yield
    finally:
        _SUSPENDED.reset(token)


_SUSPENDED: ContextVar[bool] = ContextVar("layers run without offload", default=False)


def fetched(module: M) -> M:
    """A module with its arrays on the device, whose copies last as long as somebody reads them."""
    graph, state = nnx.split(module)
    here = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, state)
    return nnx.merge(graph, here)


def is_on_host(array: Array) -> bool:
    """Whether an array lies in host memory, as its type says."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host

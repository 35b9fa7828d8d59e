"""The interface between the executor and stages, which are parts of this project's model or functions of a user."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jax.typing import DTypeLike


class Task(NamedTuple):
    """The arguments with which a stage runs a microbatch."""

    params: Any
    """Parameters of the rank, as StagedParameters."""
    batch: Any
    """The microbatch."""
    vp_stage: Any
    """Index of the stage among those of its rank."""
    first_layer: Any
    """Number of the stage's first layer; not read by functions of a user."""
    stage: Any = 0
    """Number of the stage."""
    state: Any = ()
    """Values of the rank that forwards change, such as the statistics of a batch norm."""


@dataclass(frozen=True, eq=False)
class StageProgram(ABC):
    """The program of stages with equal structure.

    By default nothing is offloaded, and the operands of weight gradients are found in the traced backward.
    """

    first: bool
    """True for the first stage, which reads the microbatch instead of a message."""
    last: bool
    """True for the last stage, which returns the loss of the microbatch."""

    @abstractmethod
    def select(self, task: Task) -> dict[str, Array]:
        """Return the parameters of a stage by name."""

    @abstractmethod
    def add(self, sums: Any, task: Task, gradients: Mapping[str, Array]) -> Any:
        """Add the gradients of a stage to the sums of a rank, in the dtype of the sums, and return the sums."""

    @abstractmethod
    def run(self, parameters: Mapping[str, Array], x: Any, task: Task) -> tuple[Any, Any]:
        """Return the message of a stage (or the loss) and the new state of the rank."""

    @property
    def defers_products(self) -> bool:
        """True if W computes the matrix products that only weight gradients need; see deferred_products.py."""
        return True

    def tap_shapes(self, task: Task, x: Any) -> dict[str, Any]:
        """Return the shapes of input and output of every linear layer whose weight gradient W computes, by weight."""
        del task, x
        return {}

    def offloads(self, layer: int | None, name: str | None, nbytes: int) -> bool:
        """Return True if a value that a layer saves for backward moves to the host.

        Args:
            layer: number of the layer, in the stage from which the program was made; None: outside of layers.
            name: name of the value; None: it has none.
            nbytes: its bytes.
        """
        del layer, name, nbytes
        return False

    def saving(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run``, in jax.checkpoint if its pull-back would save more than a buffer entry has to contain."""
        return run

    def fetching(self, gradients: Mapping[str, Any], replays: bool) -> AbstractContextManager[Any]:
        """Return a context in which the stage fetches offloaded parameters.

        Args:
            gradients: for every parameter, zeros that receive its gradient if it is on the host, its taps, or itself.
            replays: True if backward replays the stage.
        """
        del gradients, replays
        return nullcontext()


@runtime_checkable
class StagePrograms(Protocol):
    """The stages of a pipeline."""

    @property
    def programs(self) -> Sequence[Any]:
        """The programs, each a StageProgram."""
        ...

    @property
    def program_of(self) -> Sequence[int]:
        """Index of the program of each stage."""
        ...

    @property
    def placement(self) -> Sequence[tuple[int, int]]:
        """Rank and virtual stage of each stage."""
        ...

    @property
    def first_layers(self) -> Sequence[int]:
        """Number of the first layer of each stage."""
        ...

    @property
    def collects_losses(self) -> bool:
        """True if the last stage returns losses, whose mean over replicas is taken."""
        ...

    @property
    def loss_weight(self) -> float | None:
        """Factor of each microbatch's loss in the gradients; None: 1 / number of microbatches."""
        ...

    def gradient_dtype(self, parameter: Array) -> DTypeLike:
        """Return the type in which the gradients of a parameter are summed."""
        ...

    def message(self, batch: Any) -> Any:
        """Return a message between stages, of zeros: a pytree of arrays, equal for all stages."""
        ...

    def collected(self, batch: Any) -> Any:
        """Return zeros like the result of the last stage for a microbatch: the loss, or a pytree of arrays."""
        ...

"""What a pipeline schedule is made of: actions, and for every rank their order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from diptych.plans.schedule.placement import Placement, place_of

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A table that cannot be run, or does not do every piece of work exactly once."""


class Action(NamedTuple):
    """One piece of computation."""

    kind: Kind
    """F: forward; B: backward; I: gradient of the input alone; W: gradients of the weights, after I."""
    stage: int
    """Global number."""
    microbatch: int

    def __str__(self) -> str:
        """As torch.distributed.pipelining writes it: ``0F1`` is stage 0, microbatch 1."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order.

    A backward may be whole in one place and split in another: each stage runs B, or else I and W, of each microbatch.
    """

    name: str
    pp_size: int
    num_microbatches: int
    stages_per_rank: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    forward_only: bool = False
    """Nothing is run backward: validation, inference."""
    placement: Placement = "loop"

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pp_size * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return place_of(stage, self.pp_size, self.placement).pp_rank

    @cached_property  # asked for every action of a simulation
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are computed apart anywhere."""
        return any(action.kind in "IW" for actions in self.actions for action in actions)

    @cached_property
    def _whole(self) -> frozenset[tuple[int, int]]:
        """Stages and microbatches whose backward is whole."""
        return frozenset((stage, i) for actions in self.actions for kind, stage, i in actions if kind == "B")

    def splits(self, stage: int, microbatch: int) -> bool:
        """Whether a stage computes a microbatch's input and weight gradients apart."""
        return self.splits_backward and (stage, microbatch) not in self._whole

    def backward_kind(self, stage: int, microbatch: int) -> Kind:
        """Of the action that gives the gradient of a stage's input: B or I."""
        return "I" if self.splits(stage, microbatch) else "B"

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """The action that gives the gradient of a stage's input."""
        return Action(self.backward_kind(stage, microbatch), stage, microbatch)

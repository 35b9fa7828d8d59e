"""Pipeline schedules as data: actions, and their order on every rank."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from diptych.plans.schedule.placement import Placement, place_of

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """An invalid schedule: it cannot run, or an action is missing or repeated."""


class Action(NamedTuple):
    """A computation of one stage on one microbatch."""

    kind: Kind
    """F: forward; B: full backward; I: backward for inputs; W: backward for weights, after I."""
    stage: int
    """Global number of the stage."""
    microbatch: int

    def __str__(self) -> str:
        """Return the notation of torch.distributed.pipelining: ``0F1`` is the forward of microbatch 1 on stage 0."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, stored as a table of actions.

    For each microbatch, a stage runs either the full backward B, or I and W; a schedule may mix both forms.
    """

    name: str
    pp_size: int
    num_microbatches: int
    stages_per_rank: int
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""
    forward_only: bool = False
    """True if the schedule has no backwards, for validation and inference."""
    placement: Placement = "loop"
    """Placement of the stages on ranks."""

    @property
    def num_stages(self) -> int:
        """Total number of stages."""
        return self.pp_size * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank on which a stage is placed."""
        return place_of(stage, self.pp_size, self.placement).pp_rank

    @cached_property  # a simulation reads it for every action
    def splits_backward(self) -> bool:
        """True if any backward is split into I and W."""
        return any(action.kind in "IW" for actions in self.actions for action in actions)

    @cached_property
    def _full_backwards(self) -> frozenset[tuple[int, int]]:
        """Pairs of stage and microbatch with a full backward."""
        return frozenset((stage, i) for actions in self.actions for kind, stage, i in actions if kind == "B")

    def splits(self, stage: int, microbatch: int) -> bool:
        """Return True if a stage splits the backward of a microbatch into I and W."""
        return self.splits_backward and (stage, microbatch) not in self._full_backwards

    def backward_kind(self, stage: int, microbatch: int) -> Kind:
        """Return the kind of the action that computes the gradient of a stage's input: B or I."""
        return "I" if self.splits(stage, microbatch) else "B"

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """Return the action that computes the gradient of a stage's input."""
        return Action(self.backward_kind(stage, microbatch), stage, microbatch)

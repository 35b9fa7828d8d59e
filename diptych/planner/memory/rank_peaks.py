"""Predicted peak of every pipeline rank in a step: what its actions allocate, in the order of its schedule.

An action begins with what the microbatches in flight have saved, what waits for W, and the gradients of parameters that
exist by then. Beside these are messages in transit, of which diptych.planner.memory.in_transit counts as many as there
can be. Fewer are there when a rank's neighbours are fast.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from diptych.planner.memory.in_transit import most_in_transit
from diptych.planner.memory.simulate import Simulation
from diptych.planner.memory.stages import memory_key, simulate_stage
from diptych.planner.traffic import message_bytes
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.partition import num_stages


class ActionMemory(NamedTuple):
    """Bytes of an action."""

    peak: int
    """Largest number of bytes allocated during the action, above those of the microbatch before F."""
    after: int
    """Bytes allocated when the action has ended, above the same."""


class StageActions(NamedTuple):
    """Bytes of the actions of one microbatch on a stage."""

    forward: ActionMemory
    first: dict[str, ActionMemory]
    """B, I and W of the first microbatch, which allocate the gradients of parameters."""
    later: dict[str, ActionMemory]
    """B, I and W of another microbatch, which add to them."""


def stage_actions(config: TransformerConfig, stage: int, batch: int, splits: bool) -> StageActions:
    """Predict the bytes of the actions of a stage.

    Args:
        config: the whole model, with its pipeline.
        stage: global number of the stage.
        batch: sequences of a microbatch.
        splits: True if backward is split into I and W.
    """
    whole = simulate_stage(config, stage, batch)[0]
    forward = ActionMemory(whole.forward_peak, sum(whole.saved_by_name.values()))
    added = simulate_stage(config, stage, batch, gradients="added")[0]
    first = {"B": _backward(whole)}
    later = {"B": _backward(added)}
    if splits:
        first |= _split(simulate_stage(config, stage, batch, gradients="deferred")[0])
        later |= _split(simulate_stage(config, stage, batch, gradients="deferred and added")[0])
    return StageActions(forward, first, later)


def _backward(simulation: Simulation) -> ActionMemory:
    return ActionMemory(simulation.backward_peak, simulation.held)


def _split(simulation: Simulation) -> dict[str, ActionMemory]:
    """Return I and W of a simulation that defers."""
    return {
        "I": ActionMemory(simulation.backward_peak, simulation.before_weights),
        "W": ActionMemory(simulation.weights_peak, simulation.held),
    }


def rank_peaks(config: TransformerConfig, schedule: Schedule, batch: int) -> list[int]:
    """Predict the largest number of bytes that each pipeline rank allocates in a step, above parameters and batches.

    Args:
        config: the whole model, with its pipeline; of context ranks, the one that has most.
        schedule: schedule of the step.
        batch: sequences of a microbatch.
    """
    found: dict[Hashable, StageActions] = {}
    stages = []
    for stage in range(num_stages(config)):
        key = memory_key(config, stage)
        if key not in found:
            found[key] = stage_actions(config, stage, batch, schedule.splits_backward)
        stages.append(found[key])
    message = message_bytes(config, batch)
    transit = most_in_transit(schedule)
    return [_peak(*each, stages, message) for each in zip(schedule.actions, transit, strict=True)]


def backward_memory(
    actions: Iterable[Action], stages: Sequence[StageActions] | Mapping[int, StageActions]
) -> Iterator[tuple[Action, dict[str, ActionMemory], bool]]:
    """Yield each action of a rank with the bytes of its microbatch's B, I and W.

    These are those of the first microbatch, or of a later one, whose gradients are added to those of the first; the
    third item is True for a later one. For F, they are those of the backward that would come now.

    Args:
        actions: actions of the rank, in order.
        stages: bytes of the actions of a stage, by its global number.
    """
    begun: set[tuple[str, int]] = set()
    for action in actions:
        kind, stage, _ = action
        is_later = ("W" if kind == "W" else "I", stage) in begun
        yield action, stages[stage].later if is_later else stages[stage].first, is_later
        if kind != "F":
            begun |= {("I", stage), ("W", stage)} if kind == "B" else {(kind, stage)}


def _peak(actions: Sequence[Action], transit: Sequence[int], stages: Sequence[StageActions], message: int) -> int:
    """Return the peak of a rank from its actions, and the messages in transit during each."""
    allocated = 0
    peak = 0
    for ((kind, stage, _), each, _), messages in zip(backward_memory(actions, stages), transit, strict=True):
        forward = stages[stage].forward
        if kind == "F":
            now = forward
            before = 0
        else:
            now = each[kind]
            before = each["I"].after if kind == "W" else forward.after
        peak = max(peak, allocated - before + now.peak + message * messages)
        allocated += now.after - before
    return peak

"""Predicted peak of every pipeline rank in a step: what its actions allocate, in the order of its schedule.

An action begins with what the microbatches in flight have saved, what waits for W, and the gradients of parameters that
exist by then. Beside these are messages in transit, of which diptych.planner.memory.in_transit counts as many as there
can be. Fewer are there when a rank's neighbours are fast.

Saved values that move to the host may still be on the device in the next action, and those that the next backwards need
are fetched in the actions before them; see diptych.planner.memory.offload.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from diptych.planner.memory.in_transit import most_in_transit
from diptych.planner.memory.offload import ActionMoves, action_moves
from diptych.planner.memory.simulate import AFTER, BEFORE, Simulation
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
    parts: Mapping[int, int]
    """``peak`` in the part of each layer, BEFORE the layers and AFTER them; of W, as a whole, in BEFORE."""


class StageActions(NamedTuple):
    """Bytes of the actions of one microbatch on a stage."""

    forward: ActionMemory
    first: dict[str, ActionMemory]
    """B, I and W of the first microbatch, which allocate the gradients of parameters."""
    later: dict[str, ActionMemory]
    """B, I and W of another microbatch, which add to them."""
    moved: Mapping[int, int]
    """Bytes of the saved values that move to the host, by layer."""


def stage_actions(
    config: TransformerConfig, stage: int, batch: int, splits: bool, moves: ActionMoves | None = None
) -> StageActions:
    """Predict the bytes of the actions of a stage.

    Args:
        config: the whole model, with its pipeline.
        stage: global number of the stage.
        batch: sequences of a microbatch.
        splits: True if backward is split into I and W.
        moves: moves of the microbatch's saved values; None: those of a backward that follows its forward at once.
    """
    whole = simulate_stage(config, stage, batch, moves=moves)
    forward = ActionMemory(whole.forward_peak, sum(whole.saved_by_name.values()), whole.forward_peaks)
    added = simulate_stage(config, stage, batch, gradients="added", moves=moves)
    first = {"B": _backward(whole)}
    later = {"B": _backward(added)}
    if splits:
        first |= _split(simulate_stage(config, stage, batch, gradients="deferred", moves=moves))
        later |= _split(simulate_stage(config, stage, batch, gradients="deferred and added", moves=moves))
    return StageActions(forward, first, later, whole.moved)


def _backward(simulation: Simulation) -> ActionMemory:
    return ActionMemory(simulation.backward_peak, simulation.held, simulation.backward_peaks)


def _split(simulation: Simulation) -> dict[str, ActionMemory]:
    """Return I and W of a simulation that defers."""
    return {
        "I": ActionMemory(simulation.backward_peak, simulation.before_weights, simulation.backward_peaks),
        "W": ActionMemory(simulation.weights_peak, simulation.held, {BEFORE: simulation.weights_peak}),
    }


def rank_peaks(config: TransformerConfig, schedule: Schedule, batch: int) -> list[int]:
    """Predict the largest number of bytes that each pipeline rank allocates in a step, above parameters and batches.

    Args:
        config: the whole model, with its pipeline; of context ranks, the one that has most.
        schedule: schedule of the step.
        batch: sequences of a microbatch.
    """
    keys = [memory_key(config, stage) for stage in range(num_stages(config))]
    found: dict[Hashable, StageActions] = {}

    def memory_of(action: Action, moves: ActionMoves) -> StageActions:
        key = keys[action.stage], config.enable_activation_offload and (action.stage, moves.leaving, moves.on_host)
        if key not in found:
            found[key] = stage_actions(config, action.stage, batch, schedule.splits_backward, moves)
        return found[key]

    message = message_bytes(config, batch)
    peaks = []
    for rank, transit in enumerate(most_in_transit(schedule)):
        actions = schedule.actions[rank]
        moves = action_moves(config, schedule, rank)
        backward = {action[1:]: each for action, each in zip(actions, moves, strict=True) if action.kind in ("B", "I")}
        memory = [memory_of(action, backward[action[1:]]) for action in actions]
        peaks.append(_peak(actions, moves, memory, [message * count for count in transit]))
    return peaks


def backward_memory(
    actions: Iterable[Action], memory: Iterable[StageActions]
) -> Iterator[tuple[Action, dict[str, ActionMemory], bool]]:
    """Yield each action of a rank, the bytes of B, I and W of its microbatch, and whether gradients exist already.

    The first microbatch of a stage allocates the gradients of parameters. Later ones add to them; for these, the third
    item is True. An F is counted as if its backward came at once.

    Args:
        actions: actions of the rank, in order.
        memory: bytes of the actions of each action's stage.
    """
    begun: set[tuple[str, int]] = set()
    for action, own in zip(actions, memory, strict=True):
        kind, stage, _ = action
        is_later = ("W" if kind == "W" else "I", stage) in begun
        yield action, own.later if is_later else own.first, is_later
        if kind != "F":
            begun |= {("I", stage), ("W", stage)} if kind == "B" else {(kind, stage)}


def _peak(
    actions: Sequence[Action], moves: Sequence[ActionMoves], memory: Sequence[StageActions], messages: Sequence[int]
) -> int:
    """Return the peak of a rank.

    Args:
        actions: its actions, in order.
        moves: moves of saved values in each action.
        memory: bytes of the actions of each action's stage.
        messages: bytes of messages in transit during each action.
    """
    allocated = 0
    peak = 0
    moved: Counter[tuple[int, int]] = Counter()
    """Bytes of each layer and microbatch that move to the host."""
    each_backward = backward_memory(actions, memory)
    for (action, each, _), own, move, beside in zip(each_backward, memory, moves, messages, strict=True):
        kind, _, microbatch = action
        now = own.forward if kind == "F" else each[kind]
        changes: dict[int, int] = {}
        """Bytes that other microbatches allocate when the part of a layer begins."""
        if kind == "F":
            moved.update({(layer, microbatch): size for layer, size in own.moved.items()})
            before = 0
            order = [BEFORE, *sorted(layer for layer in now.parts if layer >= 0), AFTER]
            if move.frees is not None:
                changes[order[2]] = -moved[move.frees[1:]]
        else:
            gone = move.leaving - {max(own.forward.parts)}  # when the forward has ended, its last layer is being copied
            before = own.forward.after + sum(moved[layer, microbatch] for layer in gone - move.on_host)
            before -= sum(moved[layer, microbatch] for layer in move.on_host - gone)
            if kind == "W":
                before = each["I"].after
            order = [AFTER, *sorted((layer for layer in now.parts if layer >= 0), reverse=True), BEFORE]
            changes = {layer: sum(moved[use[1:]] for use in uses) for layer, uses in move.fetches.items()}
        allocated -= before
        for part in order:
            allocated += changes.get(part, 0)
            peak = max(peak, allocated + now.parts.get(part, 0) + beside)
        allocated += now.after
    return peak

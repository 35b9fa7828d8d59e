"""Compilation of a schedule for lock-step execution: a table of actions, messages and buffer entries per time slot.

All ranks run one program, so each rank reads its actions from a table with one row per lock-step slot. In a slot, a
rank stores the messages that arrived, runs at most one action of each kind, and sends the results, which arrive in the
next slot. Values wait in buffers; values with disjoint lifetimes share a buffer entry. A buffer is therefore as long as
the peak number of live values, which does not grow with the number of microbatches.

Canonical slots run one action each, in the order of the schedule. Fused slots run a forward and then a backward.
Because every rank waits for the slowest, a canonical slot takes max(F, B), and 1F1B needs 2 m + 2 (p - 1) of them. A
fused slot takes F + B, and 1F1B needs m + 2 (p - 1) of them, but up to 2 p - 1 microbatches are in flight instead of p.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.messages import needed_by
from diptych.plans.schedule.simulate import Costs
from diptych.plans.schedule.validate import validate_schedule

Saves = Literal["inputs", "residuals"]
SAVES = ("inputs", "residuals")
SLOTS = ("canonical", "fused")
"""Kinds of slots: one action, or a forward and a backward."""
FUSED = ("none", "1f1b", "interleaved")
"""Schedules that support fused slots, because their forwards and backwards alternate."""


class Rows(NamedTuple):
    """Columns of the table, int32 [p, slots], for arrivals [p, slots, shifts].

    Stage and microbatch -1 mean that the rank has no such action in the slot. A buffer entry equal to the buffer's
    length is scratch: values stored there are never read.
    """

    input_arrivals: np.ndarray
    """Buffer entry for the activations that arrive over each of LockstepTable.shifts."""
    gradient_arrivals: np.ndarray
    """Buffer entry for the gradient that arrives over each of LockstepTable.shifts, in reverse direction."""
    forward_stage: np.ndarray
    """Stage of F."""
    forward_microbatch: np.ndarray
    """Microbatch of F."""
    forward_input: np.ndarray
    """Buffer entry of the activations that F reads."""
    forward_residuals: np.ndarray
    """Buffer entry for the values that F saves for backward."""
    backward_stage: np.ndarray
    """Stage of B or I. If the schedule splits some backwards, B is stored as I with W in the same slot."""
    backward_microbatch: np.ndarray
    """Microbatch of B or I."""
    backward_input: np.ndarray
    """Buffer entry of the activations that B or I reads."""
    backward_gradient: np.ndarray
    """Buffer entry of the gradient of the stage's output."""
    backward_residuals: np.ndarray
    """Buffer entry of the values that F saved for backward."""
    backward_weight_operands: np.ndarray
    """Buffer entry for the values that I saves for W."""
    weights_stage: np.ndarray
    """Stage of W."""
    weights_microbatch: np.ndarray
    """Microbatch of W."""
    weights_operands: np.ndarray
    """Buffer entry of the values that I saved for W."""


class BufferSizes(NamedTuple):
    """Number of entries of each buffer, without scratch."""

    inputs: int
    gradients: int
    residuals: int
    weight_operands: int


@dataclass(frozen=True)
class LockstepTable:
    """A schedule compiled for lock-step execution."""

    schedule: Schedule
    rows: Rows
    buffer_sizes: BufferSizes
    shifts: tuple[int, ...]
    """Distances in ranks, modulo p, over which activations are sent in every slot; gradients use the reverse ones."""
    fused: bool = False
    """True if a slot runs a forward and a backward; False if it runs one action."""

    @property
    def count(self) -> int:
        """Number of lock-step slots."""
        return self.rows.forward_stage.shape[1]

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank in order, reconstructed from the table."""
        rows = self.rows
        schedule = self.schedule
        columns: tuple[tuple[Kind, np.ndarray, np.ndarray], ...] = (
            ("F", rows.forward_stage, rows.forward_microbatch),
            ("B", rows.backward_stage, rows.backward_microbatch),
            ("W", rows.weights_stage, rows.weights_microbatch),
        )

        def read(kind: Kind, stage: int, microbatch: int) -> Iterator[Action]:
            if kind == "B":
                yield schedule.backward_of(stage, microbatch)
            elif kind == "F" or schedule.splits(stage, microbatch):
                yield Action(kind, stage, microbatch)

        return tuple(
            tuple(
                action
                for slot in range(self.count)
                for kind, stages, microbatches in columns
                if microbatches[rank, slot] >= 0
                for action in read(kind, int(stages[rank, slot]), int(microbatches[rank, slot]))
            )
            for rank in range(schedule.pp_size)
        )


def compile_lockstep(schedule: Schedule, fused: bool = False, saves: Saves = "inputs") -> LockstepTable:
    """Compile a schedule to its lock-step table.

    Args:
        schedule: any valid schedule.
        fused: run a forward and a backward per slot, in an order with more warm-up forwards.
        saves: values that wait from F to B: the stage's ``"inputs"``, or the ``"residuals"`` that F saves for backward.

    Raises:
        ValueError: the schedule is invalid or does not support fused slots, or saves is unknown.
    """
    if saves not in SAVES:
        raise ValueError(f"saves: expected one of {SAVES}, got {saves!r}")
    validate_schedule(schedule)
    fused = fused and not schedule.forward_only
    times = _times(schedule, fused)
    lifetimes = _lifetimes(schedule, times, saves)
    entries = [{name: _allocate(intervals) for name, intervals in rank.items()} for rank in lifetimes]
    sizes = BufferSizes(*(max(len(set(rank[name].values())) for rank in entries) for name in BufferSizes._fields))
    return LockstepTable(schedule, _fill(schedule, times, entries, sizes), sizes, _shifts(schedule), fused)


def lockstep_makespan(schedule: Schedule, costs: Costs | None = None, fused: bool = False) -> float:
    """Return the time of a step in lock-step.

    Every slot lasts as long as its busiest rank, with one message latency between two slots. The result is at least
    the makespan of diptych.plans.schedule.simulate.simulate for the same order, where ranks are asynchronous.

    Args:
        schedule: a valid schedule.
        costs: times of actions and messages; None: F = I = W = 1 and free communication.
        fused: see compile_lockstep.

    Raises:
        ValueError: the schedule does not support fused slots.
    """
    costs = costs or Costs()
    stages = range(schedule.num_stages)
    home = [schedule.rank_of(stage) for stage in stages]
    durations = {(kind, stage): costs.time(Action(kind, stage, 0)) for kind in get_args(Kind) for stage in stages}
    work: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (kind, stage, _), slot in _times(schedule, fused and not schedule.forward_only).items():
        work[slot, home[stage]] += durations[kind, stage]
    busiest: defaultdict[int, float] = defaultdict(float)
    for (slot, _), time in work.items():
        busiest[slot] = max(busiest[slot], time)
    messages = costs.communication * (len(busiest) - 1) if schedule.pp_size > 1 else 0.0
    return sum(busiest.values()) + messages


def _times(schedule: Schedule, fused: bool) -> dict[Action, int]:
    """Return the lock-step slot of every action, with each rank's next action in the first possible slot."""
    waiting = [list(reversed(actions)) for actions in (_fused_order(schedule) if fused else schedule.actions)]
    home = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    times: dict[Action, int] = {}
    slot = 0

    def can_run(action: Action, rank: int) -> bool:
        """Return True if all dependencies ran in an earlier slot, or on the same rank in this slot."""
        for needed in needed_by(schedule, action):
            when = times.get(needed)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if when is None or (when >= slot and home[needed[1]] != rank):
                return False
        return True

    while any(waiting):
        before = len(times)
        for rank, left in enumerate(waiting):
            # A canonical slot takes one action, a fused slot also a forward followed by a backward.
            for expected in ("F", "B") if fused else ("FBIW",):
                action = left[-1] if left else None
                if action is not None and action.kind in expected and can_run(action, rank):
                    times[left.pop()] = slot
        assert len(times) > before, f"every rank of {schedule.name!r} waits in slot {slot}"
        slot += 1
    return times


def _fused_order(schedule: Schedule) -> list[list[Action]]:
    """Return every rank's actions with forwards and backwards paired, after enough warm-up forwards to avoid waiting.

    A rank runs a forward in every slot until its first microbatch has passed all later stages and its gradient has
    returned.
    """
    if schedule.name not in FUSED:
        raise ValueError(
            f"fused: expected False with schedule {schedule.name!r} (forwards and backwards alternate in {FUSED}), "
            "got True"
        )
    p = schedule.pp_size
    v = schedule.stages_per_rank
    orders = []
    for rank, actions in enumerate(schedule.actions):
        forwards, backwards = ([a for a in actions if a.kind == kind] for kind in "FB")
        group = next((i for i, a in enumerate(forwards) if a.stage != rank), len(forwards))
        warmup = min(len(forwards), 2 * (p - 1 - rank) + (2 * (v - 1) * group if v > 1 else 0))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(backwards) - warmup :])
    return orders


Interval = tuple[int, int, tuple[int, int]]
"""First and last slot of a value's lifetime, and the value's stage and microbatch."""


def _lifetimes(schedule: Schedule, times: dict[Action, int], saves: Saves) -> list[dict[str, list[Interval]]]:
    """Return the lifetimes of all values, by rank and buffer."""
    lifetimes: list[dict[str, list[Interval]]] = [{name: [] for name in BufferSizes._fields} for _ in schedule.actions]
    for action, slot in times.items():
        kind, stage, microbatch = action
        on_rank = lifetimes[schedule.rank_of(stage)]
        value = (stage, microbatch)
        backward = schedule.backward_of(stage, microbatch)
        backward_slot = times.get(backward, slot)
        if kind == "F" and stage > 0:
            arrival = times[Action("F", stage - 1, microbatch)] + 1
            on_rank["inputs"].append((arrival, backward_slot if saves == "inputs" else slot, value))
        if kind == "F" and saves == "residuals" and not schedule.forward_only:
            on_rank["residuals"].append((slot, backward_slot, value))
        if action == backward and stage + 1 < schedule.num_stages:
            on_rank["gradients"].append((times[schedule.backward_of(stage + 1, microbatch)] + 1, slot, value))
        if action == backward and schedule.splits_backward:
            on_rank["weight_operands"].append((slot, times.get(Action("W", stage, microbatch), slot), value))
    return lifetimes


def _allocate(intervals: Iterable[Interval]) -> dict[tuple[int, int], int]:
    """Return a buffer entry for each value, with as few entries as the peak number of live values."""
    entries: dict[tuple[int, int], int] = {}
    ends: list[int] = []  # last slot of the latest value in each entry
    for first, last, value in sorted(intervals):
        free = next((entry for entry, end in enumerate(ends) if end < first), len(ends))
        ends[free : free + 1] = [last]
        entries[value] = free
    return entries


def _shifts(schedule: Schedule) -> tuple[int, ...]:
    ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    return tuple(sorted({(b - a) % schedule.pp_size for a, b in pairwise(ranks)}))


def _fill(schedule: Schedule, times: dict[Action, int], entries: list[dict[str, dict]], sizes: BufferSizes) -> Rows:
    """Return the columns of the table."""
    shape = (schedule.pp_size, 1 + max(times.values(), default=-1))
    shifts = _shifts(schedule)
    scratch = dict(
        input_arrivals=sizes.inputs,
        forward_input=sizes.inputs,
        backward_input=sizes.inputs,
        gradient_arrivals=sizes.gradients,
        backward_gradient=sizes.gradients,
        forward_residuals=sizes.residuals,
        backward_residuals=sizes.residuals,
        backward_weight_operands=sizes.weight_operands,
        weights_operands=sizes.weight_operands,
    )
    rows = Rows(
        *(
            np.full((*shape, len(shifts)) if name.endswith("arrivals") else shape, scratch.get(name, -1), np.int32)
            for name in Rows._fields
        )
    )
    for action, slot in times.items():
        kind, stage, microbatch = action
        rank = schedule.rank_of(stage)
        roles = {"F": ["forward"], "I": ["backward"], "W": ["weights"], "B": ["backward"]}[kind]
        if kind == "B" and schedule.splits_backward:
            roles.append("weights")  # the program then has I and W only, and B is both in one slot
        for role in roles:
            found = dict(stage=stage, microbatch=microbatch)
            for buffer, column in _READS[role].items():
                entry = entries[rank][buffer].get((stage, microbatch))
                if entry is not None:
                    found[column] = entry
            for column, value in found.items():
                getattr(rows, f"{role}_{column}")[rank, slot] = value
        if kind != "W":
            _send(schedule, rows, entries, action, slot, shifts)
    return rows


_READS: dict[str, dict[str, str]] = {
    "forward": {"inputs": "input", "residuals": "residuals"},
    "backward": {
        "inputs": "input",
        "gradients": "gradient",
        "residuals": "residuals",
        "weight_operands": "weight_operands",
    },
    "weights": {"weight_operands": "operands"},
}
"""By role: the buffers that an action reads or writes, and the column of the buffer entry."""


def _send(
    schedule: Schedule, rows: Rows, entries: list[dict[str, dict]], action: Action, slot: int, shifts: tuple[int, ...]
) -> None:
    """Set the receiver's buffer entry for an action's result in the following slot."""
    forward = action.kind == "F"
    stage = action.stage + (1 if forward else -1)
    if not 0 <= stage < schedule.num_stages:
        return
    sender = schedule.rank_of(action.stage)
    rank = schedule.rank_of(stage)
    shift = shifts.index((rank - sender if forward else sender - rank) % schedule.pp_size)
    buffer, arrivals = ("inputs", rows.input_arrivals) if forward else ("gradients", rows.gradient_arrivals)
    arrivals[rank, slot + 1, shift] = entries[rank][buffer][stage, action.microbatch]

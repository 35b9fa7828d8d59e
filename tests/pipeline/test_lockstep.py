"""Schedules in lock-step: every action once and in time, no value overwritten while needed, no slot too many."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.lockstep import FUSED, SAVES, LockstepTable, compile_lockstep, lockstep_makespan
from diptych.plans.schedule.messages import dependencies
from diptych.plans.schedule.named import NAMES, build_schedule
from diptych.plans.schedule.simulate import Costs, simulate
from tests.pipeline.schedules import sizes

ANY = st.sampled_from(NAMES).flatmap(sizes)
ALTERNATING = st.sampled_from(FUSED).flatmap(sizes)


class Machine:
    """Runs a table as its columns say: values are the actions that made them, poison where nothing was stored."""

    def __init__(self, table: LockstepTable, saves: str) -> None:
        self.schedule, self.rows, self.table, self.saves = table.schedule, table.rows, table, saves
        ranks = range(table.schedule.pp_size)
        self.buffers = {name: [["poison"] * (n + 1) for _ in ranks] for name, n in table.buffer_sizes._asdict().items()}
        self.done: dict[Action, int] = {}

    def run(self) -> None:
        p, shifts = self.schedule.pp_size, self.table.shifts
        sent = [(None, None)] * p  # what each rank sent at the row before: activations, gradient
        for row in range(self.table.count):
            for rank in range(p):
                for i, shift in enumerate(shifts):
                    forward, backward = sent[(rank - shift) % p][0], sent[(rank + shift) % p][1]
                    self.buffers["inputs"][rank][self.rows.input_arrivals[rank, row, i]] = forward
                    self.buffers["gradients"][rank][self.rows.gradient_arrivals[rank, row, i]] = backward
            sent = [self.turn(rank, row) for rank in range(p)]

    def turn(self, rank: int, row: int) -> tuple[Action | None, Action | None]:
        rows, last = self.rows, self.schedule.num_stages - 1
        forward = self.action("F", rank, row, rows.forward_stage, rows.forward_microbatch)
        if forward is not None:
            if forward.stage > 0:
                self.expect("inputs", rank, rows.forward_input[rank, row], forward._replace(stage=forward.stage - 1))
            self.buffers["residuals"][rank][rows.forward_residuals[rank, row]] = forward
        pulled = self.action("B", rank, row, rows.backward_stage, rows.backward_microbatch)
        if pulled is not None:
            _, stage, microbatch = pulled
            if self.saves == "residuals":
                self.expect("residuals", rank, rows.backward_residuals[rank, row], Action("F", stage, microbatch))
            elif stage > 0:
                self.expect("inputs", rank, rows.backward_input[rank, row], Action("F", stage - 1, microbatch))
            if stage < last:
                slot = rows.backward_gradient[rank, row]
                self.expect("gradients", rank, slot, self.schedule.backward_of(stage + 1, microbatch))
            self.buffers["weight_operands"][rank][rows.backward_weight_operands[rank, row]] = pulled
        if pulled is not None and pulled.kind == "B" and self.schedule.splits_backward:  # its second half, at once
            assert (rows.weights_stage[rank, row], rows.weights_microbatch[rank, row]) == pulled[1:]
            self.expect("weight_operands", rank, rows.weights_operands[rank, row], pulled)
            return forward, pulled
        weights = self.action("W", rank, row, rows.weights_stage, rows.weights_microbatch)
        if weights is not None:
            self.expect("weight_operands", rank, rows.weights_operands[rank, row], weights._replace(kind="I"))
        return forward, pulled

    def action(self, kind: str, rank: int, row: int, stages: np.ndarray, microbatches: np.ndarray) -> Action | None:
        stage, microbatch = int(stages[rank, row]), int(microbatches[rank, row])
        assert (stage < 0) == (microbatch < 0)
        if stage < 0:
            return None
        action = self.schedule.backward_of(stage, microbatch) if kind == "B" else Action(kind, stage, microbatch)
        assert self.schedule.rank_of(stage) == rank
        assert action not in self.done, f"{action} runs twice"
        for needed in dependencies(self.schedule, action):
            same = self.schedule.rank_of(needed.stage) == rank
            assert self.done[needed] < row + same, f"{action} runs before {needed} has arrived"
        self.done[action] = row
        return action

    def expect(self, buffer: str, rank: int, slot: int, value: Action) -> None:
        assert slot < getattr(self.table.buffer_sizes, buffer), f"{value} is read from the scratch slot"
        assert self.buffers[buffer][rank][slot] == value


@given(ANY, st.sampled_from(SAVES), st.booleans())
@example(("dualpipe-v", 2, 1, 2), "inputs", False)  # one whole backward among split ones
def test_canonical_slots_run_the_schedule(arguments, saves, forward_only):
    """Each rank's order is the schedule's, and every value read is the one meant: nothing live is overwritten."""
    schedule = build_schedule(*arguments)
    if forward_only:
        forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule.actions)
        schedule = replace(schedule, actions=forwards, forward_only=True)
    table = compile_lockstep(schedule, saves=saves)
    assert table.actions() == schedule.actions
    rows = table.rows
    weights = (rows.weights_stage, rows.weights_microbatch)
    # Where other backwards are split, a whole one is both halves of one microbatch in one row.
    halves = np.all([a == b for a, b in zip(weights, (rows.backward_stage, rows.backward_microbatch), strict=True)], 0)
    busy = (rows.forward_stage >= 0) + 0 + (rows.backward_stage >= 0) + ((rows.weights_stage >= 0) & ~halves)
    assert busy.max() == 1
    machine = Machine(table, "inputs" if forward_only else saves)
    machine.run()
    assert len(machine.done) == sum(map(len, schedule.actions))


@given(ALTERNATING, st.sampled_from(SAVES))
def test_fused_slots_keep_the_order_of_each_kind(arguments, saves):
    schedule = build_schedule(*arguments)
    table = compile_lockstep(schedule, fused=True, saves=saves)
    for kind in "FB":
        for ours, theirs in zip(table.actions(), schedule.actions, strict=True):
            assert [a for a in ours if a.kind == kind] == [a for a in theirs if a.kind == kind]
    machine = Machine(table, saves)
    machine.run()
    assert len(machine.done) == sum(map(len, schedule.actions))


@given(ANY)
def test_slots_are_no_more_than_what_is_in_flight(arguments):
    """Residuals: as many slots as microbatches in flight at most. Inputs: these, and what waits for its forward."""
    schedule = build_schedule(*arguments)
    most = max(simulate(schedule).peak_in_flight)
    assert compile_lockstep(schedule, saves="residuals").buffer_sizes.residuals == (
        most if not schedule.splits_backward else first_half_in_flight(schedule)
    )
    assert compile_lockstep(schedule, saves="inputs").buffer_sizes.inputs <= most + schedule.stages_per_rank


def first_half_in_flight(schedule: Schedule) -> int:
    """Most microbatches from F to I, or a whole B, on any rank."""
    begun = [np.cumsum([a.kind == "F" for a in actions]) for actions in schedule.actions]
    ended = [np.cumsum([False, *(a.kind in "IB" for a in actions[:-1])]) for actions in schedule.actions]
    return max(int((b - e).max()) for b, e in zip(begun, ended, strict=True))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_buffers_do_not_grow_with_the_number_of_microbatches(name):
    assert (
        len(
            {compile_lockstep(build_schedule(name, 4, m), saves=saves).buffer_sizes for m in (8, 64) for saves in SAVES}
        )
        == 2
    )
    grows = [compile_lockstep(build_schedule("gpipe", 4, m), saves="residuals").buffer_sizes.residuals for m in (8, 64)]
    assert grows == [8, 64]


@pytest.mark.parametrize(("m", "p"), [(8, 4), (1, 3), (2, 5), (7, 1)])
def test_number_of_slots(m, p):
    """1F1B: canonical 2 m + 2 (p - 1), fused m + 2 (p - 1), with min(m, 2 p - 1) in flight."""
    schedule = build_schedule("1f1b", p, m)
    assert compile_lockstep(schedule).count == 2 * m + 2 * (p - 1)
    fused = compile_lockstep(schedule, fused=True, saves="residuals")
    assert fused.count == m + 2 * (p - 1)
    assert fused.buffer_sizes.residuals == min(m, 2 * p - 1)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (3, 9, 3)])
def test_interleaved_fused_slots(p, m, v):
    """m v pairs of a forward and a backward, and one microbatch's way through all stages and back."""
    assert compile_lockstep(build_schedule("interleaved", p, m, v), fused=True).count == m * v + 2 * (p * v - 1)


@given(ANY, st.tuples(*[st.floats(0.1, 3.0)] * 3), st.floats(0.0, 1.0))
def test_lock_step_takes_at_least_what_ranks_take_that_wait_for_less(size, times, communication):
    schedule = build_schedule(*size)
    costs = Costs(*times, communication)
    together, apart = lockstep_makespan(schedule, costs), simulate(schedule, costs).makespan
    assert together >= apart * (1 - 1e-12)
    work = [sum(map(costs.time, actions)) for actions in schedule.actions]
    if schedule.pp_size == 1:
        assert together == pytest.approx(work[0])


@given(st.integers(2, 6), st.integers(1, 9), st.tuples(*[st.floats(0.1, 3.0)] * 3))
def test_lock_step_of_1f1b(p, m, times):
    """Canonical, F <= B: p slots of forwards alone, and some backward in all others; fused: as 1F1B itself."""
    costs = Costs(min(times), times[1], max(times))
    F, B = costs.time(Action("F", 0, 0)), costs.time(Action("B", 0, 0))
    alone = lockstep_makespan(build_schedule("1f1b", p, m), costs)
    assert alone == pytest.approx(p * F + (2 * m + p - 2) * B)
    late = replace(costs, communication=0.5)
    assert lockstep_makespan(build_schedule("1f1b", p, m), late) == pytest.approx(alone + 0.5 * (2 * m + 2 * p - 3))
    for name in ("1f1b", "gpipe"):
        fused = lockstep_makespan(build_schedule(name, p, m), costs, fused=name == "1f1b")
        assert fused == pytest.approx((m + p - 1) * (F + B))


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (5, 12)])
def test_lock_step_loses_nothing_where_all_actions_are_alike(name, p, m):
    schedule = build_schedule(name, p, m, 2 if name.startswith("v") or name.endswith("v") else 1)
    assert lockstep_makespan(schedule) == simulate(schedule).makespan


class Folded(Schedule):
    """Two stages a rank, back and forth: 0 1 2 | 2 1 0."""

    def rank_of(self, stage: int) -> int:
        return min(stage, 2 * self.pp_size - 1 - stage)


def test_stages_may_lie_on_ranks_in_any_way():
    """Results go to the next rank, the rank before, or stay."""
    p, m = 3, 4
    actions = tuple(
        tuple(
            Action(kind, stage, i)
            for i in range(m)
            for kind, stages in (("F", (rank, 2 * p - 1 - rank)), ("B", (2 * p - 1 - rank, rank)))
            for stage in stages
        )
        for rank in range(p)
    )
    table = compile_lockstep(Folded("by hand", p, m, 2, actions))
    assert table.shifts == (0, 1, 2)
    assert table.actions() == actions
    Machine(table, "inputs").run()


def test_what_cannot_be_compiled_is_refused():
    for name in ("gpipe", "zb-h1"):
        with pytest.raises(ValueError, match=f"fused: expected False with schedule '{name}' .*, got True"):
            compile_lockstep(build_schedule(name, 2, 4), fused=True)
    with pytest.raises(ValueError, match=r"saves: expected one of \('inputs', 'residuals'\), got 'all'"):
        compile_lockstep(build_schedule("1f1b", 2, 4), saves="all")  # pyright: ignore[reportArgumentType]
    schedule = build_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="rank 0, 0B0: expected once, got none"):
        compile_lockstep(replace(schedule, actions=(schedule.actions[0][:1], schedule.actions[1])))

"""What goes wrong between ranks ends every rank, in time, with an error that names it; nothing is left behind."""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import reference_torch.rank_pool as rank_pool
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import Costs, simulate
from parity.cli.processes import CHILD
from reference_torch.rank_pool import RankError, RankPool
from tests.faults.messages import Fault
from tests.pipeline.jobs import Case, Outcome, unsharded_outcome
from tests.pipeline.support import JOBS, check, check_gradients, divided
from tests.rank_processes import wait_until_gone

pytestmark = pytest.mark.multiprocess
FAULTY = "tests.pipeline.fault_jobs"

TIMEOUT = 3.0
"""Seconds a message may take."""
MARGIN = 3.0
"""Seconds a rank may need beyond that: computing, and a machine that has other things to do."""
ANSWER = 10.0
"""Seconds the pool waits for the other ranks after a death, more than any of them should need."""

CASE = Case(divided(4, "1f1b", pipeline_timeout=TIMEOUT), 4)
INTERLEAVED = divided(4, v=2, num_layers=8, variable_seq_lengths=True, pipeline_timeout=TIMEOUT)


class RankReport(NamedTuple):
    """What one rank wrote."""

    seconds: float
    error: str | None
    outcome: Outcome | None


class Scenario(NamedTuple):
    """A step in which something goes wrong."""

    case: Case = CASE
    fault: Fault | None = None
    kind: str = "Faulty"
    others: dict[int, Case] = {}  # noqa: RUF012
    """What some ranks run instead."""
    says: dict[int, str] = {}  # noqa: RUF012
    """What some ranks have to say of it."""

    @property
    def dead(self) -> set[int]:
        if self.fault is None:
            return set()
        rank = self.fault.rank
        return {"killed": {rank}, "longer than it says": {rank + 1}}.get(self.fault.kind, set())


def rank_reports(scenario: Scenario) -> dict[int, RankReport]:
    """What each rank says that was left to say something; none is left afterwards."""
    with tempfile.TemporaryDirectory() as folder, RankPool(4, timeout=25.0) as pool:
        pool.run(f"{JOBS}:run_cases", [])
        pids = pool.process_ids()
        arguments = *scenario[:2], folder, *scenario[2:4]
        if scenario.dead:
            code = -(signal.SIGKILL if scenario.fault.kind == "killed" else signal.SIGABRT)
            with pytest.raises(RankError, match=f"rank {min(scenario.dead)}: died with exit code {code}"):
                pool.run(f"{FAULTY}:run_with_fault", *arguments)
            wait_until_gone(pids)
        else:
            pool.run(f"{FAULTY}:run_with_fault", *arguments)
        pool.close()
        wait_until_gone(pids)
        reports = {int(file.name): RankReport(*pickle.loads(file.read_bytes())) for file in Path(folder).glob("?")}
    assert reports.keys() == set(range(4)) - scenario.dead
    return reports


def check_scenarios(scenarios: dict[str, Scenario], monkeypatch, check_one) -> None:
    """All of them, some at a time: most of it is waiting."""
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", ANSWER)

    def run(name: str) -> str | None:
        try:
            reports = rank_reports(scenarios[name])
            for rank, (seconds, error, _) in reports.items():
                delay = scenarios[name].fault.seconds if scenarios[name].fault else 0.0
                assert seconds < TIMEOUT + MARGIN + delay, f"rank {rank}: {seconds:.1f} s, {error}"
            print(name, *reports.items(), sep="\n    ")
            check_one(scenarios[name], reports)
        except (AssertionError, RankError) as error:
            return f"{name}: {error}"
        return None

    with ThreadPoolExecutor(3) as threads:
        failures = [failure for failure in threads.map(run, scenarios) if failure]
    assert not failures, "\n\n".join(failures)


NAMED = r"\b(RECV|SEND) \d[FBIW]\d (from|to) rank \d|(sum of|number of)"


def check_fault(scenario: Scenario, reports: dict[int, RankReport]) -> None:
    for rank, part in scenario.says.items():
        assert reports[rank].error is not None, f"rank {rank} did not notice"
        assert part in reports[rank].error, f"rank {rank}: {reports[rank].error}"
    for rank, (_, error, _) in reports.items():
        assert error is None or re.search(NAMED, error), f"rank {rank}: {error}"
    check_losses(scenario, reports)


def check_losses(scenario: Scenario, reports: dict[int, RankReport]) -> None:
    """Where the last rank came to an end, its losses are the right ones."""
    if 3 in reports and reports[3].outcome is not None:
        expected = unsharded_outcome(scenario.others.get(3, scenario.case)).reports
        assert reports[3].outcome.reports == pytest.approx(expected, rel=1e-12)


FAULTS = {
    "killed": Scenario(fault=Fault("killed", 1, "1F2"), says={0: "rank 1", 2: "rank 1"}),
    "killed in backward": Scenario(fault=Fault("killed", 2, "2B1"), says={1: "rank 2", 3: "rank 2"}),
    "dropped": Scenario(fault=Fault("dropped", 1, "1F2"), says={2: "RECV 1F2 from rank 1"}),
    "dropped, a gradient": Scenario(
        fault=Fault("dropped", 2, "2B3"), says={1: "RECV 2B3 from rank 2", 3: "tied embedding"}
    ),
    "delayed beyond the timeout": Scenario(
        fault=Fault("delayed", 0, "0F1", TIMEOUT + 1.5), says={1: "RECV 0F1 from rank 0", 0: "rank 1"}
    ),
    "duplicated": Scenario(fault=Fault("duplicated", 1, "1F2"), says={1: "SEND 1F2 to rank 2"}),
    "longer": Scenario(fault=Fault("longer", 1, "1F2"), says={2: "RECV 1F2 from rank 1"}),
    "shorter": Scenario(fault=Fault("shorter", 1, "1F2"), says={2: "RECV 1F2 from rank 1"}),
    "longer than it says": Scenario(fault=Fault("longer than it says", 1, "1F2"), says={1: "rank 2", 3: "rank 2"}),
    "late of a step": Scenario(fault=Fault("late of a step", 1, "1F2"), says={2: "RECV 1F2 from rank 1"}),
    "behind by a step": Scenario(fault=Fault("behind by a step", 2), says={2: "RECV 1F0 from rank 1"}),
    "in order, dropped": Scenario(
        fault=Fault("dropped", 1, "1F1"), kind="InOrder", says={2: "expected RECV 1F1 from rank 1, got 1F2 of step 1"}
    ),
    "in order, duplicated": Scenario(
        fault=Fault("duplicated", 1, "1F1"), kind="InOrder", says={2: "expected RECV 1F2 from rank 1, got 1F1 of"}
    ),
    "in order, behind by a step": Scenario(
        fault=Fault("behind by a step", 2), kind="InOrder", says={2: "expected RECV 1F0 from rank 1, got 1F0 of step 1"}
    ),
}


def test_a_fault_ends_every_rank_in_time_and_is_named(monkeypatch):
    check_scenarios(FAULTS, monkeypatch, check_fault)


HARMLESS = {
    "nothing": Scenario(),
    "delayed within the timeout": Scenario(fault=Fault("delayed", 1, "1F2", 1.0)),
    "in order": Scenario(kind="InOrder"),
    "in order, interleaved": Scenario(
        CASE._replace(config=replace(INTERLEAVED, variable_seq_lengths=False)), kind="InOrder"
    ),
    "in order, lengths announced": Scenario(
        CASE._replace(config=replace(CASE.config, variable_seq_lengths=True), lengths=(2, 6, 1, 3)), kind="InOrder"
    ),
    "in order, lengths announced, interleaved": Scenario(
        CASE._replace(config=INTERLEAVED, lengths=(2, 6, 1, 3)), kind="InOrder"
    ),
}


def check_harmless(scenario: Scenario, reports: dict[int, RankReport]) -> None:
    assert [reports[rank].error for rank in range(4)] == [None] * 4
    expected = unsharded_outcome(scenario.case, 4 // scenario.case.config.pipeline_model_parallel_size)
    check(scenario.case, [reports[rank].outcome for rank in range(4)], expected)


def test_what_does_no_harm_changes_nothing(monkeypatch):
    check_scenarios(HARMLESS, monkeypatch, check_harmless)


OTHERS = {
    "another schedule": CASE._replace(config=divided(4, "gpipe", pipeline_timeout=TIMEOUT)),
    "more microbatches": CASE._replace(num_microbatches=5),
    "fewer microbatches": CASE._replace(num_microbatches=3),
    "other lengths": CASE._replace(config=replace(CASE.config, seq_length=5)),
    "another type": CASE._replace(config=replace(CASE.config, params_dtype="float32")),
    "a split backward": CASE._replace(config=divided(4, "zb-h1", pipeline_timeout=TIMEOUT)),
}


def check_other(scenario: Scenario, reports: dict[int, RankReport]) -> None:
    errors = [part.error for part in reports.values() if part.error is not None]
    if not errors:
        check_gradients([part.outcome for part in reports.values()], unsharded_outcome(CASE).gradients)
    assert not errors or any(re.search(NAMED, error) for error in errors)
    check_losses(scenario, reports)


def test_a_rank_that_runs_something_else_is_found_out(monkeypatch):
    """Or does no harm: another order of the same messages gives the same step."""
    scenarios = {name: Scenario(others={2: other}) for name, other in OTHERS.items()}
    check_scenarios(scenarios, monkeypatch, check_other)


# Overlap.


@pytest.mark.slow  # two cores that others share cannot keep its time
def test_messages_travel_while_ranks_compute():
    """Stages that sleep, a link that delays: near the simulated makespan, unless messages are waited for."""
    forward, backward, link = 0.03, 0.06, 0.015
    medians = {}
    with RankPool(4) as pool:
        for overlap in (True, False):
            config = divided(4, "1f1b", overlap_p2p_comm=overlap, untie_embeddings_and_output_weights=True)
            by_rank = pool.run(f"{FAULTY}:step_seconds", config, 8, (forward, backward, link), 3)
            medians[overlap] = sorted(map(max, zip(*by_rank, strict=True)))[1]
    costs = Costs(forward, backward / 2, backward / 2, communication=link)
    makespan = simulate(schedule_for(config, 8), costs).makespan
    print(f"makespan {makespan:.3f} s, measured {medians[True]:.3f} s, without overlap {medians[False]:.3f} s")
    assert makespan <= medians[True] <= 1.1 * makespan
    assert medians[False] > 1.1 * makespan


# Between messages.


MISSED = {
    "write": "the result of writing from rank 0",
    "gather": "the arrays of all ranks of a model",
    "say": "what every rank has found",
}


def test_a_rank_that_dies_between_messages_is_missed_by_name(monkeypatch):
    """While it writes a checkpoint, or before all ranks tell each other something."""
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", ANSWER)
    with RankPool(2) as pool:
        for how, what in MISSED.items():
            message = (
                rf"rank 0: died with exit code 7.*\nrank 1: PipelineError: rank 1: expected {what}, but it did not"
            )
            with pytest.raises(RankError, match=message):
                pool.run(f"{FAULTY}:meet_without_first", how)


def test_an_error_of_a_rank_does_not_abort_it():
    """The thread that watches for the parent's end reads on while the interpreter ends."""
    script = "import time, parity.cli.processes as p\np.end_with_parent()\ntime.sleep(0.5)\nraise ValueError('its own')"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, CHILD: "1"},
    )
    assert process.stdin is not None
    assert process.stderr is not None
    with process.stdin, process.stderr:
        errors = process.stderr.read()
    assert process.wait() == 1, errors
    assert errors.endswith("ValueError: its own\n")

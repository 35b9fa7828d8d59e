"""What goes wrong between ranks ends every rank, in time, with an error that names it; nothing is left behind."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import reference_torch.rank_pool as rank_pool
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import Costs, simulate
from parity.cli.processes import CHILD
from reference_torch.rank_pool import RankError, RankPool
from tests.faults.messages import Fault
from tests.pipeline.jobs import Case, Outcome, undivided_outcome
from tests.pipeline.support import JOBS, check, check_gradients, divided

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


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.02)


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
        expected = undivided_outcome(scenario.others.get(3, scenario.case)).reports
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
    expected = undivided_outcome(scenario.case, 4 // scenario.case.config.pipeline_model_parallel_size)
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
        check_gradients([part.outcome for part in reports.values()], undivided_outcome(CASE).gradients)
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


# The pool.


def test_ranks_answer_in_order_and_stay():
    with RankPool(3) as pool:
        assert pool.run(f"{FAULTY}:rank_number") == [0, 1, 2]
        pids = pool.process_ids()
        assert pool.run(f"{FAULTY}:misbehave", "nothing", 0) == [0, 1, 2]
        assert pool.process_ids() == pids
        assert not any(map(gone, pids))
    wait_until_gone(pids)


def test_ranks_keep_what_they_are_given_to_hold():
    with RankPool(2) as pool:
        assert pool.hold(f"{FAULTY}:Held", 10) is None
        assert pool.call("add", 5) == [15, 16]
        assert pool.run(f"{FAULTY}:rank_number") == [0, 1]
        assert pool.call("add", 5) == [20, 21]
        with pytest.raises(RankError, match=r"has no attribute 'subtract'"):
            pool.call("subtract", 5)


MISBEHAVIOUR = {
    "raise": r"rank 1: ValueError: of rank 1\nTraceback",
    "exit": r"rank 1: died with exit code 7",
    "kill": r"rank 1: died with exit code -9",
    "hang": r"^rank 1: no answer in 1 s$",
    "unpicklable": r"rank 1: .*[Pp]ickle",
}


def test_what_a_rank_does_instead_of_answering_reaches_the_caller():
    """Each time all ranks are gone, and the next call has new ones."""
    with RankPool(2) as pool:
        for how, message in MISBEHAVIOUR.items():
            assert pool.run(f"{FAULTY}:rank_number") == [0, 1]
            pids = pool.process_ids()
            with pytest.raises(RankError, match=message):
                pool.run(f"{FAULTY}:misbehave", how, 1, timeout=1.0 if how == "hang" else None)
            wait_until_gone(pids)
        with pytest.raises(RankError, match="has no attribute 'nowhere'"):
            pool.run(f"{FAULTY}:nowhere")


def test_ranks_and_caller_have_their_own_tensors():
    x = torch.ones(3)
    with RankPool(2) as pool:
        assert [y.tolist() for y in pool.run(f"{FAULTY}:double", x)] == [[2.0] * 3] * 2
    assert x.tolist() == [1.0] * 3


class OnlyHere:
    """A class that this process finds under a name that no rank can import."""


def test_an_argument_that_a_rank_cannot_read_is_its_error(monkeypatch):
    """As one of a class that was defined in a notebook."""
    monkeypatch.setattr(OnlyHere, "__module__", "only_here")
    monkeypatch.setitem(sys.modules, "only_here", SimpleNamespace(OnlyHere=OnlyHere))
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match="rank 0: ModuleNotFoundError: No module named 'only_here'"),
    ):
        pool.run(f"{FAULTY}:double", OnlyHere())


def test_an_answer_that_cannot_be_taken_leaves_none_behind():
    """Those of the other ranks would be taken for answers to the next call."""
    with RankPool(2) as pool:
        pool.hold(f"{FAULTY}:Held", 10)
        pids = pool.process_ids()
        with pytest.raises(ValueError, match=r"invalid literal for int.*'unreadable'"):
            pool.run(f"{FAULTY}:misbehave", "unreadable", 0)
        wait_until_gone(pids)
        pool.hold(f"{FAULTY}:Held", 10)
        assert pool.call("add", 5) == [15, 16]


def test_a_rank_that_died_between_two_calls_is_named():
    with RankPool(2) as pool:
        pool.run(f"{FAULTY}:rank_number")
        pids = pool.process_ids()
        os.kill(pids[1], signal.SIGKILL)
        wait_until_gone(pids[1:])
        with pytest.raises(RankError, match="rank 1: died with exit code -9"):
            pool.run(f"{FAULTY}:rank_number")
        wait_until_gone(pids)
        assert pool.run(f"{FAULTY}:rank_number") == [0, 1]


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
            message = rf"rank 0: died with exit code 7\nrank 1: PipelineError: rank 1: expected {what}, but it did not"
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


def test_ranks_end_with_the_process_that_made_them(tmp_path):
    """Killed, so that it cannot end them itself."""
    path = tmp_path / "pids"
    script = (
        f"if __name__ == '__main__':\n    import tests.pipeline.fault_jobs as j\n    j.keep_a_pool({str(path)!r})\n"
    )
    (tmp_path / "keeper.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    keeper = subprocess.Popen([sys.executable, str(tmp_path / "keeper.py")], env=environment)
    try:
        end = time.monotonic() + 60.0
        while not path.exists():
            assert keeper.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        pids = [int(pid) for pid in path.read_text().split()]
        assert len(pids) == 2
        assert not any(map(gone, pids))
    finally:
        keeper.kill()
        keeper.wait()
    wait_until_gone(pids)

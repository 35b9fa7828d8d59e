"""The fault injection finds what it looks for: cases that hang, end otherwise, or leave processes behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults import runner
from tests.faults.cases import CASES
from tests.faults.faults import Broken
from tests.faults.runs import MARK, Case, Workspace, marked

pytestmark = pytest.mark.multiprocess
HANG = "import time; time.sleep(600)"


def fine(workspace: Workspace) -> None:
    workspace.note("nothing happened")


def unexpected(workspace: Workspace) -> None:
    workspace.note("seen before")
    workspace.expect(1 + 1 == 3, "1 + 1: expected 3, got 2")


def hangs(workspace: Workspace) -> None:
    time.sleep(600)


def dies(workspace: Workspace) -> None:
    os._exit(3)


def raises(workspace: Workspace) -> None:
    raise KeyError("a mistake in the case")


def start(workspace: Workspace, script: str) -> subprocess.Popen:
    """In a session of its own, as ranks are."""
    return subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, MARK: workspace.mark}, start_new_session=True
    )


def leaves_a_process(workspace: Workspace) -> None:
    start(workspace, HANG)


def leaves_a_grandchild(workspace: Workspace) -> None:
    """Its parent is gone when the case is over."""
    child = start(workspace, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HANG!r}])")
    workspace.wait_until(lambda: child.poll() is not None, "the end of the child")


def waits_for_ever(workspace: Workspace) -> None:
    """For a program, by the workspace's own means."""
    child = start(workspace, HANG)
    workspace.wait_until(lambda: child.poll() is not None, "the end of the child")


def case_of(run, deadline: float = 60.0) -> Case:
    return Case(run.__name__, "torch", "", run, deadline)


@pytest.fixture
def perform(tmp_path):
    """Run a case; nothing with its mark is left."""

    def run(case: Case) -> runner.Result:
        result = runner.perform(case, tmp_path / "case", tmp_path)
        assert not marked(f"{os.getpid()}-case")
        assert not (tmp_path / "case").exists()
        return result

    return run


def test_what_is_as_expected_is_no_failure(perform):
    result = perform(case_of(fine))
    assert (result.failure, result.summary) == (None, "nothing happened")


def test_what_is_not_as_expected_keeps_what_was_seen(perform):
    result = perform(case_of(unexpected))
    assert (result.failure, result.summary) == ("1 + 1: expected 3, got 2", "seen before")


def test_a_case_that_hangs_is_a_failure_within_its_deadline(perform, monkeypatch):
    monkeypatch.setattr(runner, "SLACK", 2.0)
    result = perform(case_of(hangs, 1.0))
    assert result.failure == "overdue: no answer from the case in 3 s"
    assert result.seconds < 10.0


def test_a_program_that_hangs_is_a_failure_and_is_killed(perform):
    result = perform(case_of(waits_for_ever, 2.0))
    assert str(result.failure).startswith(
        "overdue: the end of the child did not come to pass; left behind: 1 processes"
    )
    assert result.seconds < 15.0


@pytest.mark.parametrize("run", [leaves_a_process, leaves_a_grandchild])
def test_a_process_left_behind_is_a_failure_and_is_killed(run, perform):
    assert perform(case_of(run)).failure == "as expected, but; left behind: 1 processes"


def test_mistakes_in_a_case_are_failures(perform):
    assert "KeyError: 'a mistake in the case'" in str(perform(case_of(raises)).failure)
    assert perform(case_of(dies)).failure == "the case's own process died"


def test_exit_code_says_whether_all_was_as_expected(capsys):
    good, bad = case_of(fine), case_of(unexpected)
    assert runner.main([], [good, good], layouts=()) == 0
    assert runner.main([], [good, bad], layouts=()) == 1
    assert runner.main(["fine"], [good, bad], layouts=()) == 0
    assert runner.main(["nothing", "like", "it"], [good, bad], layouts=()) == 2
    printed = capsys.readouterr()
    assert "1 of 2 cases as expected" in printed.out
    assert "NO: 1 + 1: expected 3, got 2" in re.sub(r"\s+", " ", printed.out)
    assert "faults: expected words of a case's name, got 'nothing like it'" in printed.err


def test_page_and_results_have_every_case_and_no_other():
    names = [(case.name, case.layout) for case in CASES]
    assert len(set(names)) == len(names)
    results = json.loads(runner.RESULT.read_text())["cases"]
    assert [(result["name"], result["where"]) for result in results] == names
    assert len({(case.name, case.expected) for case in CASES}) == len({case.name for case in CASES})
    rows = [line.split(" | ") for line in runner.printed(runner.PAGE.read_text()).splitlines()[4:]]
    assert [(row[0].removeprefix("| "), layout) for row in rows for layout in row[1].split("; ")] == names
    assert [row[2] for row in rows] == list({case.name: case.expected for case in CASES}.values())
    for row in rows:
        outcomes = [result["as_expected"] for result in results if f"| {result['name']}" == row[0]]
        assert row[-1] == ("yes |" if all(outcomes) else "**no** |")


def test_page_shows_what_was_observed():
    observed = runner.Observed(
        [{"exit code": 1, "seconds": 2.34, "since": "fault", "error": "x" * 300, "errors": []}], ["resumed"]
    )
    result = runner.Result(case_of(fine), observed, "no", 5.0)
    assert result.summary == f"exit code 1, gone 2.3 s after the fault, `{'x' * runner.LONGEST}...`; resumed"
    seen = {"date": "2026-01-02T03", "machine": "m", "python": "3", "versions": {"torch": "2"}}
    table = runner.markdown([result], {"environment": seen, "seconds": 5.0})
    assert table.startswith("0 of 1 cases as expected, in 5 s; 2026-01-02, m, Python 3, torch 2.\n")
    assert table.endswith(" | **no** |\n")


def broken_run(says: str, workspace: Workspace) -> None:
    """A run of the program itself, struck in its tenth step, compared with one that nothing befell."""
    workspace.train(fault=Broken("out of memory", 9)).expect_end(2, says)
    workspace.expect_checkpoint()


@pytest.mark.parametrize(("says", "failures"), [("could not allocate", 0), ("something else", 1)])
def test_a_real_run_is_broken_and_judged(says, failures, tmp_path):
    case = Case("out of memory", "torch", "", partial(broken_run, says))
    results = runner.run_all([case], tmp_path, Console(quiet=True))
    assert [result.failure is None for result in results] == [not failures]
    assert not failures or "expected lines like ['something else']" in str(results[0].failure)


def test_a_checkpoint_that_is_not_the_uninterrupted_runs_is_found_out(tmp_path):
    results = runner.run_all([Case("changed", "torch", "", changed_run)], tmp_path, Console(quiet=True))
    assert results[0].failure == "checkpoint of step 12: not the uninterrupted run's"


def changed_run(workspace: Workspace) -> None:
    """Goes on from a checkpoint in which one number is another, checksum and all."""
    from diptych.plans.checkpoint import list_checkpoints, read_checkpoint, write_checkpoint

    run = workspace.ended_run(12)
    last = read_checkpoint(run)
    for path in list_checkpoints(run):
        path.unlink()
    last.arrays[next(iter(last.arrays))].reshape(-1)[0] += 1e-3
    write_checkpoint(run, last)
    workspace.expect_equal_end()


def one_of_each() -> list[Case]:
    """Of cases of one name the one whose layout was taken least, so that every layout is among them."""
    named: dict[str, list[Case]] = {}
    for case in CASES:
        named.setdefault(case.name, []).append(case)
    taken: Counter[str] = Counter()
    chosen = []
    for cases in sorted(named.values(), key=len):
        chosen.append(min(cases, key=lambda case: taken[case.layout]))
        taken[chosen[-1].layout] += 1
    return chosen


def test_one_of_each_is_of_every_layout():
    assert len({case.name for case in one_of_each()}) == len({case.name for case in CASES}) == len(one_of_each())
    assert {case.layout for case in one_of_each()} == {case.layout for case in CASES}


@pytest.mark.slow
@pytest.mark.alone  # judges how soon processes are gone
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("third", [0, 1, 2])
def test_every_case_is_as_expected(third, tmp_path):
    """In one layout; make faults runs all, and commits what came of them."""
    cases = one_of_each()[third::3]
    results = runner.run_all(cases, tmp_path, Console())
    assert len(results) == len(cases)
    failures = {f"{result.case.name} ({result.case.layout})": result.failure for result in results if result.failure}
    assert not failures


def test_make_runs_it():
    makefile = (Path(runner.ROOT) / "Makefile").read_text()
    assert re.search(r"^faults: .*\n\t\$\(BIN\)/python -m tests\.faults$", makefile, re.MULTILINE)


@pytest.mark.slow
def test_the_command_runs_a_case():
    """A case runs in a process of its own, which cannot import anything from __main__."""
    command = [sys.executable, "-m", "tests.faults", "processes: three for two stages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=runner.ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 cases as expected" in done.stdout

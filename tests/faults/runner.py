"""Runner of the fault-injection tests: training runs that are broken on purpose, and their results.

Every case runs the real program, with real processes, in a process of its own that has a deadline: a case that hangs is
a failure, and so is one that leaves processes behind. Ends with exit code 1 if any case is not as expected.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.faults.cases import CASES
from tests.faults.runs import LAYOUTS, ROOT, STEPS, TIMEOUT, Case, Observed, Unexpected, Workspace, marked

PAGE = ROOT / "docs" / "fault_injection.md"
RESULT = ROOT / "benchmarks" / "results" / "fault_injection.json"
BEGIN, END = "<!-- table: python -m tests.faults -->\n", "<!-- end of table -->\n"
SLACK = 10.0
"""Seconds beyond its deadline that a case has to say so itself."""
AT_ONCE = 3
"""Cases side by side: much of each is waiting."""
LONGEST = 150
"""Characters of a message on the console; the JSON file has all."""


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    case: Case
    observed: Observed
    failure: str | None
    """None: as expected."""
    seconds: float

    @property
    def summary(self) -> str:
        """What was observed, in a line."""
        parts = [_program_words(program) for program in self.observed.programs[-1:]]
        if (count := len(self.observed.programs)) > 1:
            parts = [f"{count} times: {parts[0]}"]
        return "; ".join([*parts, *self.observed.notes]) or "-"


def _program_words(program: dict[str, Any]) -> str:
    error = program["error"]
    shortened = error if len(error) <= LONGEST else error[:LONGEST] + "..."
    words = f"exit code {program['exit code']}, gone {program['seconds']:.1f} s after the {program['since']}"
    return words + (f", `{shortened}`" if shortened else "")


def main(arguments: Sequence[str], cases: Sequence[Case] = CASES, layouts: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for.

    Returns:
        1 if any was not as expected, else 0.
    """
    console, words = Console(), " ".join(arguments)
    chosen = [case for case in cases if words in f"{case.name} ({case.layout})"]
    if not chosen:
        print(
            f"faults: expected words of a case's name, got {words!r}; docs/fault_injection.md has them", file=sys.stderr
        )
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        results = run_all(chosen, Path(folder), console, layouts)
    seconds = time.monotonic() - begin
    show(console, results)
    failures = [result for result in results if result.failure]
    console.print(f"{len(results) - len(failures)} of {len(results)} cases as expected, in {seconds:.0f} s")
    if cases is CASES and not words:
        write(results, seconds)
        console.print(f"written: {RESULT.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    return 1 if failures else 0


def run_all(
    cases: Sequence[Case], folder: Path, console: Console, layouts: Sequence[str] | None = None
) -> list[Result]:
    """Uninterrupted runs first, then the cases, in order of the list."""
    references = folder / "references"
    references.mkdir()
    whole = [
        Case("uninterrupted", layout, "", uninterrupted)
        for layout in (layouts if layouts is not None else dict.fromkeys(case.layout for case in cases))
    ]
    stopped = threading.Event()
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(AT_ONCE) as threads:
        task = progress.add_task("faults", total=len(whole) + len(cases))

        def all_of(some: Sequence[Case], prefix: str) -> list[Result]:
            futures = {
                threads.submit(perform, case, folder / f"{prefix}{number}", references, stopped): number
                for number, case in enumerate(some)
            }
            found: dict[int, Result] = {}
            for future in as_completed(futures):
                result = found[futures[future]] = future.result()
                outcome = "as expected" if result.failure is None else f"NOT as expected: {result.failure}"
                name = f"{result.case.name} ({result.case.layout})"
                progress.console.print(
                    f"{name}: {outcome}, {result.seconds:.1f} s", markup=False, highlight=False, soft_wrap=True
                )
                progress.advance(task)
            return [found[number] for number in range(len(some))]

        try:
            return [*(run for run in all_of(whole, "whole") if run.failure), *all_of(cases, "case")]
        finally:  # interrupted: what runs ends at once, and what waits never starts
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)


def uninterrupted(workspace: Workspace) -> None:
    """A run that nothing befalls, kept for comparison."""
    program = workspace.train()
    program.expect_end(0, strikes=False)
    workspace.expect(f"saved: run/step_{STEPS:08d}.safetensors" in program.output, program.output)
    shutil.copytree(workspace.folder / "run", workspace.references / workspace.layout)


def perform(case: Case, folder: Path, references: Path, stopped: threading.Event | None = None) -> Result:
    """One case in a process of its own, until its deadline or until stopped; nothing it has started is left then."""
    folder.mkdir()
    begin, mark = time.monotonic(), f"{os.getpid()}-{folder.name}"
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(case, folder, references, mark, theirs), daemon=True)
    process.start()
    theirs.close()
    observed, failure = Observed(), f"overdue: no answer from the case in {case.deadline + SLACK:g} s"
    end = begin + case.deadline + SLACK
    try:
        while not (answered := ours.poll(0.2)) and time.monotonic() < end and not (stopped and stopped.is_set()):
            pass
        if answered:
            observed, failure = ours.recv()
    except EOFError:
        failure = "the case's own process died"
    process.kill()
    process.join()
    if left := end_all(mark):
        failure = f"{failure or 'as expected, but'}; left behind: {left} processes"
    shutil.rmtree(folder, ignore_errors=True)
    return Result(case, observed, failure, time.monotonic() - begin)


def end_all(mark: str) -> int:
    """Kill every process with the mark, and wait until they are gone; how many there were."""
    killed: set[int] = set()
    end = time.monotonic() + SLACK
    while (found := marked(mark)) and time.monotonic() < end:
        killed |= {*found}
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
    return len(killed)


def _serve(case: Case, folder: Path, references: Path, mark: str, answer: Connection) -> None:
    """Run a case and say what came of it."""
    workspace, failure = Workspace(case.layout, folder, references, case.deadline, mark), None
    try:
        case.run(workspace)
    except Unexpected as error:
        failure = str(error)
    except Exception:  # whatever it is: of the tests themselves, and a failure
        failure = traceback.format_exc()
    answer.send((workspace.observed, failure))


def show(console: Console, results: Sequence[Result]) -> None:
    """The table, for those who watch."""
    table = Table(box=None, title="fault injection", title_justify="left", pad_edge=False)
    for heading in ("case", "where", "observed", "as expected"):
        table.add_column(heading, overflow="fold")
    for result in results:
        outcome = "yes" if result.failure is None else f"NO: {result.failure}"
        table.add_row(*map(_escaped, (result.case.name, result.case.layout, result.summary, outcome)))
    console.print(table)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def write(results: Sequence[Result], seconds: float) -> None:
    """The JSON file and the table of the page."""
    from parity.report import environment

    content = {
        "environment": environment(),
        "pipeline_timeout": TIMEOUT,
        "seconds": seconds,
        "flags": LAYOUTS,
        "cases": [
            {
                "name": result.case.name,
                "where": result.case.layout,
                "expected": result.case.expected,
                "observed": asdict(result.observed),
                "as_expected": result.failure is None,
                "failure": result.failure,
                "seconds": result.seconds,
            }
            for result in results
        ],
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + printed(page) + END, BEGIN + markdown(results, content) + END))


def markdown(results: Sequence[Result], content: dict[str, Any]) -> str:
    """Return the page's table, with one row for each name of a case."""
    seen = content["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in seen["versions"].items())
    good = sum(result.failure is None for result in results)
    lines = [
        f"{good} of {len(results)} cases as expected, in {content['seconds']:.0f} s; {seen['date'][:10]}, "
        f"{seen['machine']}, Python {seen['python']}, {versions}.\n",
        "| case | where | expected | exit code | ended after, s | as expected |",
        "|---|---|---|---|---|---|",
    ]
    named: dict[str, list[Result]] = {}
    for result in results:
        named.setdefault(result.case.name, []).append(result)
    for name, group in named.items():
        programs = [program for result in group for program in result.observed.programs]
        codes = ", ".join(dict.fromkeys(str(program["exit code"]) for program in programs))
        seconds = f"{max(program['seconds'] for program in programs):.1f}" if programs else ""
        outcome = "yes" if all(result.failure is None for result in group) else "**no**"
        where = "; ".join(result.case.layout for result in group)
        cells = (name, where, group[0].case.expected, codes, seconds, outcome)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def printed(page: str) -> str:
    """The table in the page."""
    start = page.index(BEGIN) + len(BEGIN)
    return page[start : page.index(END, start)]

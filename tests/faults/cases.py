"""The cases: what is broken, where, and what has to come of it.

A case's function breaks one program in its workspace and checks everything it expects of it; see tests/faults/runs.py.
"""

import re
import signal
from collections.abc import Callable, Iterable
from functools import partial

from diptych.plans.checkpoint import read_checkpoint
from tests.faults.damage import (
    all_deleted,
    cut,
    damaged,
    empty,
    flip,
    folder_gone,
    full_disk,
    newest_deleted,
    other_model,
    other_text,
    read_only,
)
from tests.faults.faults import MOMENTS, Broken
from tests.faults.runs import AT, FAILED, KILLED, REFUSED, STAGES, TIMEOUT, Case, Workspace

ONE, PIPELINE, SHARED = ("torch", "jax"), ("torch, 2 stages", "jax, 2 stages"), "torch, 2 context ranks"
REPLICAS = "torch, 2 stages x 2 replicas"
RESUMES = "resumed run bitwise equal"
NON_FINITE = rf"step {AT}: expected a finite loss and gradient norm, got loss nan"


def cases(
    name: str, layouts: Iterable[str], expected: str, run: Callable[[Workspace], None], deadline: float = Case.deadline
) -> list[Case]:
    """The same in several layouts."""
    return [Case(name, layout, expected, run, deadline) for layout in layouts]


def ranks_say(*ranks: int) -> list[str]:
    """Patterns: each of these ranks names what it missed."""
    return [rf"^diptych: rank {rank}[,:].* expected " for rank in ranks]


def broken(
    workspace: Workspace, fault: Broken, code: int, *says: str, resumes: bool = True, traceback: bool = False
) -> None:
    """A run with a fault ends as it should, leaves its last checkpoint, and can go on from there."""
    workspace.train(fault=fault).expect_end(code, *says, traceback=traceback)
    workspace.expect_checkpoint()
    if resumes:
        workspace.resume()


# Processes that are killed, stopped, or terminated.


def killed_rank(workspace: Workspace) -> None:
    """Of four: the other stage, the other replica and the one in neither all have to notice."""
    workspace.train(fault=Broken("killed", AT, rank=1)).expect_end(
        FAILED, r"expected .* from rank 1", "rank 1 was ended by SIGKILL", *ranks_say(0)
    )
    workspace.expect_checkpoint()
    workspace.resume()


def killed_program(workspace: Workspace) -> None:
    """The only process; nobody is left to say anything."""
    broken(workspace, Broken("killed", AT), KILLED)


def killed_parent(workspace: Workspace) -> None:
    """While a rank computes."""
    program = workspace.train(fault=Broken("slow", AT, rank=0, seconds=2.0))
    program.signal(signal.SIGKILL)
    program.expect_end(KILLED, within=2.0)
    workspace.expect_checkpoint()
    workspace.resume()


def killed_while_saving(workspace: Workspace) -> None:
    """One run killed again and again, each time at a later moment of writing a checkpoint."""
    run, steps, alone = workspace.folder / "run", (4, 4, 6, 6, 6, 8), workspace.layout != STAGES
    for moment, step in zip(MOMENTS, steps, strict=True):
        flags = ["--save-interval", "2", *(["--resume"] if run.exists() else [])]
        fault = Broken("killed", step, rank=None if alone else 0, moment=moment)
        workspace.train(*flags, fault=fault).expect_end(KILLED if alone else FAILED)
        found, expected = read_checkpoint(run).step, step if moment in MOMENTS[4:] else step - 2
        workspace.expect(found == expected, f"{moment}: newest checkpoint: expected {expected}, got {found}")
    workspace.resume("--save-interval", "2", step=steps[-1])


def stopped_rank(workspace: Workspace) -> None:
    """It is there and does not answer."""
    broken(
        workspace, Broken("stopped", AT, rank=1), FAILED, *ranks_say(0), "rank 1 did not end by itself, and was stopped"
    )


def terminated(workspace: Workspace) -> None:
    """In the middle of a step, which is finished first."""
    rank = 0 if workspace.layout == STAGES else None
    program = workspace.train(fault=Broken("slow", AT, rank=rank, seconds=1.0))
    program.signal(signal.SIGTERM)
    program.expect_end(0)
    workspace.expect(f"stopped by SIGTERM after step {AT}" in program.output, f"output: {program.output}")
    workspace.resume(step=AT + 1)


# Numbers that are none.


def nan_parameter(workspace: Workspace) -> None:
    """On whichever rank holds the last parameter."""
    refused_by_all(workspace, Broken("parameter", AT))


def refused_by_all(workspace: Workspace, fault: Broken) -> None:
    """Every process says that the step's numbers are none."""
    broken(workspace, fault, FAILED, NON_FINITE)
    expected = 2 if workspace.layout in (STAGES, SHARED) else 1
    lines = workspace.observed.programs[0]["errors"]
    found = sum(bool(re.search(NON_FINITE, line)) for line in lines)
    workspace.expect(found == expected, f"refusals: expected {expected}, got {found}: {lines}")


def diverging(workspace: Workspace) -> None:
    """A learning rate so large that parameters overflow."""
    program = workspace.train("--lr", "1e38", "--min-lr", "0", "--lr-warmup-iters", "0", "--save-interval", "1")
    program.expect_end(FAILED, r"step \d+: expected a finite loss and gradient norm, got loss (nan|inf)", strikes=False)
    refused = int(program.errors.split("step ")[1].split(":")[0])
    step = read_checkpoint(workspace.folder / "run").step
    workspace.expect(step == refused, f"newest checkpoint: expected that before step {refused}, got {step}")


def in_message(fault: Broken, code: int, says: tuple[str, ...], workspace: Workspace) -> None:
    """One message of one step is not what it should be."""
    broken(workspace, fault, code, *says, resumes=fault.kind in ("dropped", "duplicated") and not fault.in_order)


def late_message(workspace: Workspace) -> None:
    """Within the timeout: nothing comes of it."""
    workspace.train(fault=Broken("delayed", AT, rank=0, action="0F1", seconds=TIMEOUT / 3)).expect_end(0)
    workspace.expect_equal_end()
    workspace.note("the run is bitwise equal to an uninterrupted one")


# A rank's own exceptions.


def out_of_memory(workspace: Workspace) -> None:
    """Where several ranks run, it is the second stage's."""
    says = ["expected a run that fits this machine's memory, got: could not allocate"]
    several = workspace.layout == STAGES
    broken(workspace, Broken("out of memory", AT, rank=1 if several else None), REFUSED, *says, *ranks_say(0) * several)


def bad_batch(workspace: Workspace) -> None:
    """A token beyond the vocabulary; where several ranks run, the first stage's, in JAX it becomes NaN."""
    several = workspace.layout == STAGES
    says = [NON_FINITE] if workspace.backend == "jax" else ["IndexError: index out of range", *ranks_say(1) * several]
    broken(
        workspace,
        Broken("bad batch", AT, rank=0 if several else None),
        FAILED,
        *says,
        traceback=workspace.backend == "torch",
    )


# Processes that are not there.


A_MULTIPLE = "--nproc: expected a multiple of --pipeline-model-parallel-size=2"


def wrong_number(flags: tuple[str, ...], says: str, workspace: Workspace) -> None:
    """Refused before any process is started."""
    workspace.train(*flags).expect_end(REFUSED, says, strikes=False)


def by_torchrun(count: int, workspace: Workspace) -> None:
    """Of another number of processes than two; one alone starts what it needs itself."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "parity.cli", "train"]
    program = workspace.train(launcher=command)
    if count == 1:
        program.expect_end(0, strikes=False)
        workspace.expect_equal_end()
        workspace.note("the run is bitwise equal to an uninterrupted one")
    else:
        says = f"{A_MULTIPLE} processes, got {count}"
        program.expect_end(FAILED, says, strikes=False, traceback=True)  # torchrun's own, below


# Ranks that share sequences.


def exchange_killed(workspace: Workspace) -> None:
    """In the middle of passing a state on."""
    fault = Broken("exchange killed", AT, rank=0)
    broken(workspace, fault, FAILED, *ranks_say(1), "rank 0 was ended by SIGKILL")


def exchange_nan(workspace: Workspace) -> None:
    """What is sent is not a number."""
    refused_by_all(workspace, Broken("exchange not a number", AT, rank=0))


MESSAGES = [
    (
        "dropped, an activation",
        Broken("dropped", AT, 0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    (
        "dropped, a gradient",
        Broken("dropped", AT, 1, action="1B2"),
        (r"rank 0, step 9: expected RECV 1B2 from rank 1",),
    ),
    (
        "delayed beyond the timeout",
        Broken("delayed", AT, 0, TIMEOUT + 2.0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    ("duplicated", Broken("duplicated", AT, 0, action="0F1"), (r"rank 0, step 9: expected SEND 0F1 to rank 1",)),
    (
        "longer than expected",
        Broken("longer", AT, 0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    (
        "shorter than expected",
        Broken("shorter", AT, 0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    (
        "longer than it says",
        Broken("longer than it says", AT, 0, action="0F1"),
        (r"rank 1 was ended by SIGABRT", r"rank 0, step 9: expected"),
    ),
    (
        "named as the next microbatch's",
        Broken("named as the next microbatch's", AT, 0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    (
        "of the step before",
        Broken("late of a step", AT, 0, action="0F1"),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0",),
    ),
    ("not a number", Broken("not a number", AT, 0, action="0F1"), (NON_FINITE,)),
    (
        "dropped, in NCCL's order",
        Broken("dropped", AT, 0, action="0F1", in_order=True),
        (r"rank 1, step 9: expected RECV 0F1 from rank 0, got 0F2 of step 9",),
    ),
    (
        "duplicated, in NCCL's order",
        Broken("duplicated", AT, 0, action="0F1", in_order=True),
        (r"rank 1, step 9: expected RECV 0F2 from rank 0, got 0F1 of step 9",),
    ),
]
"""Name, fault, and what has to be said. Messages between pipeline ranks exist in PyTorch alone."""

ENDS = f"exit code 1; all processes end within the timeout ({TIMEOUT:g} s) and a few seconds; one names the message"
CASES: list[Case] = [
    *cases("kill -9: one rank, in a step", [REPLICAS], f"exit code 1; all ranks end; {RESUMES}", killed_rank),
    *cases("kill -9: the program, in a step", [*ONE, "jax, 2 stages"], f"{RESUMES}", killed_program),
    *cases("kill -9: the parent of the ranks", [STAGES], f"ranks end within 2 s; {RESUMES}", killed_parent),
    *cases(
        "kill -9: at six moments of saving",
        [*ONE, STAGES],
        f"newest checkpoint complete; {RESUMES}",
        killed_while_saving,
        deadline=3 * Case.deadline,  # seven programs, one after the other
    ),
    *cases("SIGSTOP: one rank hangs", [STAGES], f"exit code 1; the rank is named and ended; {RESUMES}", stopped_rank),
    *cases("SIGTERM", [*ONE, *PIPELINE], f"exit code 0; the step is finished and saved; {RESUMES}", terminated),
    *cases(
        "checkpoint: cut short",
        [*ONE, STAGES],
        f"exit code 2; one line with the remedy; after the remedy, {RESUMES}",
        partial(damaged, cut, "expected a whole checkpoint in run/step_00000012.safetensors"),
    ),
    *cases(
        "checkpoint: one bit flipped",
        ONE,
        "exit code 2; one line with the remedy",
        partial(damaged, flip, "expected run/step_00000012.safetensors unchanged, got another checksum"),
    ),
    *cases(
        "checkpoint: empty file",
        ONE,
        "exit code 2; one line with the remedy",
        partial(damaged, empty, "expected a whole checkpoint in run/step_00000012.safetensors"),
    ),
    *cases("checkpoint: of another model", ONE, "exit code 2; the setting is named", other_model),
    *cases("checkpoint: newest deleted", ONE, RESUMES, newest_deleted),
    *cases("checkpoint: all deleted", ONE, "exit code 2; the folder is named", all_deleted),
    *cases(
        "corpus changed between save and resume",
        ONE,
        f"exit code 2; the corpus is named; after its return, {RESUMES}",
        other_text,
    ),
    *cases("disk: full while saving", [*ONE, STAGES], f"exit code 2; earlier checkpoints stay; {RESUMES}", full_disk),
    *cases("disk: folder is read-only", ONE, "exit code 2 before the first step", read_only),
    *cases(
        "disk: folder goes away in a run",
        [*ONE, STAGES],
        f"exit code 1; the file is named; after its return, {RESUMES}",
        folder_gone,
    ),
    *cases(
        "NaN: in a parameter",
        [*ONE, *PIPELINE, "jax, 2 context ranks"],
        f"exit code 1; every rank rejects and names the step; the last checkpoint stays; {RESUMES}",
        nan_parameter,
    ),
    *cases("NaN: learning rate 1e38", ONE, "exit code 1; the step is rejected and named", diverging),
    *cases("message: delayed within the timeout", [STAGES], "run bitwise equal to an uninterrupted one", late_message),
    *(
        Case(f"message: {name}", STAGES, ENDS, partial(in_message, fault, FAILED, says))
        for name, fault, says in MESSAGES
    ),
    *cases("exception: out of memory", [*ONE, STAGES], f"exit code 2; all ranks end; {RESUMES}", out_of_memory),
    *cases("exception: a bad batch", [*ONE, STAGES], f"exit code 1; all ranks end; {RESUMES}", bad_batch),
    *cases(
        "processes: three for two stages",
        [STAGES],
        "exit code 2 before any process starts",
        partial(wrong_number, ("--nproc", "3"), f"{A_MULTIPLE} processes"),
    ),
    *cases(
        "processes: three devices for two stages",
        ["jax, 2 stages"],
        "exit code 2 before any process starts",
        partial(wrong_number, ("--nproc", "3"), f"{A_MULTIPLE} devices"),
    ),
    *cases(
        "processes: torchrun starts one for two stages",
        [STAGES],
        "the missing process is started; run bitwise equal to an uninterrupted one",
        partial(by_torchrun, 1),
    ),
    *cases(
        "processes: torchrun starts three for two stages",
        [STAGES],
        "torchrun's exit code 1; the number is named before the ranks join",
        partial(by_torchrun, 3),
    ),
    *cases(
        "context ranks: one killed in an exchange", [SHARED], f"exit code 1; all ranks end; {RESUMES}", exchange_killed
    ),
    *cases(
        "context ranks: NaN in an exchange",
        [SHARED],
        f"exit code 1; every rank rejects the step; {RESUMES}",
        exchange_nan,
    ),
]

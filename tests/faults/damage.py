"""Cases that damage what a run needs: checkpoints, the corpus, the disk."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from diptych.plans.checkpoint import list_checkpoints
from tests.faults.faults import Broken
from tests.faults.runs import AT, FAILED, REFUSED, STAGES, STEPS, Workspace


def cut(path: Path) -> None:
    """The last bytes are missing."""
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """One bit of a parameter."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    """Nothing in it."""
    path.write_bytes(b"")


def damaged(damage: Callable[[Path], None], says: str, workspace: Workspace) -> None:
    """Refused, and without it the run goes on from the one before."""
    run = workspace.ended_run(STEPS)
    path = list_checkpoints(run)[-1]
    damage(path)
    remedy = f"{says}.*; remove it to continue from the previous checkpoint"
    workspace.train("--resume").expect_end(REFUSED, remedy, strikes=False)
    path.unlink()
    if damage is cut:
        workspace.resume()


def other_model(workspace: Workspace) -> None:
    """Goes on with a run whose model was wider."""
    workspace.ended_run()
    says = "expected the settings of its run, got others: --hidden-size 16 in the checkpoint, 32 here"
    workspace.train("--resume", "--hidden-size", "32").expect_end(REFUSED, says, strikes=False)
    workspace.expect_checkpoint()


def other_text(workspace: Workspace) -> None:
    """A byte of the corpus has changed since."""
    workspace.ended_run()
    corpus = workspace.folder / "corpus.txt"
    right = corpus.read_text()
    corpus.write_text(right.replace("quick", "quack", 1))
    says = "expected the settings of its run, got others: corpus_digest '[0-9a-f]+' in the checkpoint, '[0-9a-f]+' here"
    workspace.train("--resume").expect_end(REFUSED, says, strikes=False)
    corpus.write_text(right)
    workspace.resume()


def newest_deleted(workspace: Workspace) -> None:
    """Goes on from the one before."""
    workspace.ended_run(STEPS)
    list_checkpoints(workspace.folder / "run")[-1].unlink()
    workspace.resume()


def all_deleted(workspace: Workspace) -> None:
    """Nothing to go on from."""
    run = workspace.ended_run(STEPS)
    for path in list_checkpoints(run):
        path.unlink()
    workspace.train("--resume").expect_end(REFUSED, r"expected step_\*.safetensors in run, got none", strikes=False)


def full_disk(workspace: Workspace) -> None:
    """A disk of its own with room for two checkpoints and some; what is on it is copied away when the run has ended."""
    size = 2 * list_checkpoints(workspace.references / workspace.layout)[-1].stat().st_size + 48 * 1024
    disk = workspace.folder / "disk"
    disk.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0:
        script = f'mount -t tmpfs -o size={size} faults disk && "$@"; code=$?; cp -r disk/run run; exit $code'
        prefix = ["unshare", "-rm", "sh", "-c", script, "sh"]
        program = workspace.train(run="disk/run", prefix=prefix)
        program.expect_end(REFUSED, "expected to write .* bytes to .*, got No space left on device", strikes=False)
    else:  # no disk can be made here: the kernel's limit on a file's size ends a write in its middle too
        workspace.note("ulimit -f instead of a disk")
        prefix = ["sh", "-c", f'ulimit -f {size // 3 // 512}; exec "$@"', "sh"]
        program = workspace.train(prefix=prefix)
        program.expect_end(REFUSED, "expected to write .* bytes to .*, got File too large", strikes=False)
    workspace.expect_checkpoint()
    workspace.resume()


def read_only(workspace: Workspace) -> None:
    """Found before time is spent. Root may write anywhere, unless it gives that up."""
    folder = workspace.folder / "closed"
    folder.mkdir(mode=0o555)
    prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    program = workspace.train(run="closed", prefix=prefix)
    program.expect_end(REFUSED, "closed: expected a folder to write to, got .*Permission denied", strikes=False)
    workspace.expect("step " not in program.output, "steps were taken first")


def folder_gone(workspace: Workspace) -> None:
    """As when a disk is taken away in the middle of a run."""
    program = workspace.train(fault=Broken("slow", AT, seconds=1.0, rank=0 if workspace.layout == STAGES else None))
    workspace.wait_until(lambda: program.struck is not None, "the step in which the folder goes")
    (workspace.folder / "run").rename(workspace.folder / "away")
    program.expect_end(FAILED, "No such file or directory: 'run/metrics.jsonl'")
    shutil.rmtree(workspace.folder / "run", ignore_errors=True)
    (workspace.folder / "away").rename(workspace.folder / "run")
    workspace.expect_checkpoint()
    workspace.resume()

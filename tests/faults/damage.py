"""Cases that damage what a run needs: checkpoints, the corpus, the disk."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from diptych.plans.checkpoint import list_checkpoints
from tests.faults.faults import Broken
from tests.faults.runs import AT, FAILED, REFUSED, STAGES, STEPS, Room


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


def damaged(damage: Callable[[Path], None], says: str, room: Room) -> None:
    """Refused, and without it the run goes on from the one before."""
    run = room.ended_run(STEPS)
    path = list_checkpoints(run)[-1]
    damage(path)
    remedy = f"{says}.*; remove it to continue from the previous checkpoint"
    room.train("--resume").expect_end(REFUSED, remedy, strikes=False)
    path.unlink()
    if damage is cut:
        room.resume()


def other_model(room: Room) -> None:
    """Goes on with a run whose model was wider."""
    room.ended_run()
    says = "expected the settings of its run, got others: --hidden-size 16 in the checkpoint, 32 here"
    room.train("--resume", "--hidden-size", "32").expect_end(REFUSED, says, strikes=False)
    room.expect_checkpoint()


def other_text(room: Room) -> None:
    """A byte of the corpus has changed since."""
    room.ended_run()
    corpus = room.folder / "corpus.txt"
    right = corpus.read_text()
    corpus.write_text(right.replace("quick", "quack", 1))
    says = "expected the settings of its run, got others: corpus_digest '[0-9a-f]+' in the checkpoint, '[0-9a-f]+' here"
    room.train("--resume").expect_end(REFUSED, says, strikes=False)
    corpus.write_text(right)
    room.resume()


def newest_deleted(room: Room) -> None:
    """Goes on from the one before."""
    room.ended_run(STEPS)
    list_checkpoints(room.folder / "run")[-1].unlink()
    room.resume()


def all_deleted(room: Room) -> None:
    """Nothing to go on from."""
    run = room.ended_run(STEPS)
    for path in list_checkpoints(run):
        path.unlink()
    room.train("--resume").expect_end(REFUSED, r"expected step_\*.safetensors in run, got none", strikes=False)


def full_disk(room: Room) -> None:
    """A disk of its own with room for two checkpoints and some; what is on it is copied away when the run has ended."""
    size = 2 * list_checkpoints(room.references / room.layout)[-1].stat().st_size + 48 * 1024
    disk = room.folder / "disk"
    disk.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0:
        script = f'mount -t tmpfs -o size={size} faults disk && "$@"; code=$?; cp -r disk/run run; exit $code'
        prefix = ["unshare", "-rm", "sh", "-c", script, "sh"]
        program = room.train(run="disk/run", prefix=prefix)
        program.expect_end(REFUSED, "expected to write .* bytes to .*, got No space left on device", strikes=False)
    else:  # no disk can be made here: the kernel's limit on a file's size ends a write in its middle too
        room.note("ulimit -f instead of a disk")
        prefix = ["sh", "-c", f'ulimit -f {size // 3 // 512}; exec "$@"', "sh"]
        program = room.train(prefix=prefix)
        program.expect_end(REFUSED, "expected to write .* bytes to .*, got File too large", strikes=False)
    room.expect_checkpoint()
    room.resume()


def read_only(room: Room) -> None:
    """Found before time is spent. Root may write anywhere, unless it gives that up."""
    folder = room.folder / "closed"
    folder.mkdir(mode=0o555)
    prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    program = room.train(run="closed", prefix=prefix)
    program.expect_end(REFUSED, "closed: expected a folder to write to, got .*Permission denied", strikes=False)
    room.expect("step " not in program.output, "steps were taken first")


def folder_gone(room: Room) -> None:
    """As when a disk is taken away in the middle of a run."""
    program = room.train(fault=Broken("slow", AT, seconds=1.0, rank=0 if room.layout == STAGES else None))
    room.wait_until(lambda: program.struck is not None, "the step in which the folder goes")
    (room.folder / "run").rename(room.folder / "away")
    program.expect_end(FAILED, "No such file or directory: 'run/metrics.jsonl'")
    shutil.rmtree(room.folder / "run", ignore_errors=True)
    (room.folder / "away").rename(room.folder / "run")
    room.expect_checkpoint()
    room.resume()

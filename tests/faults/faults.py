"""The ``diptych`` command with a fault in it, for tests/faults/runner.py.

    FAULTS_FAULT='{"kind": "killed", "rank": 1, "step": 9}' python -m tests.faults.faults train --nproc 2 ...

runs what ``diptych`` runs; its ranks run this module instead of reference_torch.train, and one of them does at one step
what the fault says. Everything else is the program's own.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diptych.plans import checkpoint
from diptych.plans.model.data import Batch, Corpus
from parity.cli import main as cli
from parity.cli.launch import is_one_of_several, rank
from parity.cli.processes import start_processes

FAULT, STRUCK = "FAULTS_FAULT", "FAULTS_STRUCK"
"""Environment: the fault as JSON, and a file for the moment it happened."""
BACKEND = "FAULTS_BACKEND"

BEYOND = 100_000
"""What a bad batch has too much of: no vocabulary has such a token."""
MOMENTS = (
    "opened",
    "half written",
    "written, not on the disk",
    "on the disk, not renamed",
    "renamed",
    "named on the disk",
)
"""Of writing a checkpoint, in order."""


@dataclass(frozen=True)
class Broken:
    """What is broken.

    Those of batches happen in the middle of a step: a rank asks for a microbatch's data when it begins with it.
    """

    kind: str
    step: int
    rank: int | None = None
    """The one that is struck; None: all, or the only one there is."""
    seconds: float = 0.0
    moment: str = ""
    """Of MOMENTS."""
    action: str = ""
    """A message's; see tests.faults.messages.Fault."""
    in_order: bool = False
    """Messages go as NCCL sends them."""

    @property
    def makes_wait(self) -> bool:
        """Whether ranks find out only by waiting."""
        return bool(self.action) or self.kind == "stopped"

    def environment(self, backend: str, struck: Path) -> dict[str, str]:
        """What tells the program."""
        return {FAULT: json.dumps(asdict(self)), STRUCK: str(struck), BACKEND: backend}


def strike() -> None:
    """Write down when it happened; of several ranks and times the first counts."""
    with contextlib.suppress(FileExistsError), open(os.environ[STRUCK], "x") as file:
        file.write(repr(time.monotonic()))


def install(fault: Broken) -> None:
    """Break this process."""
    if fault.action:
        _in_messages(fault)
    elif fault.moment:
        _in_saving(fault)
    elif fault.kind == "parameter":
        _in_parameters(fault)
    elif fault.kind.startswith("exchange"):
        _in_exchanges(fault)
    else:
        _in_batches(fault)


def _end() -> None:
    strike()
    os.kill(os.getpid(), signal.SIGKILL)


def _in_batches(fault: Broken) -> None:
    right, struck = Corpus.batch, []

    def batch(self: Corpus, step: int, *arguments: Any, **more: Any) -> Batch:
        whole = right(self, step, *arguments, **more)
        if step != fault.step or struck:
            return whole
        struck.append(step)
        strike()
        if fault.kind in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "out of memory":
            raise MemoryError("could not allocate 1,099,511,627,776 bytes")
        else:
            assert fault.kind == "bad batch", fault.kind
            return whole._replace(tokens=whole.tokens + BEYOND)
        return whole

    Corpus.batch = batch


def _in_messages(fault: Broken) -> None:
    import reference_torch.train
    from tests.faults.messages import Fault, Faulty, InOrder

    assert fault.rank is not None, "a message has a sender"
    kind: Any = InOrder if fault.in_order else Faulty
    kind.fault = Fault(fault.kind, fault.rank, fault.action, fault.seconds, fault.step)
    kind.strike = lambda self: strike()
    reference_torch.train.P2PCommunicator = kind


def _in_parameters(fault: Broken) -> None:
    """One value of the last parameter is not a number when the step begins; on whichever rank holds it."""
    import importlib

    trainer = importlib.import_module(f"{cli.PACKAGES[os.environ[BACKEND]]}.train").Trainer
    right = trainer.train_step

    def train_step(self: Any, step: int) -> Any:
        if step == fault.step:
            values = self.parameters()
            values[[*values][-1]].reshape(-1)[0] = float("nan")
            self.set_parameters(values)
            strike()
        return right(self, step)

    trainer.train_step = train_step


def _in_exchanges(fault: Broken) -> None:
    """What this rank sends of its state to the others that share its sequences."""
    from reference_torch.context_parallel import exchange

    right, right_batch, at = exchange._on_wire, Corpus.batch, []

    def batch(self: Corpus, step: int, *arguments: Any, **more: Any) -> Batch:
        at[:] = [step]
        return right_batch(self, step, *arguments, **more)

    def on_wire(part: Any, context: Any) -> Any:
        if at != [fault.step]:
            return right(part, context)
        if fault.kind == "exchange killed":
            _end()
        strike()
        return right(part, context) * float("nan")

    Corpus.batch, exchange._on_wire = batch, on_wire


def _in_saving(fault: Broken) -> None:
    """End the process at a moment of writing a checkpoint."""
    number = MOMENTS.index(fault.moment)
    write_through, flush_folder = checkpoint._write_through, checkpoint._flush_folder
    name = f"step_{fault.step:08d}.safetensors"

    def write(path: Path, content: bytes) -> None:
        if name not in path.name:
            write_through(path, content)
            return
        if number < 3:
            with path.open("wb") as file:
                file.write(content[: (0, len(content) // 2, len(content))[number]])
            _end()
        write_through(path, content)
        if number == 3:
            _end()

    def flush(folder: Path) -> None:
        if number == 4 and (folder / name).exists():
            _end()
        flush_folder(folder)
        if (folder / name).exists():
            _end()

    checkpoint._write_through, checkpoint._flush_folder = write, flush


def main() -> None:
    """As ``python -m parity.cli``."""
    fault = Broken(**json.loads(os.environ[FAULT]))
    ours: Callable[..., int] = partial(_start, fault)
    cli.start_processes = ours  # pyright: ignore[reportPrivateImportUsage]
    if not is_one_of_several():
        if "--nproc" not in sys.argv:  # else the ranks are struck
            install(fault)
        sys.exit(cli.main(sys.argv[1:]))
    if fault.rank in (None, rank()) or fault.action:  # every rank has the same communicator, which knows its rank
        install(fault)
    code = cli.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(fault: Broken, count: int, module: str, arguments: list[str], *times: float) -> int:
    return start_processes(count, "tests.faults.faults", arguments, *times)


if __name__ == "__main__":
    main()

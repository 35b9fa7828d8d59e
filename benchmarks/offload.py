"""Transfers, device memory and time of tensor offload, compared with its plan and with save_on_cpu of PyTorch.

    python -m benchmarks.offload              (make bench NAME=offload)

On a GPU, the benchmark measures bytes, waits, memory and time of a training step. Without a GPU, "device" and host are
the same memory, and only counts and bytes are printed. A second table measures the overlap of prefetch. It slows the
link down until the copy of a layer takes as long as its forward, and compares step times with the plan's prediction.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych.planner.offload_times import simulate_offload
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import OffloadPlan, Use, plan_offload, rank_layers, rank_uses
from parity.report import environment
from reference_torch.offload import TensorOffloadManager
from reference_torch.recompute import measure_memory
from reference_torch.transformer import GPTModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = TransformerConfig(
    hidden_size=2048 if DEVICE == "cuda" else 256,
    num_layers=16 if DEVICE == "cuda" else 8,
    num_attention_heads=16 if DEVICE == "cuda" else 4,
    seq_length=2048 if DEVICE == "cuda" else 256,
    use_flash_attn=True,
    bf16=DEVICE == "cuda",
)
BATCH = 4
STEPS = 5
AHEAD = range(5)
MIN_BYTES = 2**16
RESULT = Path(f"benchmarks/results/offload-{DEVICE}.json")
MIB = 2**20
MODES = {
    "parameters": {"parameters": True},
    "activations": {"parameters": False, "activations": True},
    "both": {"parameters": True, "activations": True},
}


@dataclass
class Row:
    """The measurements of one offload mode."""

    way: str
    ahead: int | None
    bytes_in: int
    bytes_out: int
    copies: int
    late: int | None
    parameter_peak: int | None
    """Peak bytes of offloaded layers on the device."""
    planned_peak: int | None
    saved: int
    """Bytes allocated by forward that are live when it ends."""
    seconds: float | None
    waited: float | None


class Step:
    """A model, an optimizer and a batch."""

    def __init__(self, **offload: Any) -> None:
        torch.manual_seed(0)
        self.model = GPTModel(CONFIG).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.seq_length + 1), device=DEVICE)
        self.manager = TensorOffloadManager(enabled=bool(offload), activation_min_bytes=MIN_BYTES, **offload)
        for number, layer in self.model.decoder.layers.items():
            self.manager.register_layer(int(number), layer)
        self.manager.offload_all_layers()

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        self.manager.expect(rank_uses(CONFIG, 1))
        return self.model(self.tokens[:, :-1], self.tokens[:, 1:])

    def finish(self, loss: torch.Tensor) -> None:
        """Run backward and the optimizer step."""
        loss.backward()
        self.manager.step(self.optimizer)

    def __call__(self) -> float:
        """Run a training step and return its seconds."""
        _synchronize()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.finish(self.forward())
        _synchronize()
        return time.perf_counter() - begin


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _counted_save_on_cpu(moved: list[int]) -> Iterator[None]:
    """Save activations on the CPU as PyTorch does; without a GPU, only count the bytes that it would copy."""

    def pack(tensor: torch.Tensor) -> Any:
        moved.append(tensor.nbytes)
        return (tensor.device, tensor.cpu()) if DEVICE == "cuda" else (tensor.device, tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0], non_blocking=True)):
        yield


def measure(mode: str, ahead: int | None, **offload: Any) -> Row:
    """Measure one offload mode after a warm-up step that allocates all buffers."""
    gc.collect()
    step = Step(**offload)
    moved = []
    manager = step.manager
    with _counted_save_on_cpu(moved) if mode == "save_on_cpu" else contextlib.nullcontext():
        step()
        before = manager.stats
        moved[:] = []
        step()
        after = manager.stats
        packed = [*moved]
        seconds = [step() for _ in range(STEPS)] if DEVICE == "cuda" else None
        waited = (manager.stats["seconds_waited"] - after["seconds_waited"]) / STEPS
        saved = measure_memory(step.forward, step.finish).saved
    found = {
        name: after[name] - before[name] for name in ("bytes_in", "bytes_out", "copies_in", "copies_out", "misses")
    }
    if packed:
        found |= {
            "bytes_in": sum(packed),
            "bytes_out": sum(packed),
            "copies_in": len(packed),
            "copies_out": len(packed),
        }
    moves_parameters = bool(offload.get("parameters"))
    row = Row(
        mode,
        ahead,
        found["bytes_in"],
        found["bytes_out"],
        found["copies_in"] + found["copies_out"],
        found["misses"] if moves_parameters else None,
        after["peak_bytes"] if moves_parameters else None,
        plan_of(manager).peak_bytes if moves_parameters else None,
        saved,
        None if seconds is None else statistics.median(seconds),
        waited if DEVICE == "cuda" and offload else None,
    )
    manager.close()
    return row


def plan_of(manager: TensorOffloadManager) -> OffloadPlan:
    """Return the manager's plan of a step."""
    uses = rank_uses(CONFIG, 1) + [Use("S", layer) for layer in rank_layers(CONFIG)]
    return plan_offload(uses, manager.storages(), manager.num_prefetch_layers)


def slow_link() -> list[dict[str, Any]]:
    """Measure and predict steps over a link on which the copy of a layer takes as long as its forward."""
    plain = Step()
    plain()
    baseline = statistics.median(plain() for _ in range(3))
    layer = baseline / (3 * CONFIG.num_layers)  # backward takes as long as two forwards
    rows: list[dict[str, Any]] = [{"ahead": None, "seconds": baseline}]
    for ahead in track(range(3), "slow link", transient=True):
        step = Step(parameters=True, num_prefetch_layers=ahead)
        manager = step.manager
        plan = plan_of(step.manager)
        storages = manager.storages()
        bandwidth = sum(storages[0].values()) / layer
        step()
        manager.set_link_delay(lambda nbytes, bandwidth=bandwidth: nbytes / bandwidth)
        seconds = statistics.median(step() for _ in range(3))
        times = simulate_offload(plan, lambda use: {"F": layer, "B": 2 * layer}.get(use.kind, 0.0), storages, bandwidth)
        rows.append({"ahead": ahead, "seconds": seconds, "predicted": times.makespan, "transfer": times.transfer})
        manager.set_link_delay(None)
        manager.close()
    return rows


def show(console: Console, rows: list[Row], slow: list[dict[str, Any]]) -> None:
    """Print the tables."""
    table = Table(
        box=None, title=f"one step on {DEVICE}: {CONFIG.num_layers} layers, D={CONFIG.hidden_size}, B={BATCH}"
    )
    for heading in (
        "offload",
        "ahead",
        "to device, MiB",
        "to host, MiB",
        "copies",
        "misses",
        "resident layers, MiB (plan)",
    ):
        table.add_column(heading, justify="right")
    for heading in ("saved for backward, MiB", "step, s", "waited, s"):
        table.add_column(heading, justify="right")
    for row in rows:
        peak = "" if row.parameter_peak is None else f"{row.parameter_peak / MIB:.1f} ({row.planned_peak / MIB:.1f})"  # pyright: ignore
        table.add_row(
            row.way,
            "" if row.ahead is None else str(row.ahead),
            f"{row.bytes_in / MIB:.1f}",
            f"{row.bytes_out / MIB:.1f}",
            str(row.copies),
            "" if row.late is None else str(row.late),
            peak,
            f"{row.saved / MIB:.1f}",
            "" if row.seconds is None else f"{row.seconds:.3f}",
            "" if row.waited is None else f"{row.waited:.3f}",
        )
    console.print(table)
    table = Table(box=None, title="link on which the copy of a layer takes as long as its forward")
    for heading in ("prefetched layers", "step, s", "predicted, s", "copies alone, s"):
        table.add_column(heading, justify="right")
    for row in slow:
        name = "no offload" if row["ahead"] is None else str(row["ahead"])
        table.add_row(name, *(f"{row[key]:.3f}" if key in row else "" for key in ("seconds", "predicted", "transfer")))
    console.print(table)


def main() -> None:
    """Measure every mode, print the tables, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console(width=150)
    rows = [measure("none", None), measure("save_on_cpu", None)]
    for mode, options in MODES.items():
        for ahead in track(AHEAD, mode, console=console):
            rows.append(measure(mode, ahead, num_prefetch_layers=ahead, **options))
    slow = slow_link()
    show(console, rows, slow)
    content = {"environment": environment(), "model": asdict(CONFIG), "batch": BATCH}
    RESULT.write_text(json.dumps(content | {"ways": [asdict(row) for row in rows], "slow link": slow}, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()

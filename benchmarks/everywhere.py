"""Recompute, offload and pipelines of models of transformers, compared with the same techniques in PyTorch.

    python -m benchmarks.everywhere           (make bench NAME=everywhere)

The models are GPT-2, Llama and ViT of transformers, with PyTorch's fused attention and without dropout. Recompute is
compared with ``torch.utils.checkpoint`` and with the memory budgets of ``torch.compile`` that save about as many bytes,
offload with ``save_on_cpu`` and the offload policy of ``fully_shard``, pipelines with ``torch.distributed.pipelining``
on two processes. The steps of all modes take turns on one thread, and time ratios are medians over the rounds.
Recompute is timed in CPU seconds, which other processes change little; pipelines are timed in seconds and in CPU
seconds of both processes. The gradients of every mode are compared with those of the plain model; a difference above
``TOLERANCE`` ends the benchmark. Compilation is not timed. Offload has no device here: its bytes are counted, and its
CPU seconds are those of the bookkeeping and of copies within the memory of the host, without their overlap on a GPU.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.jobs.everywhere import (
    SCHEDULES,
    SUBJECTS,
    Sizes,
    blocks_of,
    build,
    data_of,
    difference,
    gradients_of,
    loss_of,
)
from parity.report import environment
from reference_torch.offload import offload_modules
from reference_torch.rank_pool import RankPool
from reference_torch.recompute import MemoryUse, measure_memory, recompute_modules

SIZES = Sizes()
ROUNDS = 7
EAGER = ("GPT-2", "Llama", "ViT")
COMPILED = EAGER
BISECTIONS = 5
"""Halvings of the interval of memory budgets of torch.compile."""
OFFLOADED = ("GPT-2", "Llama")
WARM_UP = 2
"""Steps of a training with offload before those that are timed."""
PIPELINED = (
    ("GPT-2", "1f1b", True),
    ("GPT-2", "1f1b", False),
    ("GPT-2", "interleaved-zb1p", False),
    ("GPT-2", "zb-v", False),
    ("Llama", "zb-v", False),
)
"""Model, schedule, and whether PyTorch's ``pipeline`` cuts the model; otherwise its stages are written by hand."""
RANKS = 2
MICROBATCHES = 4
PIPELINE = SIZES._replace(blocks=4, batch=MICROBATCHES)
MIN_BYTES = 2**16
"""Activations of fewer bytes stay on the device."""
TOLERANCE = 1e-4
RESULT = Path("benchmarks/results/everywhere-cpu.json")
MIB = 2**20
PLAIN = "plain"
COMPILED_PLAIN = "torch.compile"
OURS = "recompute_modules"
OURS_EAGER = f"{OURS}, norms and activation"


class Mode:
    """A model in one recompute mode, and its measurements."""

    def __init__(self, name: str, change: Callable[[str, nn.Module], Any]) -> None:
        self.model = build(name, SIZES)
        change(name, self.model)
        self.inputs, self.labels = data_of(name, SIZES)
        self.memory = MemoryUse(0, 0)
        self.gradients: dict[str, Tensor] = {}
        self.seconds: list[float] = []

    def forward(self) -> Tensor:
        """Return the loss."""
        return loss_of(self.model(self.inputs).logits, self.labels)

    def step(self) -> float:
        """Run forward and backward and return the CPU seconds."""
        self.model.zero_grad()
        start = time.process_time()
        self.forward().backward()
        return time.process_time() - start

    def measure(self) -> None:
        """Measure memory and gradients, after a step that allocates buffers and compiles."""
        self.step()
        self.gradients = gradients_of(self.model)
        self.model.zero_grad()
        self.memory = measure_memory(self.forward, Tensor.backward)


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of matrix products and attention."""
    aten = torch.ops.aten
    saved = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_blocks(name: str, model: nn.Module, **settings: Any) -> None:
    """Run every block inside torch.utils.checkpoint."""
    for block in blocks_of(name, model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **settings)


def checkpoint_submodules(name: str, model: nn.Module) -> None:
    """Run the norms and activation functions inside torch.utils.checkpoint."""
    for block in blocks_of(name, model):
        for part in map(block.get_submodule, SUBJECTS[name].recomputed):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def recompute_submodules(name: str, model: nn.Module) -> Any:
    """Apply recompute_modules to the norms and activation functions."""
    return recompute_modules(model, {f"{SUBJECTS[name].blocks}.*": [*SUBJECTS[name].recomputed]})


def compile_blocks(name: str, model: nn.Module, budget: float = 1.0, recompute: bool = False) -> None:
    """Compile every block, with a memory budget.

    Args:
        name: name of the model.
        model: the model.
        budget: activation_memory_budget of torch.compile.
        recompute: if True, apply recompute_modules to the blocks first.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:  # each mode has its own, so that no mode gets the code of another
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    if recompute:
        recompute_submodules(name, model)
    for block in blocks_of(name, model):
        block.compile(backend=backend)


RECOMPUTE: dict[str, Callable[[str, nn.Module], Any]] = {
    PLAIN: lambda name, model: None,
    "checkpoint, blocks": checkpoint_blocks,
    "checkpoint, blocks, products saved": partial(
        checkpoint_blocks, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "checkpoint, norms and activation": checkpoint_submodules,
    OURS_EAGER: recompute_submodules,
}
"""Changes of a model, by mode."""


def measure_recompute(name: str, console: Console) -> list[dict[str, Any]]:
    """Measure all recompute modes of a model."""
    changes = dict(RECOMPUTE)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile, about graph breaks and its own functions
        if name in COMPILED:
            changes[COMPILED_PLAIN] = compile_blocks
            for budget in budgets_of_equal_bytes(name, console):
                changes[f"{COMPILED_PLAIN}, budget {budget:g}"] = partial(compile_blocks, budget=budget)
            changes[f"{COMPILED_PLAIN}, {OURS}"] = partial(compile_blocks, recompute=True)
        torch._dynamo.reset()
        modes = {mode: Mode(name, change) for mode, change in changes.items()}
        for mode in track(modes.values(), f"recompute, {name}: memory", console=console, transient=True):
            mode.measure()
    for _ in track(range(ROUNDS), f"recompute, {name}: time", console=console, transient=True):
        for mode in modes.values():
            mode.seconds.append(mode.step())
    return [row_of(name, mode, modes) for mode in modes]


def budgets_of_equal_bytes(name: str, console: Console) -> list[float]:
    """Return the budgets of torch.compile next to the bytes that recompute_modules saves in eager mode.

    The first saves at most as many bytes, the second saves more. The saved bytes are a step function of the budget, so
    no budget may save just as many.
    """
    expected = Mode(name, RECOMPUTE[OURS_EAGER])
    expected.measure()
    low, high = 0.0, 1.0
    for _ in track(range(BISECTIONS), f"recompute, {name}: budgets", console=console, transient=True):
        middle = (low + high) / 2
        torch._dynamo.reset()
        compiled = Mode(name, partial(compile_blocks, budget=middle))
        compiled.measure()
        low, high = (middle, high) if compiled.memory.saved <= expected.memory.saved else (low, middle)
    return [low, high]


def row_of(name: str, mode: str, modes: dict[str, Mode]) -> dict[str, Any]:
    """Return the measurements of a mode and their ratios to the plain model, and to the compiled one."""
    own = modes[mode]
    row: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "saved_bytes": own.memory.saved,
        "peak_bytes": own.memory.peak,
        "step_cpu_seconds": float(np.median(own.seconds)),
        "difference": checked(f"{name}, {mode}", difference(own.gradients, modes[PLAIN].gradients)),
    }
    for base in (PLAIN, *((COMPILED_PLAIN,) if mode.startswith(COMPILED_PLAIN) else ())):
        other = modes[base]
        row[f"relative to {base}"] = {
            "saved": own.memory.saved / other.memory.saved,
            "peak": own.memory.peak / other.memory.peak,
            "time": float(np.median([a / b for a, b in zip(own.seconds, other.seconds, strict=True)])),
        }
    return row


def checked(what: str, found: float) -> float:
    """Return a difference of gradients.

    Raises:
        ValueError: the difference exceeds the tolerance.
    """
    if not found <= TOLERANCE:
        raise ValueError(f"{what}: expected the gradients of the plain model to {TOLERANCE}, got a difference {found}")
    return found


class Moves:
    """Counters of the bytes that a step copies between device and host."""

    def __init__(self) -> None:
        self.to_device = 0
        self.to_host = 0
        self.resident: dict[int, int] = {}
        self.peak = 0

    def note_resident(self, key: int, nbytes: int) -> None:
        """Count bytes of a parameter that are on the device from now on."""
        self.resident[key] = nbytes
        self.peak = max(self.peak, sum(self.resident.values()))


def counted_save_on_cpu(moves: Moves) -> save_on_cpu:
    """Return PyTorch's save_on_cpu that counts the bytes it would copy from and to a device."""
    hooks = save_on_cpu()
    pack, unpack = hooks.pack_hook, hooks.unpack_hook

    def counted_pack(tensor: Tensor) -> Any:
        moves.to_host += tensor.nbytes
        return pack(tensor)

    def counted_unpack(packed: Any) -> Tensor:
        tensor = unpack(packed)
        moves.to_device += tensor.nbytes
        return tensor

    hooks.pack_hook, hooks.unpack_hook = counted_pack, counted_unpack
    return hooks


@contextmanager
def counted_fully_shard(moves: Moves) -> Iterator[None]:
    """Count the copies of fully_shard with an offload policy."""
    inputs, free = FSDPParam.all_gather_inputs.fget, FSDPParam.free_unsharded_param

    def counted_inputs(parameter: Any) -> list[Tensor]:
        found = inputs(parameter)
        if parameter.offload_to_cpu:
            nbytes = sum(tensor.nbytes for tensor in found)
            moves.to_device += nbytes
            moves.note_resident(id(parameter), nbytes)
        return found

    def counted_free(parameter: Any) -> None:
        moves.resident.pop(id(parameter), None)
        free(parameter)

    with (
        mock.patch.object(FSDPParam, "all_gather_inputs", property(counted_inputs)),
        mock.patch.object(FSDPParam, "free_unsharded_param", counted_free),
    ):
        yield


@contextmanager
def one_process() -> Iterator[None]:
    """Make this process a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Training:
    """Some steps of a model with AdamW; the copies of the last step are counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = build(name, SIZES)
        self.blocks = blocks_of(name, self.model)
        self.patterns = [f"{SUBJECTS[name].blocks}.*"]
        self.inputs, self.labels = data_of(name, SIZES)
        self.moves = Moves()
        self.seconds: list[float] = []

    def run(self, finish: Callable[[torch.optim.Optimizer], Any] | None = None) -> dict[str, Tensor]:
        """Run the steps and return the gradients of the last one.

        Args:
            finish: runs the optimizer; None: its own step.
        """
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        gradients = {}
        for _ in range(WARM_UP + ROUNDS):
            optimizer.zero_grad()
            self.moves.to_device = self.moves.to_host = 0
            start = time.process_time()
            loss_of(self.model(self.inputs).logits, self.labels).backward()
            seconds = time.process_time() - start
            gradients = gradients_of(self.model)
            start = time.process_time()
            if finish is None:
                optimizer.step()
            else:
                finish(optimizer)
            self.seconds.append(seconds + time.process_time() - start)
        return gradients

    def plain(self) -> dict[str, Tensor]:
        """Train without offload."""
        self.moves.peak = sum(p.nbytes for block in self.blocks for p in block.parameters())
        return self.run()

    def save_on_cpu(self) -> dict[str, Tensor]:
        """Train with save_on_cpu around every block."""
        for block in self.blocks:
            block.forward = partial(_within, partial(counted_save_on_cpu, self.moves), block.forward)
        return self.plain()

    def fully_shard(self) -> dict[str, Tensor]:
        """Train with FSDP2 whose policy offloads the blocks."""
        with one_process(), counted_fully_shard(self.moves):
            mesh = init_device_mesh("cpu", (1,))
            for block in self.blocks:
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=True, offload_policy=CPUOffloadPolicy(pin_memory=False)
                )
            fully_shard(self.model, mesh=mesh)
            gradients = self.run()
            self.moves.to_host += sum(p.nbytes for block in self.blocks for p in block.parameters())
            return gradients

    def ours(self, **settings: Any) -> dict[str, Tensor]:
        """Train with offload_modules."""
        manager = offload_modules(self.model, self.patterns, activation_min_bytes=MIN_BYTES, **settings)
        counts = []

        def finish(optimizer: torch.optim.Optimizer) -> None:
            manager.step(optimizer)
            counts.append((manager.stats["bytes_in"], manager.stats["bytes_out"]))

        if not settings.get("parameters", True):
            self.moves.peak = sum(p.nbytes for block in self.blocks for p in block.parameters())
        gradients = self.run(finish)
        if settings.get("parameters", True):
            self.moves.peak = manager.stats["peak_bytes"]
        self.moves.to_device, self.moves.to_host = (b - a for a, b in zip(*counts[-2:], strict=True))
        manager.close()
        return gradients


def _within(context: Callable[[], Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return forward(*args, **kwargs)


OFFLOAD: dict[str, Callable[[Training], dict[str, Tensor]]] = {
    PLAIN: Training.plain,
    "save_on_cpu around blocks": Training.save_on_cpu,
    "offload_modules, activations": partial(Training.ours, parameters=False, activations=True),
    "fully_shard, CPUOffloadPolicy": Training.fully_shard,
    "offload_modules, no prefetch": partial(Training.ours, num_prefetch_layers=0),
    "offload_modules": Training.ours,
    "offload_modules, optimizer state": partial(Training.ours, optimizer_state=True),
    "offload_modules, all": partial(Training.ours, activations=True, optimizer_state=True),
}
"""Trainings, by mode."""


def measure_offload(name: str) -> list[dict[str, Any]]:
    """Count the copies of all offload modes of a model."""
    rows = []
    expected: dict[str, Tensor] = {}
    plain_seconds = 0.0
    for mode, train in OFFLOAD.items():
        gc.collect()
        training = Training(name)
        found = train(training)
        expected = expected or found
        seconds = float(np.median(training.seconds[WARM_UP:]))
        plain_seconds = plain_seconds or seconds
        rows.append(
            {
                "model": name,
                "mode": mode,
                "bytes_to_device": training.moves.to_device,
                "bytes_to_host": training.moves.to_host,
                "resident_parameter_bytes": training.moves.peak,
                "step_cpu_seconds": seconds,
                "time": seconds / plain_seconds,
                "difference": checked(f"{name}, {mode}", difference(found, expected)),
            }
        )
    return rows


def measure_pipelines(console: Console) -> list[dict[str, Any]]:
    """Measure all pipelines on two processes, or report why PyTorch refuses one."""
    rows = []
    with RankPool(RANKS, 120.0) as pool:
        for name, schedule, traced in track(PIPELINED, "pipelines", console=console, transient=True):
            job = "benchmarks.jobs.everywhere:compare_pipelines"
            ranks = pool.run(job, name, PIPELINE, schedule, MICROBATCHES, ROUNDS, traced)
            ours, theirs = (np.max([rank.seconds[i] for rank in ranks], axis=0) for i in range(2))
            differences = [max(rank.differences[i] for rank in ranks) for i in range(2)]
            for i in range(2):
                compared = sum(rank.parameters[i] for rank in ranks)
                assert compared == len([*build(name, PIPELINE).parameters()]), f"{compared} gradients are compared"
            rows.append(
                {
                    "model": name,
                    "schedule": schedule,
                    "traced": traced,
                    "stages": RANKS * SCHEDULES[schedule][1],
                    "step_seconds": [float(np.median(each)) for each in (ours, theirs)],
                    "time": float(np.median(ours / theirs)),
                    "cpu_time": float(np.median(np.divide(*np.sum([rank.cpu_seconds for rank in ranks], axis=0)))),
                    "peak_bytes": [[rank.peaks[i] for rank in ranks] for i in range(2)],
                    "differences": [checked(f"{name}, {schedule}", found) for found in differences],
                }
            )
    return rows


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(box=None, title="recompute, relative to the plain model (and to the compiled one)")
    for heading in ("model", "mode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("saved MiB", "peak MiB", "step CPU s", "saved", "peak", "time", "gradients"):
        table.add_column(heading, justify="right")
    for row in results["recompute"]:
        bases = [row[f"relative to {base}"] for base in (PLAIN, COMPILED_PLAIN) if f"relative to {base}" in row]
        ratios = [
            f"{bases[0][key]:.3f}" + "".join(f" ({base[key]:.3f})" for base in bases[1:])
            for key in ("saved", "peak", "time")
        ]
        table.add_row(
            row["model"],
            row["mode"],
            f"{row['saved_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{row['step_cpu_seconds']:.2f}",
            *ratios,
            f"{row['difference']:.0e}",
        )
    console.print(table)
    table = Table(box=None, title="offload, one step")
    columns = ("to device MiB", "to host MiB", "resident parameters MiB", "time")
    for heading in ("model", "mode", *columns, "gradients"):
        table.add_column(heading, justify="right" if heading in columns else "left")
    for row in results["offload"]:
        numbers = (row[key] / MIB for key in ("bytes_to_device", "bytes_to_host", "resident_parameter_bytes"))
        cells = [*(f"{n:.1f}" for n in numbers), f"{row['time']:.3f}", f"{row['difference']:.0e}"]
        table.add_row(row["model"], row["mode"], *cells)
    console.print(table)
    table = Table(box=None, title="pipelines on two processes: this project, torch.distributed.pipelining")
    for heading in ("model", "schedule", "stages", "step s", "time", "CPU time", "peak MiB by rank", "gradients"):
        table.add_column(heading)
    for row in results["pipelines"]:
        table.add_row(
            row["model"],
            row["schedule"] + ", stages of pipeline()" * row["traced"],
            str(row["stages"]),
            ", ".join(f"{seconds:.2f}" for seconds in row["step_seconds"]),
            f"{row['time']:.3f}",
            f"{row['cpu_time']:.3f}",
            ", ".join(" + ".join(f"{peak / MIB:.1f}" for peak in peaks) for peaks in row["peak_bytes"]),
            ", ".join(f"{found:.0e}" for found in row["differences"]),
        )
    console.print(table)


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console(width=150)
    results: dict[str, Any] = {
        "environment": environment() | {"transformers": transformers.__version__},
        "sizes": SIZES._asdict(),
        "rounds": ROUNDS,
        "microbatches": MICROBATCHES,
        "pipelines": measure_pipelines(console),
    }
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results["recompute"] = [row for name in EAGER for row in measure_recompute(name, console)]
    results["offload"] = [row for name in OFFLOADED for row in measure_offload(name)]
    show(console, results)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()

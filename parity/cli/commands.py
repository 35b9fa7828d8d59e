"""The commands of ``diptych`` with their flags, and the checks of their settings."""

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from diptych.planner.budget import BudgetPlan, fit_budget
from diptych.planner.request import PlanRequest, parse_bytes
from diptych.planner.step_time import Machine
from diptych.plans.checkpoint import list_checkpoints, with_definition, with_model_of
from diptych.plans.config import MODEL_RULES, DataConfig, TrainConfig, TransformerConfig
from diptych.plans.config.rules import check_at_least
from diptych.plans.families.folder import source_of
from diptych.plans.families.presets import find_model
from diptych.plans.recompute import NO_RECOMPUTE
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import read_schedule


class UnreadableScheduleError(Exception):
    """An error for a schedule file that cannot be read or does not contain a valid schedule."""


def _read_schedule(words: list[str]) -> Schedule:
    try:
        return read_schedule(words[0])
    except (OSError, ValueError) as error:
        raise UnreadableScheduleError(str(error)) from None


@dataclass(frozen=True)
class ModelFlags(TransformerConfig):
    """The model, its parallelism, recompute and offload.

    Only single settings are checked here: a folder may define the others, to which they must fit (with_configuration).
    """

    # The flag is a path. The file is read once, during parsing.
    pipeline_schedule_file: Annotated[
        Schedule | None,
        PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=_read_schedule,
            is_instance=lambda value: value is None or isinstance(value, Schedule),
            str_from_instance=lambda value: [str(value and value.name)],
        ),
    ] = None
    """CSV file with the schedule's actions, as torch.distributed.pipelining writes it; replaces pipeline_schedule."""

    def __post_init__(self) -> None:
        self.check(tuple(rule for rule in MODEL_RULES if rule.is_single))


def with_configuration(command: Any, given: Collection[str]) -> Any:
    """Return the command with its ModelFlags replaced by a TransformerConfig, whose model a folder may define.

    Args:
        command: the command.
        given: names of the settings on the command line.

    Raises:
        ValueError: a setting breaks a rule, differs from that of the folder, or no recompute fits the budget.
    """
    model = getattr(command, "model", None)
    if not isinstance(model, ModelFlags):
        return command
    found: TransformerConfig = model
    if isinstance(command, Train) and command.init is None and command.resumes_imported_model:
        command = replace(command, init=command.save)
    init, source = (getattr(command, name, None) for name in ("init", "model_source"))
    if init is not None:
        found = with_model_of(init, found, given)
    if source is not None:
        found = with_definition(find_model(source), found, given, source)
    config = TransformerConfig(**vars(found))
    fitted = None
    if command.activation_memory_budget is not None:
        budget = parse_bytes("activation_memory_budget", command.activation_memory_budget)
        decided = [name for name, default in NO_RECOMPUTE.items() if getattr(config, name) != default]
        if decided:
            raise ValueError(
                f"activation_memory_budget: expected None with {', '.join(decided)}, got "
                f"{command.activation_memory_budget!r}, which chooses the recompute of every layer"
            )
        shape = command.sequences_at_once, budget, command.machine, command.microbatches_at_most
        fitted = fit_budget(config, *shape)
        config = fitted.config
    found_command = replace(command, model=config, activation_memory_budget=None)
    object.__setattr__(found_command, "fitted", fitted)  # a result, not a flag
    return found_command


def _demo_model() -> ModelFlags:
    return ModelFlags(hidden_size=128, num_layers=2, num_attention_heads=4, enable_hyper_connections=True)


LONGEST_TIMEOUT = 1e9
"""Longest time-out that timers accept, in seconds."""


@dataclass(frozen=True)
class TrainingRun:
    """The common settings of all training commands."""

    model: tyro.conf.OmitArgPrefixes[ModelFlags] = field(default_factory=_demo_model)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    data: tyro.conf.OmitArgPrefixes[DataConfig] = field(default_factory=DataConfig)
    init: Path | None = None
    """Weights to begin with, from diptych import or a run: a checkpoint, or a folder whose newest one is read. They
    define the model: its settings need no flags. Beside them may be the model's own tokenizer. None: new weights."""
    activation_memory_budget: str | None = None
    """Bytes of a rank's activations, temporary buffers, messages and gradients in a step, as in 2GiB: recompute as
    little as fits. None: the recompute settings as they are. With replicas, give micro_batch_size."""
    fitted: BudgetPlan | None = field(default=None, init=False)
    """The recompute that fits activation_memory_budget."""
    num_threads: int = 1
    """CPU threads of PyTorch; XLA uses all cores that the process may use."""
    nproc: int | None = None
    """Ranks on this machine: replicas x context x pipeline x tensor-parallel ranks. PyTorch starts a process per rank,
    JAX uses one device per rank in this process. None: the ranks of one replica."""
    log_interval: int = 20
    """Steps between printed rows."""

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a microbatch, or of a step on one replica."""
        return self.train.microbatch

    @property
    def microbatches_at_most(self) -> int:
        """Microbatches of a step on one replica, as far as the number of replicas is known."""
        replicas = max(1, (self.nproc or 1) // self.model.model_parallel_size)
        return max(1, self.train.global_batch_size // self.train.microbatch // replicas)

    @property
    def machine(self) -> Machine:
        """Rates by which recompute is chosen."""
        return Machine()

    @property
    def ranks_here(self) -> int:
        """Number of processes to start on this machine, or of devices this process uses."""
        return self.nproc or self.model.model_parallel_size

    def __post_init__(self) -> None:
        check_at_least(1, num_threads=self.num_threads, log_interval=self.log_interval, nproc=self.nproc)
        if self.num_threads > (os.cpu_count() or 1):
            raise ValueError(
                f"num_threads: expected at most this machine's {os.cpu_count()} cores, got {self.num_threads}"
            )


@dataclass(frozen=True)
class Compare(TrainingRun):
    """Train one model in both backends side by side, from equal parameters on equal batches.

    On a mesh, each backend has all ranks: PyTorch one process per rank, JAX one device per rank.

    Prints the losses of each step and then the gradient differences, largest first. Writes report.json and
    compare.png. Exits with code 1 if a loss or gradient differs by more than its tolerance.
    """

    output_dir: Path = Path("runs/compare")
    """Folder for report.json and compare.png."""
    loss_tolerance: float | None = None
    """Largest accepted difference of two losses, nats per token; None: 1e-5 in float32, 1e-10 in float64, 2e-2
    with bf16, 4e-2 with fp8 or activation_storage."""
    gradient_tolerance: float | None = None
    """Largest accepted relative difference of a parameter's gradients; None: 1e-5 in float32, 1e-12 in
    float64, 4e-2 with bf16, 1e-1 with fp8 or activation_storage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("loss_tolerance", "gradient_tolerance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value}")


@dataclass(frozen=True)
class Train(TrainingRun):
    """Train a model in one backend and report its validation loss."""

    backend: Literal["torch", "jax"] = "torch"
    """Backend that trains the model."""
    save: Path | None = None
    """Folder for checkpoints and metrics.jsonl; None: no file is written."""
    save_interval: int = 0
    """Steps between checkpoints; 0: one checkpoint at the end, or when the run is stopped."""
    resume: bool = False
    """Continue from the newest checkpoint in the save folder; either backend can have written it."""
    resume_if_saved: bool = False
    """Resume if the folder has a checkpoint, else start from step 0; for launchers that restart failed runs."""
    exit_step: int | None = None
    """Stop after this step of the whole run; a later run continues with resume."""
    join_timeout: float = 600.0
    """Seconds from the start within which all processes must join. Several machines: see docs/composition.md."""
    coordinator_address: str | None = None
    """JAX on several machines: host:port of process 0, as jax.distributed.initialize takes it, with num_processes
    and process_id; auto: all three come from the cluster (Slurm, Open MPI, Kubernetes, TPU)."""
    num_processes: int | None = None
    """JAX on several machines: number of processes; each has the same number of devices."""
    process_id: int | None = None
    """JAX on several machines: number of this process, counted from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, save_interval=self.save_interval)
        check_at_least(1, exit_step=self.exit_step)
        if not 0.0 < self.join_timeout <= LONGEST_TIMEOUT:
            raise ValueError(
                f"join_timeout: expected more than 0 and at most {LONGEST_TIMEOUT:g} seconds, got {self.join_timeout}"
            )
        if self.save is None and (self.resume or self.resume_if_saved or self.save_interval):
            raise ValueError(
                "save: expected a folder with resume, resume_if_saved or save_interval, got none; give --save FOLDER"
            )
        self._check_coordinator()

    @property
    def resumes_imported_model(self) -> bool:
        """True if the run goes on with a model that came from a folder, whose definition and tokenizer it keeps."""
        if self.save is None or not (self.resume or self.resume_if_saved):
            return False
        return source_of(self.save) is not None and bool(list_checkpoints(self.save))

    def _check_coordinator(self) -> None:
        """Reject incomplete or unsupported settings of JAX's coordinator."""
        address = self.coordinator_address
        given = (self.num_processes, self.process_id)
        if self.backend == "torch" and (address, *given) != (None,) * 3:
            raise ValueError(
                "coordinator_address, num_processes, process_id: expected none with backend 'torch', whose processes "
                "torchrun starts and joins, got "
                f"{address!r}, {self.num_processes} and {self.process_id}"
            )
        if address in (None, "auto"):
            if given != (None, None):
                raise ValueError(
                    "coordinator_address: expected host:port of the first process beside num_processes and process_id, "
                    f"got {address!r}"
                )
            return
        if not re.fullmatch(r"\S+:\d+", address):
            raise ValueError(f"coordinator_address: expected host:port or auto, got {address!r}")
        if self.num_processes is None or self.process_id is None:
            raise ValueError(
                f"num_processes, process_id: expected both beside coordinator_address, got {self.num_processes} and "
                f"{self.process_id}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id: expected 0 <= process_id < num_processes={self.num_processes}, got {self.process_id}"
            )

    @property
    def ranks_here(self) -> int:
        """Number of processes to start on this machine, or of devices this process uses."""
        return self.nproc or max(1, self.model.model_parallel_size // (self.num_processes or 1))


@dataclass(frozen=True)
class Plan(PlanRequest):
    """Predict memory, time and traffic of a training step without running it, for any model and mesh size.

    Prints the memory of one rank, term by term, and the messages between ranks. With pipeline_model_parallel_size
    above 1, also prints the placement of layers, the table of the schedule, and the bubble and memory of every rank,
    and compares all other schedules. With context_parallel_size above 1, also prints the memory of every rank for a
    microbatch and the bytes of each state exchange. See docs/planner.md.
    """

    model: tyro.conf.OmitArgPrefixes[ModelFlags] = field(default_factory=_demo_model)
    model_source: Annotated[str | None, tyro.conf.arg(name="model", metavar="NAME|FOLDER")] = None
    """Published model by name (docs/models.md lists them), or Hugging Face folder whose config.json defines the model;
    its settings need no flags. Weights are not read."""
    fitted: BudgetPlan | None = field(default=None, init=False)
    """The recompute that fits activation_memory_budget."""


@dataclass(frozen=True)
class Sample:
    """Continue a text with a trained model. Each backend reads the checkpoints of both backends."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or the folder of a run, of which the newest checkpoint is read."""
    backend: Literal["torch", "jax"] = "torch"
    """Backend that runs the model."""
    prompt: str = "def "
    """Beginning of the text."""
    length: int = 200
    """Tokens to add; bytes unless the model has a tokenizer."""
    temperature: float = 0.8
    """Sampling temperature; 0 selects the most likely token."""
    seed: int = 0
    """Seed of the sampling; equal seeds give equal texts."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt: expected at least one character, got none")
        check_at_least(1, length=self.length)
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 <= seed < 2**32, got {self.seed}")


@dataclass(frozen=True)
class Info:
    """Verify a checkpoint and print its contents."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or the folder of a run, of which the newest checkpoint is read."""


@dataclass(frozen=True)
class Import:
    """Convert a Hugging Face folder to a checkpoint of weights, which train, compare, sample and export read."""

    folder: tyro.conf.Positional[Path]
    """Folder with config.json and safetensors, as transformers saves it."""
    output: Path
    """Folder for the checkpoint, and for the tokenizer and configuration of the model."""


@dataclass(frozen=True)
class Export:
    """Convert a checkpoint to a Hugging Face folder, which transformers loads."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or the folder of a run, of which the newest checkpoint is read."""
    folder: tyro.conf.Positional[Path]
    """Folder to write."""
    family: str | None = None
    """Family of the model, as in docs/models.md; None: that of the folder from which its weights were imported."""
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    """Type of the exported weights; None: that of the checkpoint."""


@dataclass(frozen=True)
class Curves:
    """Plot loss, gradient norm and learning rate of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, as given to train --save."""
    output: Path = Path("runs/curves.png")
    """Picture to write."""


@dataclass(frozen=True)
class Locate:
    """Find the first submodule in which a model in PyTorch and a model in JAX differ, forward or backward.

    Writes location.json, location.html and location.png. Exits with code 1 if the models differ; the last line names
    the submodule.
    """

    torch_side: tyro.conf.Positional[str]
    """FILE.py:FUNCTION that returns the module of PyTorch and its inputs, (module, inputs)."""
    jax_side: tyro.conf.Positional[str]
    """FILE.py:FUNCTION that returns the nnx.Module, or (linen module, variables)."""
    names: Path | None = None
    """TOML file that maps PyTorch's names of parameters to JAX's names; None: proposed from shapes and names."""
    modules: Path | None = None
    """TOML file that maps PyTorch's names of submodules to JAX's names; None: by their parameters and paths."""
    ignore: tuple[str, ...] = ()
    """Patterns of parameters, of either side, without counterpart."""
    output_dir: Path = Path("runs/locate")
    """Folder for location.json, location.html and location.png."""
    seed: int = 0
    """Seed of cotangents and perturbations."""
    precision: Literal["float64", "float32", "bfloat16"] = "float64"
    """Dtype in whose ulps differences are judged; float32 if a side computes in float32 on purpose."""
    memory_limit: int = 2**30
    """Bytes of recorded arrays that stay in memory; others are in a temporary folder until the command ends."""

    def __post_init__(self) -> None:
        if self.memory_limit < 0:
            raise ValueError(f"memory_limit: expected at least 0 bytes, got {self.memory_limit}")
        for side in (self.torch_side, self.jax_side):
            if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", side):
                raise ValueError(f"torch_side, jax_side: expected FILE.py:FUNCTION, got {side!r}")


COMMANDS: dict[str, type] = {
    "compare": Compare,
    "train": Train,
    "plan": Plan,
    "sample": Sample,
    "info": Info,
    "import": Import,
    "export": Export,
    "curves": Curves,
    "locate": Locate,
}
Command: Any = tyro.conf.OmitSubcommandPrefixes[
    reduce(or_, (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()))
]

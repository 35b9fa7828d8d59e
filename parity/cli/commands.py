"""The commands of ``diptych``: what each is told, and what its settings must obey."""

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from diptych.planner.search import undecided
from diptych.planner.step_time import Machine
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.schedule.placement import ScheduleName


def _demo_model() -> TransformerConfig:
    return TransformerConfig(hidden_size=128, num_layers=2, num_attention_heads=4, enable_hyper_connections=True)


LONGEST_TIMEOUT = 1e9
"""Seconds; what timers still take."""


@dataclass(frozen=True)
class TrainingRun:
    """What every training run is made of."""

    model: tyro.conf.OmitArgPrefixes[TransformerConfig] = field(default_factory=_demo_model)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    data: tyro.conf.OmitArgPrefixes[DataConfig] = field(default_factory=DataConfig)
    num_threads: int = 1
    """CPU threads of PyTorch (XLA takes the cores the process may use)."""
    log_interval: int = 20
    """Steps between rows of the table."""

    def __post_init__(self) -> None:
        for name in ("num_threads", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_threads > (os.cpu_count() or 1):
            raise ValueError(
                f"num_threads: expected at most this machine's {os.cpu_count()} cores, got {self.num_threads}"
            )


@dataclass(frozen=True)
class Compare(TrainingRun):
    """Train one model in both backends side by side, from one start on the same batches.

    Shows each step's losses, then the gradient differences, worst first; writes report.json and
    compare.png. Ends with exit code 1 if a loss or gradient differs by more than its tolerance.
    """

    output_dir: Path = Path("runs/compare")
    """Folder for report.json and compare.png."""
    loss_tolerance: float | None = None
    """Largest difference of two losses, nats per token; None: 1e-5 in float32, 1e-10 in float64, 2e-2
    with bf16."""
    gradient_tolerance: float | None = None
    """Largest relative difference of a parameter's gradients; None: 1e-5 in float32, 1e-12 in
    float64, 2e-2 with bf16."""

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
    """Which implementation trains."""
    save: Path | None = None
    """Folder for checkpoints and metrics.jsonl; None: nothing is written."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end, or when stopped."""
    resume: bool = False
    """Go on from the newest checkpoint in the save folder, whichever backend wrote it."""
    resume_if_saved: bool = False
    """As resume, but begin where the folder has no checkpoint yet: for what starts a run again after a fault."""
    exit_step: int | None = None
    """Stop after so many steps of the whole run, to go on later with resume."""
    nproc: int | None = None
    """Ranks on this machine, pipeline ranks times context ranks times replicas: processes to start, with PyTorch;
    devices to use from this process, with JAX. None: of one replica. On several machines: see docs/composition.md."""
    join_timeout: float = 600.0
    """Seconds in which all processes of a run have to meet, from their start on."""
    coordinator_address: str | None = None
    """JAX on several machines: host:port of the first process, as jax.distributed.initialize takes it, with
    num_processes and process_id; auto: all three from the cluster's own (Slurm, Open MPI, Kubernetes, TPU)."""
    num_processes: int | None = None
    """JAX on several machines: processes in all, each with the same number of devices."""
    process_id: int | None = None
    """JAX on several machines: number of this process, from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_interval < 0:
            raise ValueError(f"save_interval: expected at least 0, got {self.save_interval}")
        if self.exit_step is not None and self.exit_step < 1:
            raise ValueError(f"exit_step: expected at least 1, got {self.exit_step}")
        if self.nproc is not None and self.nproc < 1:
            raise ValueError(f"nproc: expected at least 1, got {self.nproc}")
        if not 0.0 < self.join_timeout <= LONGEST_TIMEOUT:
            raise ValueError(
                f"join_timeout: expected more than 0 and at most {LONGEST_TIMEOUT:g} seconds, got {self.join_timeout}"
            )
        if self.save is None and (self.resume or self.resume_if_saved or self.save_interval):
            raise ValueError(
                "save: expected a folder with resume, resume_if_saved or save_interval, got none; give --save FOLDER"
            )
        self._check_coordinator()

    def _check_coordinator(self) -> None:
        address, given = self.coordinator_address, (self.num_processes, self.process_id)
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
        """Processes to start on this machine, or devices of this process."""
        return self.nproc or max(1, self.model.model_parallel_size // (self.num_processes or 1))


LEAST_RATE, MOST_RATE = 1e-6, 1e9
"""Of a machine, in the units of the flags: beyond them times overflow, or are 0."""


def parse_bytes(name: str, text: str) -> int:
    """A size such as 80GiB or 1.5 TB.

    Raises:
        ValueError: it is none; the message begins with the name.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B\s*", text)
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise ValueError(f"{name}: expected a size such as 80GiB or 80GB, got {text!r}")
    return size


@dataclass(frozen=True)
class Plan:
    """Predict what a training step keeps, needs and sends, for any size, also one no machine here could run.

    Always: what one rank holds, term by term, and what ranks send each other; see docs/planner.md.
    With pipeline_model_parallel_size above 1: where layers lie, the schedule's table, its bubble, and what every rank
    keeps, beside all other schedules. With context_parallel_size above 1: what every rank holds of a microbatch, and
    what each exchange of states sends.
    """

    model: tyro.conf.OmitArgPrefixes[TransformerConfig] = field(default_factory=_demo_model)
    micro_batch_size: int = 8
    """Sequences computed at a time."""
    schedule: ScheduleName | None = None
    """The model's pipeline_schedule, in short."""
    num_microbatches: int = 8
    """Microbatches of a step, on each replica."""
    data_parallel_size: int = 1
    """Replicas of context ranks of pipeline ranks."""
    picture: Path | None = None
    """Timeline of a pipeline to draw, .png or .svg."""
    html: Path | None = None
    """Page to write that explains the plan: an interactive timeline in one file, .html."""
    write_schedule: Path | None = None
    """CSV file to write the pipeline's schedule to, for pipeline_schedule_file or torch.distributed.pipelining."""
    generate_schedule: Path | None = None
    """CSV file for a schedule made for the pipeline's costs, as good as every named one of its stages or better; for
    pipeline_schedule_file. Stages lie where the model's schedule has them."""
    stage_costs: Path | None = None
    """JSON file with measured times of every stage, for generate_schedule; None: they are predicted."""
    generate_effort: float = 3.0
    """How long generate_schedule searches, in millions of actions simulated, about half a second each."""
    link_bandwidth: float = 50.0
    """Between host and device, in GB/s; for offload, and the search."""
    compute_rate: float = 300.0
    """Of the device in matrix products, in TFLOP/s; for offload, and the search."""
    memory_limit: str | None = None
    """Bytes a rank has, as in 80GiB. With ranks: search the fastest ways to train the model within it. With
    generate_schedule: what any rank may hold in all, parameters, gradients and moments included."""
    ranks: int | None = None
    """Of the whole mesh, for the search."""
    global_batch_size: int | None = None
    """Sequences of a step, for the search; None: as many as ranks."""
    memory_bandwidth: float = 3000.0
    """Of the device's own memory, in GB/s; for the search."""
    network_bandwidth: float = 50.0
    """That a rank sends with, in GB/s; for the search."""
    num_results: int = 10
    """Ways that the search prints."""

    def __post_init__(self) -> None:
        for name in ("link_bandwidth", "compute_rate", "memory_bandwidth", "network_bandwidth"):
            if not LEAST_RATE <= getattr(self, name) <= MOST_RATE:
                raise ValueError(
                    f"{name}: expected a number from {LEAST_RATE:g} to {MOST_RATE:g}, got {getattr(self, name)}"
                )
        sizes = (
            "micro_batch_size",
            "num_microbatches",
            "data_parallel_size",
            "num_results",
            "ranks",
            "global_batch_size",
        )
        for name in sizes:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        self._check_generation()
        if self.generate_schedule is None and (self.memory_limit is None) != (self.ranks is None):
            missing = "ranks" if self.ranks is None else "memory_limit"
            raise ValueError(f"{missing}: expected a value beside the other of memory_limit and ranks, got None")
        if self.memory_limit is not None:
            parse_bytes("memory_limit", self.memory_limit)
        self._check_search()
        if self.schedule is not None:
            object.__setattr__(self, "model", replace(self.model, pipeline_schedule=self.schedule))
        for name in ("picture", "write_schedule", "generate_schedule"):
            if getattr(self, name) is not None and self.model.pipeline_model_parallel_size == 1:
                raise ValueError(f"{name}: expected pipeline_model_parallel_size above 1, got 1")
        if self.picture is not None and self.picture.suffix not in (".png", ".svg"):
            raise ValueError(f"picture: expected a name that ends in .png or .svg, got {str(self.picture)!r}")
        for name in ("write_schedule", "generate_schedule"):
            path = getattr(self, name)
            if path is not None and path.suffix != ".csv":
                raise ValueError(f"{name}: expected a name that ends in .csv, got {str(path)!r}")
        if self.html is not None and self.html.suffix != ".html":
            raise ValueError(f"html: expected a name that ends in .html, got {str(self.html)!r}")
        if self.html is not None and self.model.cp_exchange == "pipelined" and self.model.context_parallel_size > 1:
            raise ValueError(
                "html: expected another cp_exchange than 'pipelined', whose ranks are no pipeline's, got it"
            )

    def _check_search(self) -> None:
        """What goes with ranks, and what does not: what the search decides is not asked for."""
        if self.ranks is None:
            for name in ("global_batch_size", "num_results"):
                if getattr(self, name) != getattr(Plan, name):
                    raise ValueError(
                        f"{name}: expected {getattr(Plan, name)} without memory_limit and ranks, which ask for a "
                        f"search, got {getattr(self, name)}"
                    )
            return
        free = undecided(self.model)
        own = ("schedule", "micro_batch_size", "num_microbatches", "data_parallel_size")
        own += ("html", "picture", "write_schedule")
        decided = [(name, getattr(self, name), getattr(Plan, name)) for name in own]
        decided += [(name, value, getattr(free, name)) for name, value in vars(self.model).items()]
        for name, value, default in decided:
            if value != default:
                raise ValueError(
                    f"{name}: expected {default!r} beside memory_limit and ranks, which ask for a search, got "
                    f"{value if isinstance(value, int | float) else str(value)!r}; plan one of the ways that are found"
                )

    def _check_generation(self) -> None:
        """What goes with generate_schedule, and what does not."""
        if not 0.0 <= self.generate_effort < math.inf:
            raise ValueError(f"generate_effort: expected a finite number of at least 0, got {self.generate_effort}")
        if self.generate_schedule is None:
            if self.stage_costs is not None:
                raise ValueError(
                    f"stage_costs: expected None without generate_schedule, got {str(self.stage_costs)!r}; give "
                    "generate_schedule FILE.csv"
                )
            return
        beside = (
            ("write_schedule", self.write_schedule, "generate_schedule writes its own"),
            ("ranks", self.ranks, "the pipeline's sizes are given"),
            ("pipeline_schedule_file", self.model.pipeline_schedule_file, "the new one takes its place"),
            (
                "enable_tensor_offload",
                self.model.enable_tensor_offload or None,
                "plan it with the file that is written",
            ),
        )
        for name, value, why in beside:
            if value is not None:
                raise ValueError(f"{name}: expected none beside generate_schedule, got {str(value)!r}; {why}")
        if self.html is not None and self.stage_costs is not None:
            raise ValueError(
                f"html: expected None beside stage_costs, whose times the page does not have, got {str(self.html)!r}; "
                "plan the file that is written"
            )

    @property
    def machine(self) -> Machine:
        """Its rates."""
        return Machine(
            compute_rate=self.compute_rate * 1e12,
            memory_bandwidth=self.memory_bandwidth * 1e9,
            network_bandwidth=self.network_bandwidth * 1e9,
            link_bandwidth=self.link_bandwidth * 1e9,
        )


@dataclass(frozen=True)
class Sample:
    """Continue a text with a trained model, in either backend, whichever trained it."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run's folder, whose newest is taken."""
    backend: Literal["torch", "jax"] = "torch"
    """Which implementation computes."""
    prompt: str = "def "
    """What the text begins with."""
    length: int = 200
    """Tokens (bytes) to add."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    seed: int = 0
    """The same seed draws the same text."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt: expected at least one character, got none")
        if self.length < 1:
            raise ValueError(f"length: expected at least 1, got {self.length}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 <= seed < 2**32, got {self.seed}")


@dataclass(frozen=True)
class Info:
    """Verify a checkpoint and say what is in it."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, or a run's folder, whose newest is taken."""


@dataclass(frozen=True)
class Curves:
    """Draw loss, gradient norm and learning rate of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders given to train --save."""
    output: Path = Path("runs/curves.png")
    """Picture to write."""


Command = tyro.conf.OmitSubcommandPrefixes[
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Curves, tyro.conf.subcommand("curves")]
]

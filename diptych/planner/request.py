"""What is asked of the planner: a model, the sizes of a step, the rates of a machine, and what to write."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from diptych.planner.search import undecided
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.placement import ScheduleName

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
class PlanRequest:
    """A request for a plan; the command ``diptych plan`` has its fields as flags.

    Raises:
        ValueError: settings that do not go together; the message names the one to change.
    """

    model: TransformerConfig
    """The model, and how it is divided."""
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
                if getattr(self, name) != getattr(PlanRequest, name):
                    raise ValueError(
                        f"{name}: expected {getattr(PlanRequest, name)} without memory_limit and ranks, which ask for "
                        f"a search, got {getattr(self, name)}"
                    )
            return
        free = undecided(self.model)
        own = ("schedule", "micro_batch_size", "num_microbatches", "data_parallel_size")
        own += ("html", "picture", "write_schedule")
        decided = [(name, getattr(self, name), getattr(PlanRequest, name)) for name in own]
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

"""The request for a plan: a model, the sizes of a step, the rates of a machine, and the files to write."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from diptych.planner.search import without_searched_settings
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.config.rules import check_at_least
from diptych.plans.schedule.placement import ScheduleName

LEAST_RATE = 1e-6
MOST_RATE = 1e9
"""Accepted machine rates, in the units of the flags: beyond these limits times overflow or become 0."""


def parse_bytes(name: str, text: str) -> int:
    """Return the bytes of a size such as 80GiB or 1.5 TB.

    Args:
        name: name of the setting, with which an error message begins.
        text: the size, with its unit.

    Raises:
        ValueError: the text is not a size of at least one byte.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B\s*", text)
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise ValueError(f"{name}: expected a size such as 80GiB or 80GB, got {text!r}")
    return size


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan; its fields are the flags of the command ``diptych plan``.

    Raises:
        ValueError: settings contradict each other; the message names the setting to change.
    """

    model: TransformerConfig
    """The model, and its pipeline and context parallelism."""
    micro_batch_size: int = 8
    """Sequences of one microbatch."""
    schedule: ScheduleName | None = None
    """Short form of pipeline_schedule."""
    num_microbatches: int = 8
    """Microbatches of one step on each replica."""
    data_parallel_size: int = 1
    """Replicas; each has all context ranks and pipeline ranks."""
    picture: Path | None = None
    """File for a drawing of the pipeline's timeline, .png or .svg."""
    html: Path | None = None
    """HTML file for an interactive page of the plan, without external resources."""
    write_schedule: Path | None = None
    """CSV file for the pipeline's schedule, readable by pipeline_schedule_file and torch.distributed.pipelining."""
    generate_schedule: Path | None = None
    """CSV file for a schedule generated for the pipeline's costs; no named schedule with the same stages is faster.
    Readable by pipeline_schedule_file. Stages are placed as in the model's schedule."""
    stage_costs: Path | None = None
    """JSON file with measured times of every stage, for generate_schedule; None: predicted times."""
    generate_effort: float = 3.0
    """Effort of generate_schedule, in millions of simulated actions; a million takes about half a second."""
    link_bandwidth: float = 50.0
    """Bandwidth between host and device, GB/s, for predicted times."""
    compute_rate: float = 300.0
    """Rate of the device in matrix products, TFLOP/s, for predicted times."""
    memory_limit: str | None = None
    """Bytes per rank, as in 80GiB. With ranks: search the fastest configurations that fit. With generate_schedule:
    limit for every rank, including parameters, gradients and moments."""
    activation_memory_budget: str | None = None
    """Bytes of a rank's activations, temporary buffers, messages and gradients in a step, as in 2GiB: finds the
    recompute_layout with the least recomputation that fits."""
    ranks: int | None = None
    """Ranks of the whole mesh, for the search."""
    global_batch_size: int | None = None
    """Sequences of one step, for the search; None: one per rank."""
    memory_bandwidth: float = 3000.0
    """Bandwidth of the device's memory, GB/s, for predicted times."""
    network_bandwidth: float = 50.0
    """Send bandwidth of a rank, GB/s, for predicted times."""
    instruction_rate: float = 250.0
    """Rate of the delta rule's kernels with impl="triton", billions of warp instructions per second, for predicted
    times. On an H100 most of them reach 190 to 350."""
    num_results: int = 10
    """Number of configurations that the search prints."""

    def __post_init__(self) -> None:
        for name in ("link_bandwidth", "compute_rate", "memory_bandwidth", "network_bandwidth", "instruction_rate"):
            if not LEAST_RATE <= getattr(self, name) <= MOST_RATE:
                raise ValueError(
                    f"{name}: expected a number from {LEAST_RATE:g} to {MOST_RATE:g}, got {getattr(self, name)}"
                )
        sizes = ("micro_batch_size", "num_microbatches", "data_parallel_size", "num_results", "ranks")
        check_at_least(1, **{name: getattr(self, name) for name in (*sizes, "global_batch_size")})
        self._check_generation()
        if self.generate_schedule is None and (self.memory_limit is None) != (self.ranks is None):
            missing = "ranks" if self.ranks is None else "memory_limit"
            raise ValueError(f"{missing}: expected a value, since memory_limit and ranks go together, got None")
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
                "html: expected a cp_exchange other than 'pipelined', whose ranks form no pipeline, got 'pipelined'"
            )

    def _check_search(self) -> None:
        """Check the settings of a search; settings that the search decides must have their defaults."""
        if self.ranks is not None and self.activation_memory_budget is not None:
            raise ValueError(
                "activation_memory_budget: expected None with memory_limit and ranks, which ask for a search, got "
                f"{self.activation_memory_budget!r}; plan one of the configurations found"
            )
        if self.ranks is None:
            for name in ("global_batch_size", "num_results"):
                if getattr(self, name) != getattr(PlanRequest, name):
                    raise ValueError(
                        f"{name}: expected {getattr(PlanRequest, name)} without memory_limit and ranks, which ask for "
                        f"a search, got {getattr(self, name)}"
                    )
            return
        free = without_searched_settings(self.model)
        own = ("schedule", "micro_batch_size", "num_microbatches", "data_parallel_size")
        own += ("html", "picture", "write_schedule")
        decided = [(name, getattr(self, name), getattr(PlanRequest, name)) for name in own]
        decided += [(name, value, getattr(free, name)) for name, value in vars(self.model).items()]
        for name, value, default in decided:
            if value != default:
                raise ValueError(
                    f"{name}: expected {default!r} with memory_limit and ranks, which ask for a search, got "
                    f"{value if isinstance(value, int | float) else str(value)!r}; plan one of the configurations found"
                )

    def _check_generation(self) -> None:
        """Check the settings that generate_schedule needs or excludes."""
        if not 0.0 <= self.generate_effort < math.inf:
            raise ValueError(f"generate_effort: expected a finite number of at least 0, got {self.generate_effort}")
        if self.generate_schedule is None:
            if self.stage_costs is not None:
                raise ValueError(
                    f"stage_costs: expected None without generate_schedule, got {str(self.stage_costs)!r}; give "
                    "generate_schedule FILE.csv"
                )
            return
        exclusive = (
            ("write_schedule", self.write_schedule, "generate_schedule writes its own file"),
            ("ranks", self.ranks, "generate_schedule needs fixed pipeline sizes"),
            ("pipeline_schedule_file", self.model.pipeline_schedule_file, "the generated schedule replaces it"),
            (
                "enable_tensor_offload",
                self.model.enable_tensor_offload or None,
                "plan it with the file that is written",
            ),
        )
        for name, value, why in exclusive:
            if value is not None:
                raise ValueError(f"{name}: expected none with generate_schedule, got {str(value)!r}; {why}")
        if self.html is not None and self.stage_costs is not None:
            raise ValueError(
                f"html: expected None with stage_costs, whose times the page does not have, got {str(self.html)!r}; "
                "plan the file that is written"
            )

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a microbatch."""
        return self.micro_batch_size

    @property
    def microbatches_at_most(self) -> int:
        """Microbatches of a step."""
        return self.num_microbatches

    @property
    def machine(self) -> Machine:
        """The machine's rates, in units per second."""
        return Machine(
            compute_rate=self.compute_rate * 1e12,
            memory_bandwidth=self.memory_bandwidth * 1e9,
            network_bandwidth=self.network_bandwidth * 1e9,
            link_bandwidth=self.link_bandwidth * 1e9,
            instruction_rate=self.instruction_rate * 1e9,
        )

"""Measure F, I and W of every stage of a pipeline, and its messages, and write them for ``diptych plan``.

    python -m benchmarks.stage_costs --output stage_costs.json --num-layers 4 --pipeline-model-parallel-size 2

The PyTorch executor runs the schedule of a configuration with every backward split, in one process per rank on this
machine. The time of an action starts when its inputs have arrived, and medians over microbatches and steps are written.
Ranks that share cores slow each other down, as in training. The time of a message is half of a round trip between two
otherwise inactive ranks.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks.jobs.generated_schedule import write_table
from diptych.planner.stage_costs import write_stage_costs
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import num_stages
from diptych.plans.schedule.simulate import Costs
from parity.cli.commands import Plan
from parity.report import environment
from reference_torch.rank_pool import RankPool

JOBS = "benchmarks.jobs.generated_schedule"


@dataclass(frozen=True)
class Measurement:
    """Measure the stages of a pipeline on this machine."""

    model: tyro.conf.OmitArgPrefixes[TransformerConfig] = field(default_factory=lambda: Plan().model)
    output: Path = Path("runs/stage_costs.json")
    """JSON file to write, in the format of diptych.planner.stage_costs."""
    micro_batch_size: int = Plan.micro_batch_size
    """Sequences per microbatch."""
    num_microbatches: int = 8
    """Microbatches per step."""
    steps: int = 3
    """Timed steps, after one warm-up step."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "num_microbatches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.model.pipeline_model_parallel_size == 1 or self.model.context_parallel_size > 1:
            raise ValueError(
                "pipeline_model_parallel_size, context_parallel_size: expected a pipeline without context ranks, got "
                f"{self.model.pipeline_model_parallel_size} and {self.model.context_parallel_size}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the stages, write the file, and print the costs."""
    command = tyro.cli(Measurement, prog="stage_costs", args=arguments)
    costs = measure(command.model, command.micro_batch_size, command.num_microbatches, command.steps)
    count = num_stages(command.model)
    about: dict[str, Any] = {"environment": environment(), "micro_batch_size": command.micro_batch_size}
    command.output.parent.mkdir(parents=True, exist_ok=True)
    write_stage_costs(command.output, costs, count, False, about)
    for stage in range(count):
        times = [1e3 * costs.of(name, stage) for name in ("forward", "input_gradient", "weight_gradient")]
        print(f"stage {stage}: F {times[0]:.3g}, I {times[1]:.3g}, W {times[2]:.3g} ms")
    print(f"a message: {1e3 * costs.communication:.3g} ms\nwritten: {command.output}")
    return 0


def measure(config: TransformerConfig, batch: int, num_microbatches: int, steps: int) -> Costs:
    """Measure the seconds of the actions of every stage and of a message.

    Args:
        config: configuration of the model with a pipeline and without context ranks.
        batch: sequences per microbatch.
        num_microbatches: microbatches per step.
        steps: timed steps.
    """
    streams = config.num_residual_streams if config.enable_hyper_connections else 1
    shape = (batch, config.seq_length, streams * config.hidden_size)
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(config.pipeline_model_parallel_size, 300.0) as pool,
    ):
        table = write_table(folder, "split", schedule_to_csv(split(schedule_for(config, num_microbatches))))
        split_config = replace(
            config,
            pipeline_schedule=None,
            pipeline_schedule_file=read_schedule(table),
            microbatch_group_size_per_vp_stage=None,
        )
        ranks = pool.run(f"{JOBS}:time_actions", split_config, batch, num_microbatches, steps)
        messages = pool.run(f"{JOBS}:time_messages", shape, config.compute_dtype, 20)[0]
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for of_rank in ranks:
        for (kind, stage, _), time in of_rank:
            seconds[kind, stage].append(time)
    times = [[median(seconds[kind, stage]) for stage in range(num_stages(config))] for kind in "FIW"]
    return Costs(*times, communication=median(messages))


def split(schedule: Schedule) -> Schedule:
    """Return the schedule with every backward split into I and then W."""
    actions = tuple(
        tuple(
            part
            for action in of_rank
            for part in ([action._replace(kind=k) for k in "IW"] if action.kind == "B" else [action])
        )
        for of_rank in schedule.actions
    )
    return replace(schedule, actions=actions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

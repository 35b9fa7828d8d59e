"""Code that the ranks of benchmarks/generated_schedule.py and benchmarks/stage_costs.py execute.

It runs any schedule over sleeping stages with given costs, and times each action of real stages.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.jobs.pipeline import WIDTH, OurStage, SlowLink, _timed
from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.partition import get_stage
from diptych.plans.schedule.simulate import Costs
from reference_torch.groups import make_groups, make_mesh
from reference_torch.pipeline import forward_step_stages, get_forward_backward_func, get_model, split_backward
from reference_torch.stage import Microbatch, forward_step, model_provider


def time_table(config: TransformerConfig, num_microbatches: int, costs: Costs, steps: int) -> list[float]:
    """Return the seconds of several steps of a schedule over sleeping stages, without the warm-up.

    With a split backward, a stage sleeps for W when it computes the product of W.
    """
    rank = dist.get_rank()
    weights: dict[int, float] = {}

    def build(vp_stage: int | None, **_: Any) -> OurStage:
        stage = get_stage(config, vp_stage or 0, rank)
        made = OurStage(*(float(costs.of(name, stage)) for name in ("forward", "input_gradient", "weight_gradient")))
        weights[id(made.weight)] = made.weight_time
        return made

    built = get_model(build, config, rank)
    stages = built if isinstance(built, list) else [built]
    groups = make_groups(config, make_mesh(config))
    assert groups.pp is not None, "a pipeline has ranks"
    communicator = SlowLink(groups.pp, config)
    communicator.delay = costs.communication
    plain = split_backward._Recorded.add_to_gradient

    def slowly(product: split_backward._Recorded) -> None:
        time.sleep(weights[id(product._parameter)])
        plain(product)

    x = torch.ones(1, 1, WIDTH)

    def step() -> None:
        batches = [iter([x] * num_microbatches) for _ in stages]
        get_forward_backward_func(config)(
            forward_step_func=lambda data, model: (model(next(data)), lambda y: (y.mean(), y.mean())),
            data_iterator=batches if len(stages) > 1 else batches[0],
            model=built,
            num_microbatches=num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            config=config,
            p2p_communicator=communicator,
            pg_collection=groups._replace(embedding=None),
        )

    try:
        with patch.object(split_backward._Recorded, "add_to_gradient", slowly):
            return _timed(step, steps)
    finally:
        communicator.close()


def time_actions(
    config: TransformerConfig, batch: int, num_microbatches: int, steps: int
) -> list[tuple[Action, float]]:
    """Return the seconds of every action of this rank in several steps of real stages, without the warm-up.

    The time of an action starts when its inputs have arrived, and ends before its result is sent.
    """
    step = _real_step(config, batch, num_microbatches)
    found: list[tuple[Action, float]] = []
    for number in range(steps + 1):
        seconds: list[float] = []
        trace: list[Action] = []

        def timed(function: Callable[..., Any], seconds: list[float] = seconds) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                start = time.perf_counter()
                result = function(*arguments)
                seconds.append(time.perf_counter() - start)
                return result

            return run

        deferred = split_backward.DeferredWeightGradients
        with (
            patch.object(forward_step_stages, "forward_step", timed(forward_step_stages.forward_step)),
            patch.object(forward_step_stages, "backward_step", timed(forward_step_stages.backward_step)),
            patch.object(deferred, "run", timed(deferred.run)),
        ):
            step(trace)
        if number:
            found += zip(trace, seconds, strict=True)
    return found


def time_steps(config: TransformerConfig, batch: int, num_microbatches: int, steps: int) -> list[float]:
    """Return the seconds of several steps of real stages, without the warm-up; all ranks start together."""
    return _timed(_real_step(config, batch, num_microbatches), steps)


def _real_step(config: TransformerConfig, batch: int, num_microbatches: int) -> Callable[..., None]:
    """Return a function that runs a step on equal random microbatches and appends its actions to a trace."""
    rank = dist.get_rank()
    built = get_model(lambda **ends: model_provider(config, **ends), config, rank)
    stages = built if isinstance(built, list) else [built]
    groups = make_groups(config, make_mesh(config))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.seq_length + 1))
    part = Microbatch(Batch(tokens[:, :-1], tokens[:, 1:], None), 0, 0, True)

    def step(trace: list[Action] | None = None) -> None:
        data: list[Iterator[Microbatch]] = [iter([part] * num_microbatches) for _ in stages]
        get_forward_backward_func(config)(
            forward_step_func=forward_step,
            data_iterator=data if len(stages) > 1 else data[0],
            model=built,
            num_microbatches=num_microbatches,
            seq_length=config.seq_length,
            micro_batch_size=batch,
            config=config,
            pg_collection=groups,
            trace=trace,
        )

    return step


def time_messages(shape: tuple[int, ...], dtype: str, rounds: int) -> list[float]:
    """Return half of the seconds of each round trip from rank 0 to rank 1; on all ranks but 0, an empty list."""
    rank = dist.get_rank()
    x = torch.zeros(shape, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(rounds if rank < 2 else 0):
        start = time.perf_counter()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
        seconds.append((time.perf_counter() - start) / 2)
    return seconds if rank == 0 else []


def write_table(folder: Path | str, name: str, text: str) -> str:
    """Write a table to a file and return its path."""
    path = Path(folder) / f"{name}.csv"
    path.write_text(text)
    return str(path)

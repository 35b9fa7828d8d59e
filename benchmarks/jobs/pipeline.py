"""Code that the ranks of benchmarks/pipeline.py execute: sleeping stages, a slow link, and schedules of PyTorch."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining import Schedule1F1B as Schedule1F1BOfTorch
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch
from diptych.plans.schedule.placement import V_SCHEDULES, StagePlace, stage_at
from diptych.plans.schedule.simulate import Costs
from reference_torch.groups import make_groups, make_mesh
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func, get_model, split_backward
from reference_torch.stage import Microbatch, forward_step, model_provider

WIDTH = 16
PEERS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1BOfTorch,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
"""Schedules that torch.distributed.pipelining also has."""


class Slept(torch.autograd.Function):
    """The identity that sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Return a copy of x after ``forward`` seconds."""
        ctx.backward_time = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient after ``backward`` seconds."""
        time.sleep(ctx.backward_time)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A linear layer that sleeps in F and in I; subclasses also sleep in W.

    Args:
        forward, input_gradient, weight_gradient: seconds to sleep.
    """

    def __init__(self, forward: float, input_gradient: float, weight_gradient: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.times = (forward, input_gradient)
        self.weight_time = weight_gradient
        self.input_tensor: Tensor | None = None

    def slow_weight(self) -> Tensor:
        """Return the weight, whose gradient takes as long as W."""
        raise NotImplementedError

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Set the input that the stage receives from the previous stage."""
        self.input_tensor = input_tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x = x if self.input_tensor is None else self.input_tensor
        self.input_tensor = None
        return Slept.apply(nn.functional.linear(x, self.slow_weight()), *self.times)


class OurStage(SleepingStage):
    """A stage that sleeps after the gradient of its weight; with a split backward, time_ours adds the sleep of W."""

    def __init__(self, *times: float) -> None:
        super().__init__(*times)
        self.weight.register_hook(self._sleep)

    def _sleep(self, gradient: Tensor | None) -> None:
        """Sleep if there is a gradient; autograd passes None if an operation deferred it."""
        if gradient is not None:
            time.sleep(self.weight_time)

    def slow_weight(self) -> Tensor:
        """Return a leaf, because a split backward records the gradients of leaves alone."""
        return self.weight


class PeerStage(SleepingStage):
    """A stage that sleeps between weight and product, because PyTorch runs parts of the graph for I and for W."""

    def slow_weight(self) -> Tensor:
        """Return the output of an operation that sleeps in backward."""
        return Slept.apply(self.weight, 0.0, self.weight_time)


class SlowLink(P2PCommunicator):
    """A communicator that sends every message after a delay, without blocking the sender."""

    delay = 0.0

    def _post(self, post: Callable[[], dist.Work | None], message: Any) -> Any:
        return _Late(post, self.delay) if self.delay else super()._post(post, message)


class _Late:
    """A send that starts after a delay."""

    def __init__(self, post: Callable[[], dist.Work | None], delay: float) -> None:
        self._begun = threading.Event()
        self._work: dist.Work | None = None
        self._post = post
        threading.Timer(delay, self._begin).start()

    def _begin(self) -> None:
        self._work = self._post()
        self._begun.set()

    def wait(self, timeout: Any) -> None:
        """Wait for the message, as torch.distributed.Work does."""
        self._begun.wait()
        if self._work is not None:
            self._work.wait(timeout)


def time_ours(config: TransformerConfig, num_microbatches: int, costs: Costs, delay: float, steps: int) -> list[float]:
    """Return the seconds of several steps of sleeping stages, without the warm-up; all ranks start together."""
    times = _times(costs)
    built = get_model(lambda **_: OurStage(*times), config)
    stages = built if isinstance(built, list) else [built]
    mesh = make_mesh(config)
    groups = make_groups(config, mesh)
    assert groups.pp is not None, "a pipeline has ranks"
    communicator = SlowLink(groups.pp, config)
    communicator.delay = delay
    plain = split_backward._Recorded.add_to_gradient

    def slowly(*arguments: Any) -> None:
        time.sleep(times[-1])
        plain(*arguments)

    split_backward._Recorded.add_to_gradient = slowly  # sleeps for W when W is computed
    try:
        x = torch.ones(1, 1, WIDTH)

        def step() -> None:
            batches = [iter([x] * num_microbatches) for _ in stages]
            get_forward_backward_func(config)(
                forward_step_func=lambda data, model: (model(next(data)), lambda y: (y.mean(), y.mean())),
                data_iterator=batches if len(stages) > 1 else batches[0],
                model=stages if len(stages) > 1 else stages[0],
                num_microbatches=num_microbatches,
                seq_length=1,
                micro_batch_size=1,
                config=config,
                p2p_communicator=communicator,
                pg_collection=groups._replace(embedding=None),
            )

        return _timed(step, steps)
    finally:
        split_backward._Recorded.add_to_gradient = plain
        communicator.close()


def time_peer(name: str, stages_per_rank: int, num_microbatches: int, costs: Costs, steps: int) -> list[float]:
    """Return the seconds of several steps of the same stages in torch.distributed.pipelining."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    count = size * stages_per_rank
    example = torch.ones(1, 1, WIDTH)
    placement = "v" if name in V_SCHEDULES else "loop"
    numbers = [stage_at(StagePlace(i, rank), size, placement) for i in range(stages_per_rank)]
    stages = [
        PipelineStage(PeerStage(*_times(costs)), number, count, torch.device("cpu"), example) for number in numbers
    ]
    given = stages if stages_per_rank > 1 else stages[0]
    schedule = PEERS[name](given, num_microbatches, loss_fn=lambda y, _: y.mean())  # pyright: ignore
    x = torch.ones(num_microbatches, 1, WIDTH)

    def step() -> None:
        first = 0 in numbers
        last = count - 1 in numbers
        schedule.step(*((x,) if first else ()), **({"target": x} if last else {}))

    return _timed(step, steps)


def _times(costs: Costs) -> tuple[float, float, float]:
    """Return the seconds of F, I and W, which are equal for all stages."""
    return float(costs.of("forward", 0)), float(costs.of("input_gradient", 0)), float(costs.of("weight_gradient", 0))


def peak_bytes(config: TransformerConfig, batch: int, num_microbatches: int) -> tuple[int, int]:
    """Return the peak bytes of a step of a real stage above its parameters, with sent outputs freed and not freed."""
    groups = make_groups(config, make_mesh(config))
    assert groups.pp is not None, "a pipeline has ranks"
    tokens = torch.zeros(batch, config.seq_length, dtype=torch.int32).numpy()
    peaks = []
    for free in (True, False):
        settings = replace(config, deallocate_pipeline_outputs=free)
        model = get_model(lambda c=settings, **ends: model_provider(c, **ends), settings, groups.pp_rank)
        communicator = P2PCommunicator(groups.pp, settings)

        def step(c: TransformerConfig = settings, m: Any = model, messages: P2PCommunicator = communicator) -> None:
            parts: Iterator[Microbatch] = iter([Microbatch(Batch(tokens, tokens), 0, 0, True)] * num_microbatches)
            m.zero_grad(set_to_none=False)
            get_forward_backward_func(c)(
                forward_step_func=forward_step,
                data_iterator=parts,
                model=m,
                num_microbatches=num_microbatches,
                seq_length=c.seq_length,
                micro_batch_size=batch,
                config=c,
                p2p_communicator=messages,
                pg_collection=groups,
            )

        step()
        peaks.append(_peak_resident(step))
        communicator.close()
    return peaks[0], peaks[1]


def _peak_resident(step: Callable[[], object]) -> int:
    """Return the growth of the peak memory of this process during a step.

    The result is exact for large tensors if each allocation is a separate mapping (MALLOC_MMAP_THRESHOLD_). This
    function works on Linux only.
    """

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return status("VmHWM") - before


def _timed(step: Callable[[], None], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]

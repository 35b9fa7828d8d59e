"""Stages of other people's making, and 1F1B written by hand over the compound calls, on ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from diptych.plans.config import TransformerConfig
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func, steps
from tests.pipeline.jobs import gradients_of, groups_of


class Toy(torch.nn.Module):
    """A stage of one linear layer, with as many tensors in as out.

    Args:
        stage: its number; decides the initial values.
        tensors: how many go on to the next stage; of two, the second is made of the first.
    """

    def __init__(self, stage: int, tensors: int = 1) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.tensors = stage, tensors
        self.linear = torch.nn.Linear(4, 4, dtype=torch.float64)

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.entered = input_tensor

    def forward(self, data: torch.Tensor) -> Any:
        entered = data if self.stage == 0 else self.entered
        first, *others = entered if isinstance(entered, list) else [entered]
        out = self.linear(sum(others, first)).exp()
        return out if self.tensors == 1 else [out, out * out, out.sin()][: self.tensors]


class Passing(Toy):
    """A stage that returns its input; its map is of no use, and frozen."""

    def __init__(self, stage: int, tensors: int = 1) -> None:
        super().__init__(stage, tensors)
        self.requires_grad_(False)

    def forward(self, data: torch.Tensor) -> Any:
        return data if self.stage == 0 else self.entered


def toy_data(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 3, 4, dtype=torch.float64, generator=generator) for _ in range(count)]


def toy_step(data_iterator: Iterator[torch.Tensor], model: Toy) -> tuple[Any, Any]:
    """The mean of everything the last stage gives."""

    def reduce(output: Any, non_loss_data: bool = False) -> Any:
        loss = sum(tensor.mean() for tensor in (output if isinstance(output, list) else [output]))
        return {"shape": [*output.shape]} if non_loss_data else (loss, {"loss": loss, "list": [loss]})

    return model(next(data_iterator)), reduce


def toy_shapes(received: list, sent: list, tensors: int) -> tuple[list, list]:
    return [(1, 3, 4)] * tensors, [(1, 3, 4)] * tensors


def toy_outcome(stages: Sequence[Toy], count: int) -> dict[str, np.ndarray]:
    """Gradients of the same stages in one process, by stage and name."""
    for data in toy_data(count):
        passed: Any = data
        for stage in stages:
            stage.set_input_tensor(passed)
            passed = stage(data)
        (toy_step(iter([data]), stages[-1])[1](passed)[0] / count).backward()
    return {f"{i}.{name}": gradient for i, stage in enumerate(stages) for name, gradient in gradients_of(stage).items()}


def run_toy(passing: int | None, tensors: int, config: TransformerConfig, count: int) -> dict[str, np.ndarray]:
    """This rank's gradients, by stage and name, and that the data were left alone."""
    groups = groups_of(config)
    stage = (Passing if groups.pp_rank == passing else Toy)(groups.pp_rank, tensors)
    data = toy_data(count)
    get_forward_backward_func(config)(
        forward_step_func=toy_step,
        data_iterator=iter(data),
        model=stage,
        num_microbatches=count,
        seq_length=3,
        micro_batch_size=1,
        config=config,
        adjust_tensor_shapes_fn=lambda received, sent: toy_shapes(received, sent, tensors),
        pg_collection=groups,
    )
    assert all(torch.equal(a, b) for a, b in zip(data, toy_data(count), strict=True)), "data were overwritten"
    return {f"{groups.pp_rank}.{name}": gradient for name, gradient in gradients_of(stage).items()}


def collect_shapes(config: TransformerConfig, count: int) -> list[Any]:
    """What a last stage returns that gives no loss."""
    groups = groups_of(config)
    with torch.no_grad():
        return get_forward_backward_func(config)(
            forward_step_func=toy_step,
            data_iterator=iter(toy_data(count)),
            model=Toy(groups.pp_rank),
            num_microbatches=count,
            seq_length=3,
            micro_batch_size=1,
            config=config,
            forward_only=True,
            collect_non_loss_data=True,
            adjust_tensor_shapes_fn=lambda received, sent: toy_shapes(received, sent, 1),
            pg_collection=groups,
        )


# 1F1B by hand.


def one_forward_one_backward(config: TransformerConfig, count: int) -> dict[str, np.ndarray]:
    """The loop of Megatron-core's schedule over the communicator's compound calls, and this rank's gradients."""
    groups = groups_of(config)
    rank, size = groups.pp_rank, config.pipeline_model_parallel_size
    first, last = rank == 0, rank == size - 1
    assert groups.pp is not None
    stage, link, data = Toy(rank), P2PCommunicator(groups.pp, config), iter(toy_data(count))
    shapes = [(1, 3, 4)]
    in_flight: list[tuple[Any, Any]] = []
    reports: list[Any] = []

    def forward(entered: Any) -> Any:
        entered = None if entered is None else entered[0].requires_grad_()
        output, _ = steps.forward_step(toy_step, data, stage, count, entered, reports, config, is_last_stage=last)
        in_flight.append((entered, output))
        return output

    def backward(gradient: Any) -> Any:
        entered, output = in_flight.pop(0)
        gradient = steps.backward_step(entered, output, gradient)
        return None if gradient is None else [gradient]

    warmup = min(size - 1 - rank, count)
    for _ in range(warmup):
        output = forward(link.recv_forward(shapes, first))
        link.send_forward([output], last)
        steps.deallocate_output_tensor(output, True)
    entered = link.recv_forward(shapes, first) if count > warmup else None
    for number in range(count - warmup):
        output = forward(entered)
        received = link.send_forward_recv_backward([output], shapes, last)
        if not last:
            steps.deallocate_output_tensor(output, True)
        gradient = backward(received)
        if number + 1 < count - warmup:
            entered = link.send_backward_recv_forward(gradient, shapes, first)
        else:
            link.send_backward(gradient, first)
    for _ in range(warmup):
        link.send_backward(backward(link.recv_backward(shapes, last)), first)
    link.end_step()
    link.close()
    return {f"{rank}.{name}": gradient for name, gradient in gradients_of(stage).items()}

"""Steps of a program of user-written stages: on ranks, and composed in one process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diptych.plans.schedule.placement import place_of
from reference_torch.groups import ProcessGroups, make_groups, make_mesh
from reference_torch.pipeline import get_forward_backward_func
from reference_torch.pipeline.steps import as_list
from tests.fuzz.grammars._pipeline_stages import BAD_LOSSES, LENGTH, WIDTH, Program, Stage


class Cut(Exception):
    """A stage whose output has no gradient although earlier parameters need one; the argument is its number."""


def build(program: Program, numbers: Sequence[int]) -> list[Stage]:
    """Make stages; those of one rank share one linear layer in their operations of that name."""
    placement = program.config.placement
    shared = {}
    stages = [Stage(program, number) for number in numbers]
    for stage in stages:
        rank = place_of(stage.number, program.pp_size, placement).pp_rank
        for operation in stage.operations:
            if operation.name == "shared":
                operation.linear = shared.setdefault(rank, operation.linear)
    return stages


class Result(NamedTuple):
    """The results of a step."""

    reports: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def microbatches(program: Program, replica: int, step: int) -> list[Tensor]:
    """Return the data of one replica."""
    generator = torch.Generator().manual_seed(17 * replica + step)
    lengths = program.lengths or (LENGTH,) * program.num_microbatches
    dtype = getattr(torch, program.config.compute_dtype)
    return [torch.rand(program.size, length, WIDTH, generator=generator).to(dtype) for length in lengths]


def iterate(program: Program, data: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the data, or one buffer with each in turn."""
    if program.data == "fresh":
        yield from data
        return
    buffer = torch.empty_like(data[0])
    for each in data:
        yield buffer.copy_(each)


def step_function(program: Program) -> Callable[..., tuple[Any, Callable[..., Any]]]:
    """Return the forward_step_func of a program."""

    def reduce(output: Tensor) -> Any:
        loss = (output.float() if program.bf16 else output).square().mean()
        if program.reducer in BAD_LOSSES:
            return BAD_LOSSES[program.reducer](loss), {"loss": loss}
        if program.reducer == "tokens":
            return loss * output.shape[1], output.shape[1], {"loss": loss}
        return loss, {"loss": loss}

    def step(data_iterator: Iterator[Tensor], model: Stage) -> tuple[Any, Callable[..., Any]]:
        return model(next(data_iterator)), reduce

    return step


def plain(program: Program) -> dict[int, Result]:
    """Compose the stages in this process, with copies between them; return the result of each replica."""
    replicas = [build(program, range(len(program.stages))) for _ in range(program.replicas)]
    reports: list[list[float]] = [[] for _ in replicas]
    for step in range(program.steps):
        earlier = [[p.grad for p in _parameters(stages)] for stages in replicas]
        num_tokens = 0
        for number, stages in enumerate(replicas):
            for stage in stages:
                stage.zero_grad()
            for data in iterate(program, microbatches(program, number, step)):
                loss, tokens, report = _through(stages, data, step_function(program))
                reports[number].append(report)
                num_tokens += tokens
                if loss.requires_grad and not program.forward_only:
                    (loss * (1.0 if program.per_token else 1.0 / (program.num_microbatches * tokens))).backward()
        _average(replicas, float(num_tokens) if program.per_token else program.replicas, earlier)
    return {number: _result(stages, reports[number]) for number, stages in enumerate(replicas)}


def _parameters(stages: list[Stage]) -> list[nn.Parameter]:
    return [*dict.fromkeys(p for stage in stages for p in stage.parameters())]


def _average(replicas: list[list[Stage]], divisor: float, earlier: list[list[Tensor | None]]) -> None:
    """Sum gradients over replicas, divide them, and add those of earlier steps."""
    owners = [_parameters(stages) for stages in replicas]
    for copies, before in zip(zip(*owners, strict=True), zip(*earlier, strict=True), strict=True):
        given = [p.grad for p in copies if p.grad is not None]
        if not given:
            for parameter, old in zip(copies, before, strict=True):
                parameter.grad = old
            continue
        mean = sum(given[1:], given[0]) / divisor if divisor != 1.0 else given[0]
        for parameter, old in zip(copies, before, strict=True):
            parameter.grad = mean.clone() if old is None else old + mean


def _through(stages: Sequence[Stage], data: Tensor, step_func: Any) -> tuple[Tensor, int, float]:
    passed: Any = None
    reduce: Any = None
    for stage in stages:
        if passed is not None:
            copies = [_copy(x) for x in as_list(passed)]
            stage.set_input_tensor(copies[0] if len(copies) == 1 else copies)
        learns = passed is not None or any(parameter.requires_grad for parameter in stage.parameters())
        passed, reduce = step_func(iter([data]), stage)
        if not stage.program.forward_only and learns and not any(x.requires_grad for x in as_list(passed)):
            raise Cut(stage.number)
    loss, *tokens, report = reduce(passed)
    return loss, tokens[0] if tokens else 1, report["loss"].item()


def _copy(x: Tensor) -> Tensor:
    """Return a copy that requires a gradient, as a pipeline sends to the next stage."""
    return x.clone() if x.requires_grad else x.clone().requires_grad_(torch.is_grad_enabled())


def _named(stage: Stage, what: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in getattr(stage, f"named_{what}")():
        yield f"{stage.number}.{name}", tensor


def _result(stages: Sequence[Stage], reports: list[float]) -> Result:
    gradients = {name: p.grad for stage in stages for name, p in _named(stage, "parameters") if p.grad is not None}
    buffers = {name: b for stage in stages for name, b in _named(stage, "buffers") if "scratch" not in name}
    buffers |= {f"{stage.number}.stored": stored for stage in stages for stored in stage.stored}
    return Result(reports, gradients, buffers)


_groups: dict[tuple[int, int], ProcessGroups] = {}


def _groups_of(program: Program) -> ProcessGroups:
    key = program.pp_size, program.replicas
    if key not in _groups:
        _groups[key] = (
            make_groups(program.config, make_mesh(program.config)) if dist.is_initialized() else ProcessGroups()
        )
    return _groups[key]


def run(program: Program) -> tuple[int, Result]:
    """Run the program on this rank; return its replica and the results of its stages."""
    config = program.config
    groups = _groups_of(program)
    placement = config.placement
    own = [n for n in range(len(program.stages)) if place_of(n, program.pp_size, placement).pp_rank == groups.pp_rank]
    stages = build(program, own)
    reports: list[float] = []
    arguments: dict[str, Any] = {}
    if program.tensors > 1:
        shapes = [(program.size, LENGTH, WIDTH)] * program.tensors
        arguments["adjust_tensor_shapes_fn"] = lambda received, sent: (shapes, shapes)
    for step in range(program.steps):
        data = microbatches(program, groups.dp_rank, step)
        iterators = [iterate(program, data) for _ in stages]
        with torch.set_grad_enabled(not program.forward_only):
            found = get_forward_backward_func(config)(
                forward_step_func=step_function(program),
                data_iterator=iterators if program.virtual > 1 else iterators[0],
                model=stages if program.virtual > 1 else stages[0],
                num_microbatches=program.num_microbatches,
                seq_length=LENGTH,
                micro_batch_size=program.size,
                config=config,
                forward_only=program.forward_only,
                pg_collection=groups if program.pp_size > 1 else None,
                **arguments,
            )
        reports += [report["loss"].item() for report in found]
    return groups.dp_rank, _result(stages, reports)

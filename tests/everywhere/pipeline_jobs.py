"""Pipelines of others' models on ranks, and the same microbatches through the single-device model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from reference_torch.pipeline import PipelineExecutor, split_batch, split_model
from reference_torch.recompute import recompute_modules
from tests.everywhere.torch_models import MODELS, build


class Case(NamedTuple):
    """A pipeline of one of the models."""

    model: str
    cuts: tuple[str, ...]
    schedule: str = "1f1b"
    num_microbatches: int = 4
    steps: int = 2
    replicas: int = 1
    wrap: str = ""
    """What is applied to stages: ddp, fsdp, parts fsdp, compile, checkpoint, recompute, autocast."""
    dtype: str = "float64"
    deallocate: bool = False
    with_example: bool = False


class Outcome(NamedTuple):
    """Losses of every step, and gradients and buffers after the last one."""

    losses: list[list[float]]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def make(case: Case) -> nn.Module:
    """The model without dropout, whose masks depend on the order of microbatches, and without parameters of zero."""
    model = build(case.model).to(getattr(torch, case.dtype))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    if hasattr(model, "config"):
        model.config.use_cache = False  # a recomputed layer would append to it twice
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def data(case: Case, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of all replicas, and what the outputs are multiplied with."""
    generator = torch.Generator().manual_seed(step)
    batch = 2 * case.num_microbatches * case.replicas
    (key,) = MODELS[case.model].inputs()
    if key != "input_ids":
        inputs = {key: torch.randn(batch, 3, 32, 32, generator=generator).to(getattr(torch, case.dtype))}
        shape: tuple[int, ...] = (batch, 2)
    else:
        inputs = {key: torch.randint(0, 60, (batch, 12), generator=generator)}
        shape = (batch, 12, 60)
    return inputs, torch.randn(shape, generator=generator, dtype=torch.float64)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss with a different gradient at every element."""
    logits = output if isinstance(output, Tensor) else output.logits
    return (logits.double() * target).sum()


def unsharded(case: Case) -> Outcome:
    """The same microbatches, one after the other, and the mean over replicas."""
    model = make(case)
    losses = []
    for step in range(case.steps):
        inputs, target = data(case, step)
        parts = [split_batch(each, case.replicas * case.num_microbatches) for each in (inputs, target)]
        losses.append([])
        for part, goal in zip(*parts, strict=True):
            with around(case):
                loss = loss_of(model(**part), goal)
            (loss / len(parts[0])).backward()
            losses[-1].append(loss.item())
    return Outcome(losses, *state(model))


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers by name, without those of wrappers."""

    def plain(name: str) -> str:
        for prefix in ("module.", "_orig_mod."):
            name = name.replace(prefix, "")
        return name

    def whole(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    named = model.named_parameters(remove_duplicate=False)
    gradients = {plain(name): whole(p.grad) for name, p in named if p.grad is not None}
    return gradients, {plain(name): whole(b) for name, b in model.named_buffers() if b.is_floating_point()}


@contextmanager
def around(case: Case) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.wrap == "autocast"):
        yield


def run(case: Case) -> Outcome:
    """One rank of a pipeline with replicas, on a mesh (replica, stage)."""
    ranks = dist.get_world_size() // case.replicas
    mesh = init_device_mesh("cpu", (case.replicas, ranks), mesh_dim_names=("dp", "pp"))
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    example = {"example_kwargs": split_batch(data(case, 0)[0], case.num_microbatches)[0]} if case.with_example else {}
    stages: list[Any] = split_model(make(case), case.cuts, **example)
    virtual = case.schedule in ("zb-v", "v-half", "v-min", "dualpipe-v")
    for number in range(len(stages)):
        place = number % ranks if not virtual or number < ranks else 2 * ranks - 1 - number
        stages[number] = wrapped(case, stages[number], mesh["dp"]) if place == rank else None
    losses = []
    with PipelineExecutor(
        stages,
        case.schedule,
        case.num_microbatches,
        loss_of,
        group=mesh.get_group("pp"),
        deallocate_outputs=case.deallocate,
        timeout=30.0,
    ) as pipeline:
        for step in range(case.steps):
            inputs, target = data(case, step)
            mine = [split_batch(each, case.replicas)[replica] for each in (inputs, target)]
            with around(case):
                found = pipeline.step(*(split_batch(each, case.num_microbatches) for each in mine))
            losses.append([loss.item() for loss in found])
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for stage in stages:
        if stage is not None:
            found = state(stage)
            gradients |= found[0]
            buffers |= found[1]
    return Outcome(losses, gradients, buffers)


def wrapped(case: Case, stage: Any, mesh: Any) -> nn.Module:
    """Apply what the case says to a stage."""
    blocks = [module for name, module in stage.named_modules() if name.rpartition(".")[2].isdigit()]
    if case.wrap == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    if case.wrap == "fsdp":
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(stage, mesh=mesh)
    if case.wrap == "parts fsdp":  # roots of their own, none of them the stage
        ends = [module for name, module in stage.named_modules() if name.endswith((".norm", "embed_tokens", "lm_head"))]
        for part in (*blocks, *ends):
            if [*part.parameters()]:
                fully_shard(part, mesh=mesh)
    if case.wrap == "compile":
        for block in blocks:
            block.compile(backend="aot_eager")
    if case.wrap == "checkpoint":
        for block in blocks:
            block.forward = _checkpointed(block.forward)
    if case.wrap == "recompute":
        here = {name for name, _ in stage.named_modules()}
        for pattern, names in MODELS[case.model].recomputed.items():
            if pattern.rpartition(".*")[0] in here:
                recompute_modules(stage, {pattern: names})
    return stage


def _checkpointed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

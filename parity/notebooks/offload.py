"""Training with and without offload, for notebook 05."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from diptych.planner.offload_times import simulate_offload, use_seconds
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import load_corpus
from diptych.plans.offload import OffloadPlan, layer_storages, plan_offload, step_uses
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference
from reference_torch.offload.layer import OffloadedLayer
from reference_torch.train import Trainer as TorchTrainer

MODEL = TransformerConfig(
    hidden_size=16,
    num_layers=6,
    num_attention_heads=2,
    seq_length=8,
    params_dtype="float64",
    enable_tensor_offload=True,
)
"""A small model with offload, one layer prefetched."""
TRAIN = TrainConfig(train_iters=8, global_batch_size=2, lr=1e-3, lr_warmup_iters=1, eval_iters=1)


class Training(NamedTuple):
    """Results of a few training steps."""

    losses: list[float]
    """Loss of each step, nats per token."""
    parameters: list[dict[str, np.ndarray]]
    """Parameters after each step, by name."""
    trace: list[str]
    """Moves and uses of the last traced step, in the notation of TensorOffloadManager.trace."""
    statistics: dict[str, Any]
    """Counts and bytes of the moves in PyTorch; empty in JAX and without offload."""


def train_torch(config: TransformerConfig, steps: int, lose_updates: bool = False) -> Training:
    """Train in PyTorch.

    Args:
        config: the model.
        steps: number of steps.
        lose_updates: the failing variant, which drops an updated layer without a copy back to the host.
    """
    patch = mock.patch.object(OffloadedLayer, "note_change") if lose_updates else nullcontext()
    with patch:
        trainer = TorchTrainer(config, TRAIN, load_corpus(DataConfig()), device="cpu")
        losses = []
        parameters = []
        trace = []
        for step in range(steps):
            if trainer.offload is not None:
                trainer.offload.trace = []
            losses.append(trainer.train_step(step).loss)
            trace = list(trainer.offload.trace or []) if trainer.offload is not None else []
            parameters.append({name: value.copy() for name, value in trainer.parameters().items()})
        statistics = dict(trainer.offload.stats) if trainer.offload is not None else {}
    return Training(losses, parameters, trace, statistics)


def train_jax(config: TransformerConfig, steps: int) -> Training:
    """Train in JAX. The trace is that of the compiled step."""
    trainer = JaxTrainer(config, TRAIN, load_corpus(DataConfig()))
    if trainer.offload is not None:
        trainer.offload.trace = []
    losses = []
    parameters = []
    for step in range(steps):
        losses.append(trainer.train_step(step).loss)
        parameters.append({name: np.array(value) for name, value in trainer.parameters().items()})
    return Training(losses, parameters, list(trainer.offload.trace or []) if trainer.offload is not None else [], {})


def planned_trace(config: TransformerConfig, first: bool = False) -> list[str]:
    """Return the moves and uses that the plan prescribes for a training step.

    Args:
        config: the model.
        first: the step starts with all layers on the host and ends so, as in JAX. Otherwise it follows another step.
    """
    return " ".join(map(str, step_plan(config, first).moves)).split()


def step_plan(config: TransformerConfig, first: bool = False) -> OffloadPlan:
    """Return the plan of a training step; see planned_trace."""
    uses = step_uses(range(config.num_layers))
    ahead = config.tensor_offload_num_prefetch_layers
    if first:
        return plan_offload(uses, layer_storages(config), ahead, then=())
    return plan_offload(uses, layer_storages(config), ahead, resident=(0,))


def parameter_error(ours: Training, theirs: Training, step: int) -> float:
    """Return the largest relative difference of any parameter after a step."""
    expected = theirs.parameters[step]
    return max(relative_difference(value, expected[name]) for name, value in ours.parameters[step].items())


RUNS: Mapping[str, Callable[[TransformerConfig, int], Training]] = {
    "PyTorch, plain": lambda config, steps: train_torch(replace(config, enable_tensor_offload=False), steps),
    "PyTorch, offload": train_torch,
    "JAX, plain": lambda config, steps: train_jax(replace(config, enable_tensor_offload=False), steps),
    "JAX, offload": train_jax,
    "failing": lambda config, steps: train_torch(config, steps, lose_updates=True),
}
"""The trainings that are compared, by name."""

PAIRS = {
    "PyTorch, offload and plain": ("PyTorch, offload", "PyTorch, plain"),
    "JAX, offload and plain": ("JAX, offload", "JAX, plain"),
    "both backends, offload": ("PyTorch, offload", "JAX, offload"),
    "failing: no copy back": ("failing", "PyTorch, plain"),
}
"""Names of the two trainings of each curve, by its label."""


def train_all(depths: Sequence[int], steps: int) -> dict[int, dict[str, Training]]:
    """Return every training of RUNS, by number of layers and name.

    Args:
        depths: numbers of layers.
        steps: number of training steps.
    """
    return {
        depth: {name: run(replace(MODEL, num_layers=depth), steps) for name, run in RUNS.items()} for depth in depths
    }


def errors_by_step(trained: Mapping[str, Training]) -> dict[str, list[float]]:
    """Return the largest relative difference of any parameter after each step, by label of PAIRS."""
    steps = range(len(trained["failing"].losses))
    return {
        label: [parameter_error(trained[ours], trained[theirs], step) for step in steps]
        for label, (ours, theirs) in PAIRS.items()
    }


def errors_by_depth(trained: Mapping[int, Mapping[str, Training]]) -> dict[str, list[float]]:
    """Return the differences after the last step at each number of layers; see errors_by_step."""
    errors = [errors_by_step(runs) for runs in trained.values()]
    return {label: [entry[label][-1] for entry in errors] for label in PAIRS}


def step_costs(
    config: TransformerConfig, tokens: Sequence[int], aheads: Sequence[int], flops: float, bandwidth: float
) -> dict[str, list[float]]:
    """Return the simulated time of a step, relative to the larger of computation and copies.

    Args:
        config: the model.
        tokens: tokens per microbatch.
        aheads: numbers of layers that are prefetched; one curve each.
        flops: operations per second of the device.
        bandwidth: bytes per second of the link, which copies in one direction at a time.
    """
    storages = layer_storages(config)
    curves = {}
    for ahead in aheads:
        plan = plan_offload(step_uses(range(config.num_layers)), storages, ahead)
        times = [simulate_offload(plan, use_seconds(config, count, flops), storages, bandwidth) for count in tokens]
        curves[f"{ahead} ahead"] = [time.makespan / max(time.compute, time.transfer) for time in times]
    return curves


def step_bytes(config: TransformerConfig, aheads: Sequence[int]) -> dict[str, list[float]]:
    """Return peak memory and copied bytes of a step, in GiB, for numbers of prefetched layers."""
    storages = layer_storages(config)
    plans = [plan_offload(step_uses(range(config.num_layers)), storages, ahead) for ahead in aheads]
    return {
        "on the device at most": [plan.peak_bytes / 2**30 for plan in plans],
        "to the device per step": [plan.bytes_in / 2**30 for plan in plans],
        "to the host per step": [plan.bytes_out / 2**30 for plan in plans],
    }

"""What the offload tests run on ranks."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.offload import OffloadPlan, Use, plan_activations, plan_offload, rank_layers, rank_uses
from diptych.plans.training import microbatches
from reference_torch.groups import make_mesh
from reference_torch.offload import TensorOffloadManager
from reference_torch.train import Trainer
from tests.backends import tiny_corpus


def events(plan: OffloadPlan) -> list[str]:
    """A plan as a manager traces it."""
    return " ".join(map(str, plan.moves)).split()


def activation_events(
    uses: Sequence[Use], n: int, then: Sequence[Use] | None = None, stay: Sequence[int] = ()
) -> list[str]:
    """A plan of activations as a manager traces it."""
    steps = plan_activations(uses, n, then, stay)
    return [event for event in " ".join(map(str, steps)).split() if "a" in event]


def pages_freed_and_taken(size: int) -> tuple[int, int]:
    """Bytes of this process's pages that go when three layers of so many bytes leave, and come when one is fetched."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    layers = [nn.Linear(1, size // 4, bias=False) for _ in range(3)]
    manager = TensorOffloadManager(num_prefetch_layers=0)
    for number, layer in enumerate(layers):
        manager.register_layer(number, layer)
    manager.offload_all_layers()  # the buffer of NaN behind empty storages has been made
    for number in range(3):
        manager.require(number)
    gc.collect()
    full = resident()
    manager.offload_all_layers()
    away = resident()
    manager.require(1)
    taken = resident() - away
    manager.close()
    return full - away, taken


def train_a_step(config: TransformerConfig, train: TrainConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Train and validate on this rank: what came out and what differs from the plan; all parameters."""
    mesh = make_mesh(config) if config.pipeline_model_parallel_size > 1 else None
    trainer = Trainer(config, train, tiny_corpus(), device="cpu", mesh=mesh)
    manager = trainer.offload
    manager.trace = []
    result = trainer.train_step(0)
    found: dict[str, Any] = {"loss": result.loss, "norm": result.grad_norm, "validation": trainer.validation_loss()}
    if manager.enabled:
        rank, count = trainer._groups.pp_rank, microbatches(train, trainer._groups.dp_size)[1]
        validation = rank_uses(config, count, rank, forward_only=True)
        uses = rank_uses(config, count, rank) + [Use("S", layer) for layer in rank_layers(config, rank)] + validation
        plan = plan_offload(uses, manager.storages(), manager.num_prefetch_layers, then=validation)
        stats = manager.stats
        parameters = [event for event in manager.trace if "a" not in event]
        found |= {"trace": parameters, "plan": events(plan)}
        found["bytes"], found["planned bytes"] = (
            [stats["peak_bytes"], stats["misses"]],
            [plan.peak_bytes, len(plan.misses)],
        )
        if config.enable_activation_offload:
            found["activations"] = [event for event in manager.trace if "a" in event]
            blocks = [block for stage in trainer.stages for block in stage.decoder.blocks if block.kind == "full"]
            whole = [layer for block in blocks for layer in block.layers]
            found["planned activations"] = activation_events(uses, manager.num_prefetch_layers, validation, whole)
            return found, trainer.parameters()
        found["bytes"] += [stats["bytes_in"], stats["bytes_out"]]
        found["planned bytes"] += [plan.bytes_in, plan.bytes_out]
    return found, trainer.parameters()

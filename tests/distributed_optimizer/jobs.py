"""What tests of the distributed optimizer run on every rank of a pool."""

from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Batch
from parity.ranks import make_trainer
from reference_torch.transformer import GPTModel
from tests.backends import tiny_corpus


def held_bytes(config: TransformerConfig, train: TrainConfig) -> dict[str, int]:
    """Bytes that this rank has after a step, by the name of the field of RankMemory."""
    trainer = make_trainer(config, train, tiny_corpus())
    trainer.train_step(0)
    parameters = list({id(p): p for stage in trainer.stages for p in stage.parameters()}.values())
    found = Counter(
        parameters=sum(p.nbytes for p in parameters),
        gradients=sum(p.grad.nbytes for p in parameters),
        moments=0,
        master_weights=0,
    )
    for state in trainer._optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                found["master_weights" if name == "master_weight" else "moments"] += value.nbytes
    return dict(found)


def gradients_with_fsdp(config: TransformerConfig, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss of all ranks and whole gradients, of a model whose layers fully_shard divides among them."""
    model = GPTModel(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.decoder.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank, size = dist.get_rank(), len(batch.tokens) // dist.get_world_size()
    own = slice(rank * size, (rank + 1) * size)
    tokens, targets = (torch.from_numpy(x[own]) for x in (batch.tokens, batch.targets))
    loss = model(tokens, targets, samples=torch.arange(len(batch.tokens))[own])
    loss.backward()
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    gradients = {name: parameter.grad.full_tensor().numpy() for name, parameter in model.named_parameters()}
    return total.item(), gradients

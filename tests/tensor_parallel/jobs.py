"""What tests of tensor parallelism run on every rank of a pool."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from diptych.plans.config import TrainConfig, TransformerConfig
from parity.ranks import make_trainer
from reference_torch.tensor_parallel import TensorParallel
from tests.backends import tiny_corpus
from tests.rank_processes import end_groups


def gradients_of_logits(tokens: bool) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of a loss of whole logits: of this rank's hidden states, summed over ranks, and of its weight."""
    ranks = TensorParallel(dist.group.WORLD, tokens)
    hidden, weight, weights = (torch.from_numpy(x) for x in logit_inputs())
    hidden = ranks.own_tokens(hidden).clone().requires_grad_()
    weight = weight.chunk(ranks.size)[ranks.rank].clone().requires_grad_()
    (ranks.gather_logits(ranks.enter(hidden) @ weight.T) * weights).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad.numpy(), weight.grad.numpy()


def logit_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states [B, T, D], weight of the head [V, D], and a weight for each logit [B, T, V]."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 4, 6)), rng.normal(size=(8, 6)), rng.normal(size=(2, 4, 8))


def collectives(config: TransformerConfig, train: TrainConfig) -> Counter[str]:
    """The collectives of loss and gradients of one batch, by name, without those that make the results whole."""
    trainer = make_trainer(config, train, tiny_corpus())
    batch = tiny_corpus().batch(0, train.global_batch_size, config.seq_length)
    found: Counter[str] = Counter()
    with mock.patch.multiple(
        dist, **{name: _counting(found, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    ):
        trainer.loss_and_gradients(batch)
    return found


def _counting(found: Counter[str], name: str):
    function = getattr(dist, name)

    def counted(*args, **kwargs):
        found[name] += 1
        return function(*args, **kwargs)

    return counted


def losses_and_gradients(configs: Sequence[TransformerConfig], train: TrainConfig, step: int) -> list[Any]:
    """Loss and gradients of one batch for each configuration, on the first rank; nothing on the others."""
    found = []
    for config in configs:
        batch = tiny_corpus().batch(step, train.global_batch_size, config.seq_length)
        found.append(make_trainer(config, train, tiny_corpus()).loss_and_gradients(batch, step))
        end_groups()
    return found if dist.get_rank() == 0 else []


def embeddings(config: TransformerConfig, train: TrainConfig) -> list[np.ndarray]:
    """The copies of the embedding that this rank has before training, one for each stage that has one."""
    trainer = make_trainer(config, train, tiny_corpus())
    named = [pair for stage in trainer.stages for pair in stage.named_parameters()]
    return [parameter.detach().numpy() for name, parameter in named if name == "embedding.weight"]

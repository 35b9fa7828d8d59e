"""What tests of tensor parallelism run on every rank of a pool."""

from collections import Counter
from unittest import mock

import torch.distributed as dist

from diptych.plans.config import TrainConfig, TransformerConfig
from parity.ranks import make_trainer
from tests.backends import tiny_corpus


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

"""What tests of the distributed optimizer run on every rank of a pool."""

from diptych.plans.config import TrainConfig, TransformerConfig
from parity.ranks import make_trainer
from tests.backends import tiny_corpus


def moment_bytes(config: TransformerConfig, train: TrainConfig) -> int:
    """Bytes of the moments that this rank has after a step."""
    trainer = make_trainer(config, train, tiny_corpus())
    trainer.train_step(0)
    states = trainer._optimizer.state.values()
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step")

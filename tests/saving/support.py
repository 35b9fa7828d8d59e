"""A small run that is saved."""

from diptych.plans.config import TrainConfig, TransformerConfig
from tests.backends import BACKENDS, trainers

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    seq_length=12,
    enable_hyper_connections=True,
    num_residual_streams=3,
    hidden_dropout=0.1,
    layer_pattern="attention,attention+gelu+no-mlp-hc",
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=20, global_batch_size=4, lr=3e-3, min_lr=3e-4, lr_warmup_iters=5, eval_iters=2)


def new_trainer(backend: str, config=CONFIG, train=TRAIN, corpus=None):
    return dict(zip(BACKENDS, trainers(config, train, corpus), strict=True))[backend]


def steps(trainer, first: int, last: int) -> None:
    for step in range(first, last):
        trainer.train_step(step)

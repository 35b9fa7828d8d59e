"""Settings and rules of the data and the optimization."""

from dataclasses import dataclass
from pathlib import Path

from diptych.plans.config.rules import Rule, count, flag, number, validate


@dataclass(frozen=True)
class DataConfig:
    """A corpus: the bytes of a file or folder, split into training and validation."""

    data_path: Path | None = None
    """File or folder to read; None: the source files of the Python standard library on this machine."""
    validation_fraction: float = 0.05
    """Fraction of the corpus, taken from its end, that is used for validation only."""
    data_seed: int = 0
    """Seed of the order in which training sequences are drawn."""
    reset_attention_mask: bool = False
    """Treat every file of the corpus as a separate document: attention, convolutions and recurrent states do not cross
    its beginning. The last token of a document is still trained to predict the first token of the next one."""

    def __post_init__(self) -> None:
        validate(self, DATA_RULES)


@dataclass(frozen=True)
class TrainConfig:
    """The optimization: AdamW with warm-up, cosine decay and gradient clipping."""

    train_iters: int = 600
    """Optimizer steps."""
    global_batch_size: int = 8
    """Sequences per step."""
    micro_batch_size: int | None = None
    """Sequences per microbatch; gradients accumulate over the step. None: all sequences of the step."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine decay."""
    lr_warmup_iters: int = 40
    """Steps of linear warm-up from 0."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and scalars are not decayed."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    eval_interval: int = 0
    """Steps between validation losses; 0: only at the end."""
    eval_iters: int = 16
    """Batches per validation loss."""

    def __post_init__(self) -> None:
        validate(self, TRAIN_RULES)

    @property
    def microbatch(self) -> int:
        """Sequences per microbatch."""
        return self.micro_batch_size or self.global_batch_size


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        "data_path",
        lambda c: c.data_path is None or isinstance(c.data_path, Path),
        lambda c: f"data_path: expected a pathlib.Path or None, got {c.data_path!r}",
    ),
    number("validation_fraction", "(0, 1)"),
    count("data_seed", least=0),
    flag("reset_attention_mask"),
    Rule(
        "data_seed fits 32 bits",
        lambda c: c.data_seed < 2**32,
        lambda c: f"data_seed: expected an integer < 2**32 (it is half of a Philox key), got {c.data_seed}",
    ),
)

TRAIN_RULES: tuple[Rule, ...] = (
    count("train_iters"),
    Rule(
        "train_iters fits 32 bits",
        lambda c: c.train_iters < 2**32,
        lambda c: f"train_iters: expected an integer < 2**32 (steps count dropout masks), got {c.train_iters}",
    ),
    count("global_batch_size"),
    count("micro_batch_size"),
    Rule(
        "microbatches divide the batch",
        lambda c: c.global_batch_size % c.microbatch == 0,
        lambda c: (
            f"micro_batch_size: expected a divisor of global_batch_size={c.global_batch_size}, got {c.micro_batch_size}"
        ),
    ),
    number("lr", "(0, inf)"),
    number("min_lr", "[0, inf)"),
    count("lr_warmup_iters", least=0),
    number("adam_beta1", "[0, 1)"),
    number("adam_beta2", "[0, 1)"),
    number("adam_eps", "(0, inf)"),
    number("weight_decay", "[0, inf)"),
    number("clip_grad", "[0, inf)"),
    count("eval_interval", least=0),
    count("eval_iters"),
    Rule(
        "min_lr below lr",
        lambda c: c.min_lr <= c.lr,
        lambda c: f"min_lr: expected at most lr={c.lr}, got {c.min_lr}; lower min_lr or raise lr",
    ),
)

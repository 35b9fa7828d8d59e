"""Every setting of a run, and every rule a setting must obey.

Each dataclass is frozen and calls :func:`validate` on construction, so a configuration that exists
is a configuration that can run. The rules stand in one table (:data:`RULES`), one entry each with
its message; nothing else in the project decides what is allowed.

Flag names follow Megatron-LM where it has the setting.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plans.layers import ACTIVATIONS, LayerConfig, parse_layer

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class TransformerConfig:
    """The model: widths, layers, hyper-connections, dropout, and how it is cut into stages.

    Raises:
        ValueError: a rule of :data:`RULES` is broken; the message names the setting and the remedy.
    """

    hidden_size: int
    """Width D of one residual stream."""
    num_layers: int
    """Number of transformer layers in the whole model."""
    num_attention_heads: int
    """Query heads; must divide hidden_size unless kv_channels is given."""
    enable_hyper_connections: bool = False
    """Replace every residual connection by manifold-constrained hyper-connections (mHC)."""
    num_residual_streams: int = 4
    """Streams S that mHC keeps side by side."""
    sinkhorn_iterations: int = 20
    """Pairs of column and row normalisations that make h_res doubly stochastic."""
    sinkhorn_last: Literal["row", "column"] = "row"
    """Which normalisation ends an iteration and is therefore exact (the paper: row)."""
    do_self_attention_hyper_connection: bool = True
    """Use mHC around attention; off: a plain residual on every stream."""
    do_mlp_hyper_connection: bool = True
    """Use mHC around the MLP; off: a plain residual on every stream."""
    mhc_init_gating_factor: float = 0.01
    """Initial value of the three scalars alpha of a hyper-connection."""
    num_query_groups: int | None = None
    """Key/value heads of grouped-query attention; None: as many as num_attention_heads."""
    kv_channels: int | None = None
    """Width of one head; None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; None: 4 D for gelu, 8/3 D rounded up to a multiple of 8 for swiglu."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation function of the MLP."""
    layer_pattern: str = "attention"
    """Layers, separated by commas and repeated over the depth; each is a mixer (attention) and, after +,
    options: swiglu, gelu, ffn=<width>, no-attention-hc, no-mlp-hc."""
    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    seq_length: int = 128
    """Longest sequence T."""
    rotary_base: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    layernorm_epsilon: float = 1e-5
    """Added to the mean square under every root."""
    add_bias_linear: bool = False
    """Give every linear map a bias."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of the embedding's."""
    hidden_dropout: float = 0.0
    """Probability of dropping an element of what a sublayer adds to the residual."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 num_layers)."""
    params_dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters and activations."""
    pipeline_model_parallel_size: int = 1
    """Pipeline ranks the layers are divided over."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks (virtual stages) per pipeline rank; None: one."""
    seed: int = 0
    """Seed of initial parameters and dropout."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def residual_streams(self) -> int:
        """Streams the hidden states really have: 1 without mHC."""
        return self.num_residual_streams if self.enable_hyper_connections else 1

    def layer(self, layer_number: int) -> LayerConfig:
        """Settings of one layer.

        Args:
            layer_number: global number of the layer, from 0.

        Raises:
            ValueError: there is no such layer.
        """
        if not 0 <= layer_number < self.num_layers:
            raise ValueError(
                f"layer_number: expected 0 <= layer_number < num_layers={self.num_layers}, got {layer_number}"
            )
        pattern = self.layer_pattern.split(",")
        return parse_layer(pattern[layer_number % len(pattern)], self)


@dataclass(frozen=True)
class DataConfig:
    """The corpus: bytes of a file or folder, split into training and validation."""

    data_path: Path | None = None
    """File or folder to read; None: the Python standard library's own source on this machine."""
    validation_fraction: float = 0.05
    """Share of the corpus, taken from its end, that is only ever used for validation."""
    data_seed: int = 0
    """Seed of the order in which training sequences are drawn."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: AdamW with warm-up, cosine decay and gradient clipping."""

    train_iters: int = 600
    """Optimizer steps."""
    global_batch_size: int = 8
    """Sequences per step."""
    micro_batch_size: int | None = None
    """Sequences computed at a time, gradients added up over the step; None: all of them."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate the cosine ends at."""
    lr_warmup_iters: int = 40
    """Steps of linear warm-up from 0."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and scalars have none."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    eval_interval: int = 0
    """Steps between validation losses; 0: only at the end."""
    eval_iters: int = 16
    """Batches a validation loss is averaged over."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def microbatch(self) -> int:
        """Sequences computed at a time."""
        return self.micro_batch_size or self.global_batch_size


class Rule(NamedTuple):
    """One thing a configuration must obey."""

    name: str
    holds: Callable[[Any], bool]
    message: Callable[[Any], str]


def _count(field: str, least: int = 1) -> Rule:
    """The field is an integer of at least ``least``, or None where the default is None."""

    def holds(config: Any) -> bool:
        value = getattr(config, field)
        if value is None:
            return type(config).__dataclass_fields__[field].default is None
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least

    return Rule(field, holds, lambda c: f"{field}: expected an integer >= {least}, got {getattr(c, field)!r}")


def _number(field: str, interval: str) -> Rule:
    """The field is a finite number inside ``interval``, written as in mathematics: ``[0, 1)``."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def holds(config: Any) -> bool:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        above = value >= low if interval[0] == "[" else value > low
        return above and (value <= high if interval[-1] == "]" else value < high)

    return Rule(field, holds, lambda c: f"{field}: expected a number in {interval}, got {getattr(c, field)!r}")


def _flag(field: str) -> Rule:
    return Rule(
        field,
        lambda c: isinstance(getattr(c, field), bool),
        lambda c: f"{field}: expected True or False, got {getattr(c, field)!r}",
    )


def _choice(field: str, allowed: tuple[str, ...]) -> Rule:
    return Rule(
        field,
        lambda c: getattr(c, field) in allowed,
        lambda c: f"{field}: expected one of {allowed}, got {getattr(c, field)!r}",
    )


def _pattern_error(config: TransformerConfig) -> str:
    """The first thing wrong with the layer pattern, or the empty string."""
    if not isinstance(config.layer_pattern, str):
        return f"layer_pattern: expected layers separated by commas, got {config.layer_pattern!r}"
    try:
        descriptions = config.layer_pattern.split(",")
        for description in descriptions:
            parse_layer(description, config)
    except ValueError as error:
        return str(error)
    if len(descriptions) > config.num_layers:
        return f"layer_pattern: expected at most num_layers={config.num_layers} layers, got {len(descriptions)}"
    return ""


def _stages(config: TransformerConfig) -> int:
    return config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)


RULES: dict[type, tuple[Rule, ...]] = {
    TransformerConfig: (
        _count("hidden_size"),
        _count("num_layers"),
        _count("num_attention_heads"),
        _flag("enable_hyper_connections"),
        _flag("do_self_attention_hyper_connection"),
        _flag("do_mlp_hyper_connection"),
        _flag("add_bias_linear"),
        _flag("untie_embeddings_and_output_weights"),
        _count("num_residual_streams"),
        _count("sinkhorn_iterations"),
        _choice("sinkhorn_last", ("row", "column")),
        _number("mhc_init_gating_factor", "(-inf, inf)"),
        _count("num_query_groups"),
        _count("kv_channels"),
        _count("ffn_hidden_size"),
        _choice("activation", ACTIVATIONS),
        _count("vocab_size"),
        _count("seq_length"),
        _number("rotary_base", "(0, inf)"),
        _number("layernorm_epsilon", "(0, inf)"),
        _number("hidden_dropout", "[0, 1)"),
        _number("init_method_std", "[0, inf)"),
        _choice("params_dtype", DTYPES),
        _count("pipeline_model_parallel_size"),
        _count("virtual_pipeline_model_parallel_size"),
        _count("seed", least=0),
        Rule(
            "seed fits 32 bits",
            lambda c: c.seed < 2**32,
            lambda c: f"seed: expected an integer < 2**32 (it is half of a Philox key), got {c.seed}",
        ),
        Rule(
            "heads divide width",
            lambda c: c.kv_channels is not None or c.hidden_size % c.num_attention_heads == 0,
            lambda c: (
                f"num_attention_heads: expected a divisor of hidden_size={c.hidden_size}, got "
                f"{c.num_attention_heads}; change either, or give the head's width as kv_channels"
            ),
        ),
        Rule(
            "head width is even",
            lambda c: c.head_dim % 2 == 0,
            lambda c: f"kv_channels: expected an even head width (rotary embedding turns pairs), got {c.head_dim}",
        ),
        Rule(
            "groups divide heads",
            lambda c: c.num_attention_heads % c.query_groups == 0,
            lambda c: (
                f"num_query_groups: expected a divisor of num_attention_heads={c.num_attention_heads}, "
                f"got {c.query_groups}"
            ),
        ),
        Rule("layer_pattern", lambda c: not _pattern_error(c), _pattern_error),
        Rule(
            "virtual stages need a pipeline",
            lambda c: c.virtual_pipeline_model_parallel_size in (None, 1) or c.pipeline_model_parallel_size > 1,
            lambda c: (
                "virtual_pipeline_model_parallel_size: expected None with pipeline_model_parallel_size=1, "
                f"got {c.virtual_pipeline_model_parallel_size}; virtual stages interleave pipeline ranks"
            ),
        ),
        Rule(
            "stages divide layers",
            lambda c: c.num_layers % _stages(c) == 0,
            lambda c: (
                f"num_layers: expected a multiple of the {_stages(c)} pipeline stages "
                f"(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size), got {c.num_layers}"
            ),
        ),
    ),
    DataConfig: (
        Rule(
            "data_path",
            lambda c: c.data_path is None or isinstance(c.data_path, Path),
            lambda c: f"data_path: expected a pathlib.Path or None, got {c.data_path!r}",
        ),
        _number("validation_fraction", "(0, 1)"),
        _count("data_seed", least=0),
        Rule(
            "data_seed fits 32 bits",
            lambda c: c.data_seed < 2**32,
            lambda c: f"data_seed: expected an integer < 2**32 (it is half of a Philox key), got {c.data_seed}",
        ),
    ),
    TrainConfig: (
        _count("train_iters"),
        Rule(
            "train_iters fits 32 bits",
            lambda c: c.train_iters < 2**32,
            lambda c: f"train_iters: expected an integer < 2**32 (steps count dropout masks), got {c.train_iters}",
        ),
        _count("global_batch_size"),
        _count("micro_batch_size"),
        Rule(
            "microbatches divide the batch",
            lambda c: c.global_batch_size % c.microbatch == 0,
            lambda c: (
                f"micro_batch_size: expected a divisor of global_batch_size={c.global_batch_size}, "
                f"got {c.micro_batch_size}"
            ),
        ),
        _number("lr", "(0, inf)"),
        _number("min_lr", "[0, inf)"),
        _count("lr_warmup_iters", least=0),
        _number("adam_beta1", "[0, 1)"),
        _number("adam_beta2", "[0, 1)"),
        _number("adam_eps", "(0, inf)"),
        _number("weight_decay", "[0, inf)"),
        _number("clip_grad", "[0, inf)"),
        _count("eval_interval", least=0),
        _count("eval_iters"),
        Rule(
            "min_lr below lr",
            lambda c: c.min_lr <= c.lr,
            lambda c: f"min_lr: expected at most lr={c.lr}, got {c.min_lr}; lower min_lr or raise lr",
        ),
    ),
}


def validate(config: TransformerConfig | DataConfig | TrainConfig) -> None:
    """Check every rule of the configuration's type, in order.

    Raises:
        ValueError: the first rule broken; the message names the setting, what was expected, what
            came, and the remedy where it is not plain.
    """
    for rule in next(RULES[kind] for kind in type(config).__mro__ if kind in RULES):
        if not rule.holds(config):
            raise ValueError(rule.message(config))

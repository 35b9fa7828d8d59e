"""Rules of tensor and sequence parallelism."""

from collections.abc import Callable
from typing import Any

from diptych.plans.config.experts import has_experts
from diptych.plans.config.rules import Rule, count, flag


def _divisible(name: str, of: Callable[[Any], int | None], what: str) -> Rule:
    """Build the rule that the ranks divide a number into equal shares; None needs none."""

    def fault(config: Any) -> str:
        size = config.tensor_model_parallel_size
        return f"{name}: expected a multiple of tensor_model_parallel_size={size} {what}, got {of(config)}"

    return Rule(f"ranks divide {name}", lambda c: (of(c) or 0) % c.tensor_model_parallel_size == 0, fault)


def _shared(name: str, of: Callable[[Any], int], what: str) -> Rule:
    """Build the rule that the ranks divide heads into equal shares, or that each head has equally many ranks."""

    def holds(config: Any) -> bool:
        size = config.tensor_model_parallel_size
        return of(config) % size == 0 or size % of(config) == 0

    def fault(config: Any) -> str:
        size = config.tensor_model_parallel_size
        return (
            f"{name}: expected a multiple or a divisor of tensor_model_parallel_size={size}, since a rank has {what} "
            f"alone or shares one with as many ranks as the others, got {of(config)}"
        )

    return Rule(f"ranks share {name}", holds, fault)


def _odd_width(config: Any) -> int:
    """Return the inner width of the first layer that the ranks do not divide, or 0."""
    widths = (layer.ffn_hidden_size for layer in config.repeated_layers)
    return next((width for width in widths if width % config.tensor_model_parallel_size), 0)


def _has_delta_rule(config: Any) -> bool:
    """Return True if a layer has a gdn or kda mixer."""
    return bool(config.mixers & {"gdn", "kda"})


TENSOR_RULES: tuple[Rule, ...] = (
    count("tensor_model_parallel_size"),
    flag("sequence_parallel"),
    _divisible("num_attention_heads", lambda c: c.num_attention_heads if c.has_softmax else 0, "heads"),
    _shared("num_query_groups", lambda c: c.query_groups if "attention" in c.mixers else 1, "key and value heads"),
    _divisible("linear_num_value_heads", lambda c: c.linear_heads[1] if _has_delta_rule(c) else 0, "heads"),
    _shared("linear_num_key_heads", lambda c: c.linear_heads[0] if _has_delta_rule(c) else 1, "key heads"),
    _divisible("ffn_hidden_size", _odd_width, "inner channels in every layer"),
    _divisible(
        "moe_shared_expert_intermediate_size",
        lambda c: c.moe_shared_expert_intermediate_size if has_experts(c) else None,
        "inner channels",
    ),
    _divisible("vocab_size", lambda c: c.vocab_size, "token ids"),
    Rule(
        "sequence parallelism needs ranks",
        lambda c: not c.sequence_parallel or c.tensor_model_parallel_size > 1,
        lambda c: (
            "sequence_parallel: expected False without tensor parallelism, whose ranks it divides tokens among, got "
            "True; give tensor_model_parallel_size"
        ),
    ),
    Rule(
        "ranks divide tokens",
        lambda c: (
            not c.sequence_parallel or c.context_parallel_size > 1 or c.seq_length % c.tensor_model_parallel_size == 0
        ),
        lambda c: (
            f"seq_length: expected a multiple of tensor_model_parallel_size={c.tensor_model_parallel_size} with "
            f"sequence_parallel, got {c.seq_length}"
        ),
    ),
)

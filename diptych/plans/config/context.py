"""Rules of the context-parallel settings."""

from typing import Any

from diptych.plans.config.rules import Rule, choice, count
from diptych.plans.context.exchange import CP_EXCHANGES, PIPELINED, WIRE_DTYPES
from diptych.plans.context.zigzag import ATTENTION_LAYOUTS


def _needs(field: str, exchange: str) -> Rule:
    """Build the rule that an approximation requires its one state exchange."""

    def fault(config: Any) -> str:
        value = getattr(config, field)
        return f"{field}: expected None unless cp_exchange is {exchange!r}, got {value} with {config.cp_exchange!r}"

    return Rule(f"{field} needs {exchange}", lambda c: getattr(c, field) is None or c.cp_exchange == exchange, fault)


def _pipelined_without(field: str, default: Any, why: str) -> Rule:
    """Build the rule that cp_exchange 'pipelined' excludes a setting.

    Its ranks work on different microbatches at the same time, so they cannot take part in joint steps.
    """

    def fault(config: Any) -> str:
        expected = f"{field}: expected {default!r} with cp_exchange 'pipelined', {why}"
        return f"{expected}, got {getattr(config, field)!r}; choose another cp_exchange"

    return Rule(
        f"pipelined without {field}",
        lambda c: c.cp_exchange != PIPELINED or c.context_parallel_size == 1 or getattr(c, field) == default,
        fault,
    )


CONTEXT_RULES = (
    count("context_parallel_size"),
    choice("cp_exchange", CP_EXCHANGES),
    choice("cp_wire_dtype", WIRE_DTYPES),
    choice("cp_attention_layout", ATTENTION_LAYOUTS),
    count("cp_truncate_ranks"),
    _needs("cp_truncate_ranks", "ring"),
    count("cp_transition_rank"),
    _needs("cp_transition_rank", "all_gather"),
    _pipelined_without("pipeline_model_parallel_size", 1, "which defines its own order of microbatches"),
    _pipelined_without("cp_attention_layout", "contiguous", "whose ranks are not at one layer at the same time"),
    _pipelined_without("enable_tensor_offload", False, "whose order of layers differs from the one offload plans"),
    _pipelined_without("enable_activation_offload", False, "whose order of layers differs from the one offload plans"),
    Rule(
        "kernels exchange exact states",
        lambda c: c.impl != "triton" or (c.cp_truncate_ranks is None and c.cp_transition_rank is None),
        lambda c: (
            "cp_truncate_ranks, cp_transition_rank: expected None with impl='triton', got "
            f"{c.cp_truncate_ranks} and {c.cp_transition_rank}; impl='reference' supports them"
        ),
    ),
)

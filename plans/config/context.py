"""What must hold for ranks that share sequences."""

from typing import Any

from plans.config.rules import Rule, choice, count
from plans.exchange import EXCHANGES, WIRE_DTYPES
from plans.zigzag import ATTENTION_LAYOUTS


def _needs(field: str, exchange: str) -> Rule:
    """An approximation of one exchange alone."""

    def fault(config: Any) -> str:
        value, came = getattr(config, field), config.cp_exchange
        return f"{field}: expected None unless cp_exchange is {exchange!r}, got {value} with {came!r}"

    return Rule(f"{field} needs {exchange}", lambda c: getattr(c, field) is None or c.cp_exchange == exchange, fault)


CONTEXT_RULES = (
    count("context_parallel_size"),
    choice("cp_exchange", EXCHANGES),
    choice("cp_wire_dtype", WIRE_DTYPES),
    choice("cp_attention_layout", ATTENTION_LAYOUTS),
    count("cp_truncate_ranks"),
    _needs("cp_truncate_ranks", "ring"),
    count("cp_transition_rank"),
    _needs("cp_transition_rank", "all_gather"),
    Rule(
        "kernels pass exact states on",
        lambda c: c.impl != "triton" or (c.cp_truncate_ranks is None and c.cp_transition_rank is None),
        lambda c: (
            "cp_truncate_ranks, cp_transition_rank: expected None with impl='triton', got "
            f"{c.cp_truncate_ranks} and {c.cp_transition_rank}; impl='reference' takes them"
        ),
    ),
)

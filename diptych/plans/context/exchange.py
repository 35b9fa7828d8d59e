"""How states travel between ranks that share sequences, and what that costs.

Exactly: every pair (M, H) to everyone, the state alone from rank to rank, or composed pairs over distances that double;
or pipelined, where a rank computes nothing before it has its state (diptych.plans.schedule.wavefront). Or nearly,
with what diptych.plans.context.approximation says of the error beforehand: the state of the nearest ranks alone,
each handing on what it has at the same time as all others; or M as a diagonal and a product of two narrow matrices.
"""

import math
from typing import Any, NamedTuple

from diptych.plans.context.zigzag import check_layout

WIRE_DTYPES = (None, "bfloat16")
"""Types in which states travel: None is their own."""
EXCHANGES = ("all_gather", "ring", "scan")
"""How states travel while all ranks are at the same call: every pair (M, H) to everyone; the state alone from rank to
rank; composed pairs over distances that double."""
PIPELINED = "pipelined"
CP_EXCHANGES = (*EXCHANGES, PIPELINED)
"""All of them; pipelined, ranks are at different calls."""

OPTIONS = ("cp_exchange", "cp_wire_dtype", "cp_truncate_ranks", "cp_transition_rank", "cp_attention_layout")
"""What build_cp_context and a model's configuration say of how states and queries travel."""


def exchange_options(config: Any) -> dict[str, Any]:
    """What a model's configuration, or a context, says of how states and queries travel, for build_cp_context."""
    return {name: getattr(config, name) for name in OPTIONS}


def check_exchange(
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
    cp_truncate_ranks: int | None = None,
    cp_transition_rank: int | None = None,
    cp_attention_layout: str = "contiguous",
) -> None:
    """Refuse a way for states and queries to travel that there is not.

    Args:
        cp_exchange: one of CP_EXCHANGES.
        cp_wire_dtype: one of WIRE_DTYPES.
        cp_truncate_ranks: ranks ahead that a state reaches, at most; None: all.
        cp_transition_rank: columns of the two matrices that M is sent as; None: M itself.
        cp_attention_layout: one of diptych.plans.context.zigzag.ATTENTION_LAYOUTS.

    Raises:
        ValueError: naming the argument, what was expected, what came.
    """
    if cp_exchange not in CP_EXCHANGES:
        raise ValueError(f"cp_exchange: expected one of {CP_EXCHANGES}, got {cp_exchange!r}")
    if cp_wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"cp_wire_dtype: expected one of {WIRE_DTYPES}, got {cp_wire_dtype!r}")
    check_layout(cp_attention_layout)
    if cp_exchange == PIPELINED and cp_attention_layout != "contiguous":
        raise ValueError(
            "cp_attention_layout: expected 'contiguous' with cp_exchange 'pipelined', whose ranks are not at one layer "
            f"at the same time, got {cp_attention_layout!r}"
        )
    for name, value, exchange in (
        ("cp_truncate_ranks", cp_truncate_ranks, "ring"),
        ("cp_transition_rank", cp_transition_rank, "all_gather"),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, or None, got {value!r}")
        if cp_exchange != exchange:
            raise ValueError(
                f"{name}: expected None unless cp_exchange is {exchange!r}, got {value} with {cp_exchange!r}"
            )


def check_together(cp_exchange: str) -> None:
    """Refuse to exchange maps where ranks are not at the same call.

    Raises:
        ValueError: it is pipelined.
    """
    if cp_exchange not in EXCHANGES:
        raise ValueError(
            f"cp_exchange: expected one of {EXCHANGES} to exchange maps of states, got {cp_exchange!r}, where the rule "
            "itself takes its state and hands it on"
        )


class ExchangeCost(NamedTuple):
    """What one exchange of states costs, forward or backward."""

    rounds: int
    """Messages that have to follow one another."""
    payload_bytes: int
    """Sent by the rank that sends most, each thing counted once however many receive it."""
    wire_bytes: int
    """Received by all ranks together."""


def exchange_cost(
    exchange: str,
    size: int,
    heads: int,
    key: int,
    value: int,
    itemsize: int = 4,
    truncate_ranks: int | None = None,
    transition_rank: int | None = None,
) -> ExchangeCost:
    """What one exchange costs, by formula.

    Args:
        exchange: one of CP_EXCHANGES; pipelined, rounds are those a last rank is behind the first.
        size: number of ranks.
        heads: HV, of all rows of the batch.
        key, value: widths K, V of a head.
        itemsize: bytes of a number.
        truncate_ranks, transition_rank: see check_exchange.
    """
    state, both = heads * key * value * itemsize, heads * key * (key + value) * itemsize
    if size == 1:
        return ExchangeCost(0, 0, 0)
    if exchange == "all_gather":
        if transition_rank is not None:
            both = heads * key * (value + 1 + 2 * min(transition_rank, key)) * itemsize
        return ExchangeCost(1, both, size * (size - 1) * both)
    if exchange == "ring" and truncate_ranks is not None:
        rounds = min(truncate_ranks, size - 1)
        return ExchangeCost(rounds, rounds * state, rounds * (size - 1) * state)
    if exchange in ("ring", PIPELINED):
        return ExchangeCost(size - 1, state, (size - 1) * state)
    steps = scan_steps(size)
    sent = [state if step.is_last else both for step in steps]
    wire = sum(step.messages(size) * each for step, each in zip(steps, sent, strict=True))
    return ExchangeCost(len(steps), sum(sent), wire)


class ScanStep(NamedTuple):
    """One round of the exchange by scan."""

    distance: int
    """A rank sends to the one so far ahead."""
    first_sender: int
    """Ranks before it have nothing to tell."""
    is_last: bool
    """Nobody composes further: H goes alone."""

    def messages(self, size: int) -> int:
        """How many are sent."""
        return size - self.distance - self.first_sender

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """Sender and receiver of each, going forward."""
        return [(rank, rank + self.distance) for rank in range(self.first_sender, size - self.distance)]


def scan_steps(size: int) -> list[ScanStep]:
    """Rounds after which every rank has the composition of all maps before it.

    In the first everyone hands its own map on. From then on rank r holds the maps of ranks r - n .. r - 1 composed, n
    doubles, and rank 0 has none.
    """
    distances = [1, *(2**step for step in range(max(0, math.ceil(math.log2(max(1, size - 1))))))]
    return [ScanStep(d, int(place > 0), place == len(distances) - 1) for place, d in enumerate(distances)]

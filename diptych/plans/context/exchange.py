"""Exchange of states between context-parallel ranks: options, their validation, and communication costs.

Exact exchanges: all_gather (all ranks receive all pairs (M, S_local)), ring (each rank sends its state to the next
rank), scan (composed pairs over doubling distances), and pipelined (a rank computes after it receives its state, see
diptych.plans.schedule.wavefront). Approximate exchanges, whose errors diptych.plans.context.approximation bounds: ring
truncated to the nearest ranks, with all ranks sending at the same time, and all_gather with M sent as a diagonal plus a
low-rank product.
"""

import math
from typing import Any, NamedTuple

from diptych.plans.context.zigzag import check_layout

WIRE_DTYPES = (None, "bfloat16")
"""Types of the exchanged states; None: their own type."""
EXCHANGES = ("all_gather", "ring", "scan")
"""Exchanges in which all ranks take part in the same call."""
PIPELINED = "pipelined"
"""The exchange in which ranks are at different calls."""
CP_EXCHANGES = (*EXCHANGES, PIPELINED)
"""All exchanges."""

OPTIONS = ("cp_exchange", "cp_wire_dtype", "cp_truncate_ranks", "cp_transition_rank", "cp_attention_layout")
"""Options of the exchange that a configuration and build_cp_context share."""


def exchange_options(config: Any) -> dict[str, Any]:
    """Return the exchange options of a model's configuration or of a context, as arguments of build_cp_context."""
    return {name: getattr(config, name) for name in OPTIONS}


def check_exchange(
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
    cp_truncate_ranks: int | None = None,
    cp_transition_rank: int | None = None,
    cp_attention_layout: str = "contiguous",
) -> None:
    """Reject unknown or incompatible exchange options.

    Args:
        cp_exchange: one of CP_EXCHANGES.
        cp_wire_dtype: one of WIRE_DTYPES.
        cp_truncate_ranks: number of following ranks that a state reaches; None: all.
        cp_transition_rank: rank of the low-rank part of a sent transition M; None: M is sent in full.
        cp_attention_layout: one of diptych.plans.context.zigzag.ATTENTION_LAYOUTS.

    Raises:
        ValueError: an option is invalid; the message names it.
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


def check_joint_exchange(cp_exchange: str) -> None:
    """Reject a joint exchange of transitions with cp_exchange "pipelined".

    Raises:
        ValueError: the exchange is pipelined.
    """
    if cp_exchange not in EXCHANGES:
        raise ValueError(
            f"cp_exchange: expected one of {EXCHANGES} to exchange maps of states, got {cp_exchange!r}, where the "
            "delta rule itself receives and sends its state"
        )


class ExchangeCost(NamedTuple):
    """Communication cost of one exchange of states, forward or backward."""

    rounds: int
    """Number of sequential messages."""
    payload_bytes: int
    """Bytes sent by the rank that sends most; a multicast counts once."""
    wire_bytes: int
    """Bytes received by all ranks together."""


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
    """Return the communication cost of one exchange of states.

    Args:
        exchange: one of CP_EXCHANGES; with pipelined, rounds are the delay of the last rank behind the first.
        size: number of context-parallel ranks.
        heads: number of value heads HV, times the rows of the batch.
        key: width K of a key head.
        value: width V of a value head.
        itemsize: bytes per element.
        truncate_ranks: see cp_truncate_ranks of check_exchange.
        transition_rank: see cp_transition_rank of check_exchange.
    """
    state = heads * key * value * itemsize
    both = heads * key * (key + value) * itemsize
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
    """One round of the scan exchange."""

    distance: int
    """Distance in ranks from sender to receiver."""
    first_sender: int
    """First rank that sends; ranks before it have no composition."""
    is_last: bool
    """True in the last round, which sends S_local only because no rank composes further."""

    def messages(self, size: int) -> int:
        """Return the number of messages of the round."""
        return size - self.distance - self.first_sender

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """Return the sender and receiver of every message in forward."""
        return [(rank, rank + self.distance) for rank in range(self.first_sender, size - self.distance)]


def scan_steps(size: int) -> list[ScanStep]:
    """Return the rounds of the scan, after which every rank has the composition of all transitions before it.

    In the first round, every rank sends its own transition to the next rank. Afterwards rank r holds the composition of
    ranks r - n .. r - 1, rank 0 holds none, and n doubles in every round.
    """
    distances = [1, *(2**step for step in range(max(0, math.ceil(math.log2(max(1, size - 1))))))]
    return [ScanStep(d, int(place > 0), place == len(distances) - 1) for place, d in enumerate(distances)]

"""Balanced causal softmax attention over context-parallel ranks: assignment of queries, and communication costs.

Every rank's part of the tokens has two halves. With R ranks these are half-parts 0 .. 2R - 1; rank r holds 2r and
2r + 1, and the queries of half-part j attend to half-parts 0 .. j. In the zigzag layout, rank r computes the queries of
half-parts r and 2R - 1 - r, which together attend to 2R + 1 half-parts for every r. In the contiguous layout, each rank
computes its own queries against all keys, 4R half-parts, most of which are masked on the first ranks.

Each rank computes one first half and one second half of a part. First halves are therefore permuted among the ranks,
and second halves separately. In a part of odd length, the first half is longer by one token.
"""

from typing import Any, NamedTuple

ATTENTION_LAYOUTS = ("contiguous", "zigzag")
"""Queries whose softmax attention rank r computes: those of its own part, or of half-parts r and 2R - 1 - r."""


def check_layout(cp_attention_layout: str) -> None:
    """Reject an unknown layout.

    Raises:
        ValueError: the layout is not in ATTENTION_LAYOUTS.
    """
    if cp_attention_layout not in ATTENTION_LAYOUTS:
        raise ValueError(f"cp_attention_layout: expected one of {ATTENTION_LAYOUTS}, got {cp_attention_layout!r}")


def half_lengths(part_length: int) -> tuple[int, int]:
    """Return the number of tokens of the first and of the second half of a part."""
    return part_length - part_length // 2, part_length // 2


def half_begin(half: Any, part_length: int) -> Any:
    """Return the first token of a half-part; for half-part 2R, the total number of tokens.

    Args:
        half: number of the half-part; an integer, or an array of numpy or jax.numpy.
        part_length: tokens per part.
    """
    return half // 2 * part_length + half % 2 * half_lengths(part_length)[0]


def computed_halves(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the half-parts whose queries a rank computes, in ascending order.

    Args:
        rank: context-parallel rank.
        size: number of context-parallel ranks.
    """
    return rank, 2 * size - 1 - rank


def half_moves(size: int, place: int, back: bool = False) -> list[tuple[int, int]]:
    """Return the sender and receiver of every part's first or second half, a permutation of the ranks.

    Args:
        size: number of context-parallel ranks.
        place: 0 for first halves, 1 for second halves.
        back: True for moves from the computing ranks to the holders; False for the reverse.
    """
    computing = [min(half, 2 * size - 1 - half) for half in range(place, 2 * size, 2)]
    return [(computer, holder) if back else (holder, computer) for holder, computer in enumerate(computing)]


def block_pairs(rank: int, size: int) -> list[tuple[int, int]]:
    """Return the query and key half-parts of the 2R + 1 blocks of scores that a rank computes, in order.

    Args:
        rank: context-parallel rank.
        size: number of context-parallel ranks.
    """
    return [(query, key) for query in computed_halves(rank, size) for key in range(query + 1)]


def score_pairs(layout: str, rank: int, size: int, part_length: int) -> int:
    """Return the number of query-key pairs whose scores a rank computes, including masked ones.

    Args:
        layout: one of ATTENTION_LAYOUTS.
        rank: context-parallel rank.
        size: number of context-parallel ranks.
        part_length: tokens per part.
    """
    if layout == "contiguous":
        return part_length * size * part_length
    lengths = half_lengths(part_length)
    return sum(lengths[half % 2] * half_begin(half + 1, part_length) for half in computed_halves(rank, size))


def attention_flops(layout: str, rank: int, size: int, part_length: int, heads: int, head_dim: int) -> int:
    """Return the forward FLOPs (multiplications and additions) of a rank's scores and weighted sums of values.

    Args:
        layout: one of ATTENTION_LAYOUTS.
        rank: context-parallel rank.
        size: number of context-parallel ranks.
        part_length: tokens per part.
        heads: number of query heads.
        head_dim: width of a head.
    """
    return 4 * score_pairs(layout, rank, size, part_length) * heads * head_dim


class MoveCost(NamedTuple):
    """Communication cost of moving queries to the computing ranks and outputs back; the same in backward."""

    payload_bytes: int
    """Bytes sent by the rank that sends most."""
    wire_bytes: int
    """Bytes received by all ranks together."""


def move_cost(
    size: int, part_length: int, heads: int, head_dim: int, itemsize: int = 4, value_dim: int | None = None
) -> MoveCost:
    """Return the cost of one forward of zigzag attention, without keys and values.

    Half-parts whose holder computes them are not sent.

    Args:
        size: number of context-parallel ranks.
        part_length: tokens per part.
        heads: number of query heads.
        head_dim: width of a head.
        itemsize: bytes per element.
        value_dim: width of a head's values and outputs; None: head_dim.
    """
    sent = [0] * size
    query = heads * head_dim * itemsize
    output = heads * (value_dim or head_dim) * itemsize
    for place, length in enumerate(half_lengths(part_length)):
        for holder, computing in half_moves(size, place):
            if holder != computing:
                sent[holder] += length * query
                sent[computing] += length * output
    return MoveCost(max(sent), sum(sent))

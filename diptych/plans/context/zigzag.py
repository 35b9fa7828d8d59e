"""Causal softmax attention over ranks, balanced: which rank computes which queries, and what travels for it.

Every rank's part of the tokens has two halves. With R ranks these are half-parts 0 .. 2R - 1; rank r holds 2r and
2r + 1, and the queries of half-part j may look at half-parts 0 .. j. In the zigzag layout rank r computes the queries
of half-parts r and 2R - 1 - r: together they look at 2R + 1 half-parts, the same for every r. In the contiguous layout
each rank computes its own queries against all keys, 4R half-parts, most of them masked on the first ranks.

Of its two half-parts a rank computes one is the first half of a part and the other a second half. So first halves of
all ranks are permuted among themselves, and second halves are; of a part of odd length the first half is longer by one.
"""

from typing import Any, NamedTuple

ATTENTION_LAYOUTS = ("contiguous", "zigzag")
"""Which rank computes softmax attention of which queries: its own part's, or those of half-parts r and 2R - 1 - r."""


def check_layout(cp_attention_layout: str) -> None:
    """Refuse a layout that does not exist.

    Raises:
        ValueError: naming the argument, what was expected, what came.
    """
    if cp_attention_layout not in ATTENTION_LAYOUTS:
        raise ValueError(f"cp_attention_layout: expected one of {ATTENTION_LAYOUTS}, got {cp_attention_layout!r}")


def half_lengths(part_length: int) -> tuple[int, int]:
    """Tokens of the first and of the second half of a part."""
    return part_length - part_length // 2, part_length // 2


def half_begin(half: Any, part_length: int) -> Any:
    """The first token of a half-part, or the end of all for half-part 2R.

    Args:
        half: its number; an integer, or an array of numpy or jax.numpy.
        part_length: tokens of a part.
    """
    return half // 2 * part_length + half % 2 * half_lengths(part_length)[0]


def computed_halves(rank: int, size: int) -> tuple[int, int]:
    """Numbers of the half-parts whose queries a rank computes, ascending.

    Args:
        rank: whose.
        size: number of ranks.
    """
    return rank, 2 * size - 1 - rank


def half_moves(size: int, place: int, back: bool = False) -> list[tuple[int, int]]:
    """Sender and receiver of every part's first (0) or second (1) half, a permutation of the ranks.

    Args:
        size: number of ranks.
        place: of the halves in their parts.
        back: from the ranks that compute them to their holders; else there.
    """
    computing = [min(half, 2 * size - 1 - half) for half in range(place, 2 * size, 2)]
    return [(there, rank) if back else (rank, there) for rank, there in enumerate(computing)]


def block_pairs(rank: int, size: int) -> list[tuple[int, int]]:
    """Query half-part and key half-part of the 2R + 1 blocks of scores a rank computes, in order.

    Args:
        rank: whose.
        size: number of ranks.
    """
    return [(query, key) for query in computed_halves(rank, size) for key in range(query + 1)]


def score_pairs(layout: str, rank: int, size: int, part_length: int) -> int:
    """Query-key pairs whose scores a rank computes, masked or not.

    Args:
        layout: one of ATTENTION_LAYOUTS.
        rank: whose.
        size: number of ranks.
        part_length: tokens of a part.
    """
    if layout == "contiguous":
        return part_length * size * part_length
    lengths = half_lengths(part_length)
    return sum(lengths[half % 2] * half_begin(half + 1, part_length) for half in computed_halves(rank, size))


def attention_flops(layout: str, rank: int, size: int, part_length: int, heads: int, head_dim: int) -> int:
    """Multiplications and additions of a rank's scores and of its weighted sums of values, forward.

    Args:
        layout, rank, size, part_length: as score_pairs'.
        heads: of queries.
        head_dim: width of a head.
    """
    return 4 * score_pairs(layout, rank, size, part_length) * heads * head_dim


class MoveCost(NamedTuple):
    """What moving queries to the ranks that compute them, and outputs back, costs; backward the same."""

    payload_bytes: int
    """Sent by the rank that sends most."""
    wire_bytes: int
    """Received by all ranks together."""


def move_cost(size: int, part_length: int, heads: int, head_dim: int, itemsize: int = 4) -> MoveCost:
    """Bytes of one forward of zigzag attention beside its keys and values; half-parts that stay are not sent.

    Args:
        size: number of ranks.
        part_length: tokens of a part.
        heads: of queries.
        head_dim: width of a head.
        itemsize: bytes of a number.
    """
    sent, token = [0] * size, heads * head_dim * itemsize
    for place, length in enumerate(half_lengths(part_length)):
        for holder, computing in half_moves(size, place):
            if holder != computing:
                sent[holder] += length * token  # queries
                sent[computing] += length * token  # outputs
    return MoveCost(max(sent), sum(sent))

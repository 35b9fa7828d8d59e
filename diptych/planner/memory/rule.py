"""Temporary memory of a segment of the chunked delta rule in PyTorch, beside saved values and their gradients.

The peak is at one of a few instants of a segment's backward. ``INSTANTS`` has one row for each: the number of arrays of
each width that are alive. The counts were measured on the allocations of PyTorch 2.13, with a different size for every
width, with queries and keys that the rule normalises.
"""

from typing import NamedTuple

from diptych.plans.model.delta_rule import CHUNK_SIZE, SEGMENT_SIZE


def chunk_size(length: int) -> int:
    """Return the number of tokens of a chunk: a power of two, not larger than the sequence needs."""
    return min(CHUNK_SIZE, 1 << (length - 1).bit_length())


class Alive(NamedTuple):
    """Numbers of arrays that are alive at one instant, by their width per token and value head."""

    key: float = 0.0
    """Arrays with the width of a key."""
    value: float = 0.0
    """Arrays with the width of a value."""
    chunk: float = 0.0
    """Arrays with the width of a chunk."""
    chunk_states: float = 0.0
    """Arrays of one state per chunk of the segment."""
    states: float = 0.0
    """Arrays of one state."""


class SegmentInstant(NamedTuple):
    """An instant of a segment's backward."""

    own: Alive
    """Arrays of the segment."""
    left: Alive = Alive()
    """Arrays of the previous segment that are not released yet."""
    value_copies: int = 2
    """Additional arrays of values if tokens are copied; see ``_copies``."""
    strided: Alive | None = Alive()
    """Additional arrays if heads are strided; None: the instant counts only then."""


_AGAIN = Alive(7, 3, 3.03, 1)
"""The previous segment, while the next one is recomputed."""
INSTANTS = {
    "kda": (
        SegmentInstant(Alive(26.75, 0, 5.1, 0, 1), _AGAIN),
        SegmentInstant(Alive(31.75, 2, 3.04, 0, 2), _AGAIN),
        SegmentInstant(Alive(32.75, 3, 2.04, 0, 1), _AGAIN),
        SegmentInstant(Alive(30.75, 4, 3.04, 2, 2), _AGAIN),
        SegmentInstant(Alive(33.75, 7, 4.05, 4, 2), Alive(3, 1, 1.03), strided=None),  # the gradients of the scan begin
        SegmentInstant(Alive(33.75, 6, 4.08, 5, 2), Alive(3, 1, 1.03)),  # and end
        SegmentInstant(Alive(39.75, 6, 5.08, 1, 1)),  # gradients of products by channel
        SegmentInstant(Alive(35.75, 4, 7.09, 1, 1), value_copies=1),  # the gradient of the inverse
    ),
    "gdn": (
        SegmentInstant(Alive(8, 6, 5.06, 5, 2), Alive(3, 1, 1), value_copies=1),  # the gradients of the scan end
        SegmentInstant(Alive(12, 5, 10.06, 1, 1), value_copies=1),  # gradient of the inverse
        SegmentInstant(Alive(11, 6, 9.14, 1, 1), value_copies=1),  # gradients of queries and keys
    ),
}
KEY_COPIES = 2
"""Additional arrays of queries and keys if their dtype is widened."""
KEYS_A_LEVEL = 3
"""Reduction of the arrays of keys in kda for each halving of the chunk, since blocks double fewer times."""
FORWARD = {"kda": Alive(9, 3.5, 6, 1), "gdn": Alive(3, 2, 7, 1)}
"""Arrays that are alive in forward, within 10% if there is one segment; fewer than in backward, which has the peak."""


class RuleShape(NamedTuple):
    """Sizes of a call of the rule."""

    kind: str
    """kda or gdn."""
    batch: int
    length: int
    """Tokens of a sequence."""
    key_heads: int
    value_heads: int
    key: int
    """Width of a key."""
    value: int
    """Width of a value."""
    item: int
    """Bytes of an element of the arguments."""
    wide: int
    """Bytes of an element of the states."""

    @property
    def is_strided(self) -> bool:
        """True if chunks are views of tokens with strided heads, which matrix products copy."""
        return self.length > self.chunk and (self.batch > 1) != (self.value_heads > 1)

    @property
    def chunk(self) -> int:
        """The tokens of a chunk."""
        return chunk_size(self.length)


def rule_scratch(shape: RuleShape) -> tuple[int, int]:
    """Return the peak of a segment's temporary bytes in forward and in backward.

    Args:
        shape: sizes of the call, with complete sequences.
    """
    chunks = -(-shape.length // shape.chunk)
    step = max(1, SEGMENT_SIZE // shape.chunk)
    full = min(chunks, step)
    last = chunks - (chunks - 1) // step * step
    runs = [(last, 0), (full, last)][: 1 + (chunks > step)] + [(full, full)] * (chunks > 2 * step)
    most = 0.0
    for place, (own, left) in enumerate(runs):
        is_ragged = place == 0 and shape.length % shape.chunk > 0
        for instant in INSTANTS[shape.kind]:
            if instant.strided is None and not shape.is_strided:
                continue
            held = _bytes(shape, instant.own, own) + _bytes(shape, instant.left, left)
            most = max(most, held + _copies(shape, instant, own, is_ragged))
    return round(_bytes(shape, FORWARD[shape.kind], full)), round(most)


def rule_moved(shape: RuleShape) -> tuple[int, int]:
    """Return the bytes that the steps of the rule move at least, in forward and in backward.

    Every array of all segments is written and read once. Backward replays forward.

    Args:
        shape: sizes of the call, with complete sequences.
    """
    chunks = -(-shape.length // shape.chunk)
    forward = 2 * _bytes(shape, FORWARD[shape.kind], chunks)
    most = max(_bytes(shape, instant.own, chunks) for instant in INSTANTS[shape.kind])
    return int(forward), int(forward + 2 * most)


def _bytes(shape: RuleShape, alive: Alive, chunks: int) -> float:
    """Return the bytes of a segment's arrays."""
    state = shape.key * shape.value
    by_token = alive.key * shape.key + alive.value * shape.value + alive.chunk * shape.chunk
    elements = chunks * (shape.chunk * by_token + alive.chunk_states * state) + alive.states * state * (chunks > 0)
    return shape.batch * shape.value_heads * elements * shape.wide


def _copies(shape: RuleShape, instant: SegmentInstant, chunks: int, is_ragged: bool) -> float:
    """Return the bytes of tokens that are widened, filled up to whole chunks, or gathered from several sequences."""
    is_widened = shape.item < shape.wide
    is_copied = is_widened or is_ragged or (shape.batch > 1 and shape.value_heads > 1)
    keys = KEY_COPIES * shape.key_heads * shape.key * is_widened
    values = instant.value_copies * shape.value_heads * shape.value * is_copied
    copies = shape.batch * chunks * shape.chunk * (keys + values) * shape.wide
    levels = (CHUNK_SIZE // shape.chunk).bit_length() - 1
    if shape.kind == "kda":
        copies -= _bytes(shape, Alive(KEYS_A_LEVEL * levels), chunks)
    return copies + (_bytes(shape, instant.strided or Alive(), chunks) if shape.is_strided else 0.0)

"""Choosing the next token, and what has to be read for it: decisions for both backends."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from diptych.plans.context.sequences import FLACPContext, check_context
from diptych.plans.model.philox import SAMPLE_SITE, philox_4x32


def next_token(logits: np.ndarray, temperature: float, seed: int, index: int) -> int:
    """Draw a token from softmax(logits / temperature).

    Args:
        logits: [V]
        temperature: 0 takes the likeliest token.
        seed: < 2**32.
        index: number of the token drawn, < 2**32; with the seed it fixes the draw.

    Raises:
        ValueError: the temperature is negative, or a logit is not finite.
    """
    if not temperature >= 0.0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if not np.isfinite(logits).all():
        raise ValueError(f"logits: expected finite numbers, got {logits[~np.isfinite(logits)][0]}")
    if temperature == 0.0:
        return int(logits.argmax())
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # far below the likeliest: -inf, whose weight is 0
        behind = np.maximum(wide - wide.max(), -np.finfo(np.float64).max)  # finite: infinity / infinity is no number
        weights = np.exp(behind / temperature)
    uniform = float(philox_4x32((seed, SAMPLE_SITE), (index, 0, 0, 0))[0]) / 2**32
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), uniform, side="right"))


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens: bytes as UTF-8, ids that are no bytes as ``<300>``."""
    parts: list[str] = []
    for is_byte, group in groupby(tokens, lambda token: token < 256):
        run = [*group]
        parts.append(bytes(run).decode(errors="replace") if is_byte else "".join(f"<{token}>" for token in run))
    return "".join(parts)


def split_unread(read: np.ndarray, tokens: np.ndarray, seq_length: int, vocab_size: int) -> tuple[bool, np.ndarray]:
    """What a model has to read before it says what follows a text.

    Args:
        read: what it has read and remembers. [R] integer
        tokens: the text. [T] integer
        seq_length: the most it remembers; of a longer text it reads the end, and nothing it remembers is of use.
        vocab_size: token ids there are.

    Returns:
        Whether the text goes on from what was read, and the tokens to read then, or from the beginning.

    Raises:
        ValueError: no tokens, several texts, or what is no token.
    """
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"tokens: expected at least one, of one text, got shape {list(tokens.shape)}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: expected integers, got {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"tokens: expected ids below vocab_size={vocab_size}, got {wrong}")
    if len(read) < len(tokens) <= seq_length and np.array_equal(tokens[: len(read)], read):
        return True, tokens[len(read) :]
    return False, tokens[-seq_length:]


def check_inputs(
    seq_length: int,
    shape: tuple[int, int],
    read: int | None = None,
    texts: int | None = None,
    context: FLACPContext | None = None,
    positions: Any = None,
    **of_whole_sequences: Any,
) -> None:
    """Refuse more tokens than a model takes, and what it cannot do with a cache or over ranks.

    Args:
        seq_length: the most tokens it takes and remembers.
        shape: of the tokens given, [B, T].
        read: tokens the cache holds; None: there is no cache.
        texts: it was made for; None: there is no cache.
        context: of ranks that share the sequences; None: these are whole.
        positions: of the tokens within their sequence; None: they were not given.
        of_whole_sequences: arguments that do not go with a cache or a context.

    Raises:
        ValueError: naming the argument.
    """
    batch, length = shape
    if not batch or not length:
        raise ValueError(f"inputs: expected at least one token, got shape {list(shape)}")
    check_context(context, of_whole_sequences | {"cache": texts}, positions)
    if context is None and length > seq_length:
        raise ValueError(f"inputs: expected at most seq_length={seq_length} tokens, got {length}")
    if read is None:
        return
    for name, value in of_whole_sequences.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with a cache, which reads on in one text, got one")
    if batch != texts:
        raise ValueError(f"cache: expected one of {batch} texts, as inputs are, got one of {texts}")
    if read + length > seq_length:
        raise ValueError(
            f"inputs: expected at most {seq_length - read} tokens after the {read} in the cache, with "
            f"seq_length={seq_length}, got {length}; begin again with an empty cache"
        )

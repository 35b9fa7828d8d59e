"""Sampling of the next token, and inputs of incremental decoding."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from diptych.plans.context.sequences import FLACPContext, check_context
from diptych.plans.model.philox import SAMPLE_SITE, philox_4x32


def next_token(logits: np.ndarray, temperature: float, seed: int, index: int) -> int:
    """Draw a token from softmax(logits / temperature).

    Args:
        logits: logits of the vocabulary. [V]
        temperature: softmax temperature; 0 selects the most likely token.
        seed: seed of the draw, < 2**32.
        index: number of the drawn token, < 2**32; seed and index determine the draw.

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
        shifted = np.maximum(wide - wide.max(), -np.finfo(np.float64).max)  # finite: infinity / infinity is NaN
        weights = np.exp(shifted / temperature)
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
    """Return the tokens of a text that incremental decoding still has to process.

    Args:
        read: tokens in the cache. [R] integer
        tokens: tokens of the text. [T] integer
        seq_length: maximum number of tokens in the cache; of a longer text, only the end is processed.
        vocab_size: number of token ids.

    Returns:
        True if the text continues the cached tokens, and the remaining tokens; else False, and the tokens to process
        with an empty cache.

    Raises:
        ValueError: there are no tokens, more than one text, or an invalid token id.
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
    cached_tokens: int | None = None,
    cached_batch: int | None = None,
    context: FLACPContext | None = None,
    positions: Any = None,
    **of_whole_sequences: Any,
) -> None:
    """Reject inputs that are too long, and arguments not supported with a cache or context parallelism.

    Args:
        seq_length: maximum number of tokens of a sequence.
        shape: shape of the input tokens, [B, T].
        cached_tokens: number of tokens in the cache; None: no cache.
        cached_batch: number of sequences of the cache; None: no cache.
        context: context parallelism; None: complete sequences.
        positions: positions of the tokens within their sequences; None: not given.
        of_whole_sequences: arguments that must be None with a cache or a context, by name.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    batch, length = shape
    if not batch or not length:
        raise ValueError(f"inputs: expected at least one token, got shape {list(shape)}")
    check_context(context, of_whole_sequences | {"cache": cached_batch}, positions)
    if context is None and length > seq_length:
        raise ValueError(f"inputs: expected at most seq_length={seq_length} tokens, got {length}")
    if cached_tokens is None:
        return
    for name, value in of_whole_sequences.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None with a cache, which continues each text from its last token, got an array"
            )
    if batch != cached_batch:
        raise ValueError(
            f"cache: expected a cache of {batch} sequences, the batch size of inputs, got one of {cached_batch}"
        )
    if cached_tokens + length > seq_length:
        raise ValueError(
            f"inputs: expected at most {seq_length - cached_tokens} tokens after the {cached_tokens} in the cache, "
            f"with seq_length={seq_length}, got {length}; begin again with an empty cache"
        )

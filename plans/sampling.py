"""Choosing the next token: one decision for both backends."""

import numpy as np

from plans.philox import SAMPLE_SITE, philox_4x32


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
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    uniform = float(philox_4x32((seed, SAMPLE_SITE), (index, 0, 0, 0))[0]) / 2**32
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), uniform, side="right"))

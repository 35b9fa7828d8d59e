"""Incremental decoding: a decoder reads each token of a growing text once. Mirrors ``reference_torch/decoding.py``."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from diptych.plans.model.sampling import split_unread
from jax_impl.cache import DecodingCache, empty_cache
from jax_impl.transformer import GPTModel


class Decoder:
    """A model with a cache of the text that it has read.

    The cache depends on the parameters of the model: call ``reset`` after a change of parameters.

    Args:
        model: the whole model.
    """

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self._read = np.zeros(0, np.int64)
        self._cache: DecodingCache | None = None

    def reset(self) -> None:
        """Forget the text that was read."""
        self._read = self._read[:0]
        self._cache = None

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of the token after a text, without dropout.

        If the text continues the text of the previous call, only its new tokens are read. Otherwise the whole text is
        read, or the last seq_length tokens of a longer text. JAX compiles once for each number of new tokens.

        Args:
            tokens: token ids, at least one. [T] integer

        Returns:
            Logits. [V]

        Raises:
            ValueError: tokens is empty, or an element is no token id.
        """
        config = self.model.config
        tokens = np.asarray(tokens)
        continues, unread = split_unread(self._read, tokens, config.seq_length, config.vocab_size)
        cache = self._cache if continues and self._cache else empty_cache(config, 1)
        self.reset()
        logits, self._cache = _read_tokens(self.model, jnp.asarray(unread[None], jnp.int32), cache)
        self._read = tokens[-config.seq_length :].copy()  # the caller may write its next text into the same array
        return np.asarray(logits)


@nnx.jit
def _read_tokens(model: GPTModel, tokens: Array, cache: DecodingCache) -> tuple[Array, DecodingCache]:
    """Return the logits after the tokens and the cache that includes them."""
    return model(tokens, cache=cache, training=False)[0, -1], cache

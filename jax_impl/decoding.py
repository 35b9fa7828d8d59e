"""What comes after a text: each token is read once. Twin of ``reference_torch/decoding.py``."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from diptych.plans.model.sampling import split_unread
from jax_impl.cache import DecodingCache, empty_cache
from jax_impl.transformer import GPTModel


class Decoder:
    """A model that reads a growing text, and remembers what it has read.

    What it remembers is of the parameters it was read with: after a change of theirs, ``reset``.

    Args:
        model: the whole model.
    """

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self._read = np.zeros(0, np.int64)
        self._cache: DecodingCache | None = None

    def reset(self) -> None:
        """Forget what was read."""
        self._read, self._cache = self._read[:0], None

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of the token after a text, without dropout.

        Where the text goes on from that of the call before, only what is new is read; else all of it is, or of a text
        longer than seq_length the end. Every number of tokens read at once is compiled anew.

        Args:
            tokens: ids, at least one. [T] integer

        Returns:
            [V]

        Raises:
            ValueError: no tokens, or what is none.
        """
        config, tokens = self.model.config, np.asarray(tokens)
        goes_on, unread = split_unread(self._read, tokens, config.seq_length, config.vocab_size)
        cache = self._cache if goes_on and self._cache else empty_cache(config, 1)
        self.reset()
        logits, self._cache = _go_on(self.model, jnp.asarray(unread[None], jnp.int32), cache)
        self._read = tokens[-config.seq_length :]
        return np.asarray(logits)


@nnx.jit
def _go_on(model: GPTModel, tokens: Array, cache: DecodingCache) -> tuple[Array, DecodingCache]:
    return model(tokens, cache=cache, training=False)[0, -1], cache

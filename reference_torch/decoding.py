"""Incremental decoding: a decoder reads each token of a growing text once. Mirrors ``jax_impl/decoding.py``."""

import numpy as np
import torch

from diptych.plans.model.sampling import split_unread
from reference_torch.cache import DecodingCache, empty_cache
from reference_torch.transformer import GPTModel


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

        If the text has at most seq_length tokens and continues the text of the previous call, only its new tokens are
        read. Otherwise its last seq_length tokens are read.

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
        device = next(self.model.parameters()).device
        cache = self._cache if continues and self._cache else empty_cache(config, 1, device)
        self.reset()  # the cache is unusable if the model raises an error half way
        with torch.no_grad():
            logits = self.model(torch.from_numpy(unread.astype(np.int64))[None].to(device), cache=cache, training=False)
        self._cache = cache
        self._read = tokens[-config.seq_length :].copy()  # the caller may write its next text into the same array
        return logits[0, -1].cpu().numpy()

"""What comes after a text: each token is read once. Twin of ``jax_impl/decoding.py``."""

import numpy as np
import torch

from diptych.plans.model.sampling import split_unread
from reference_torch.cache import DecodingCache, empty_cache
from reference_torch.transformer import GPTModel


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
        longer than seq_length the end.

        Args:
            tokens: ids, at least one. [T] integer

        Returns:
            [V]

        Raises:
            ValueError: no tokens, or what is none.
        """
        config, tokens = self.model.config, np.asarray(tokens)
        goes_on, unread = split_unread(self._read, tokens, config.seq_length, config.vocab_size)
        device = next(self.model.parameters()).device
        cache = self._cache if goes_on and self._cache else empty_cache(config, 1, device)
        self.reset()  # a cache is no good where reading fails half way
        with torch.no_grad():
            logits = self.model(torch.from_numpy(unread.astype(np.int64))[None].to(device), cache=cache, training=False)
        self._cache, self._read = cache, tokens[-config.seq_length :]
        return logits[0, -1].cpu().numpy()

"""Start positions of documents within training sequences.

A model takes ``document_starts`` [B, N]: the positions in every sequence where documents begin. The first is 0, and
unused entries are T. All batches of a corpus therefore have equal shapes and can be sliced by sequence.
"""

import numpy as np

Shape = tuple[int, ...]


def most_documents(starts: np.ndarray, seq_length: int) -> int:
    """Return the maximum number of documents with tokens in any one window of a corpus.

    Args:
        starts: start positions of the documents, ascending.
        seq_length: tokens per window.
    """
    starts = starts[starts > 0]  # the first of all begins where a window does
    if not len(starts):
        return 1
    # The window that begins just before a document holds it and all that begin less than seq_length - 1 after it.
    ends = np.searchsorted(starts, starts + seq_length - 1)
    return 1 + int((ends - np.arange(len(starts))).max())


def documents_in_windows(starts: np.ndarray, windows: np.ndarray, seq_length: int, most: int) -> np.ndarray:
    """Return ``document_starts`` of windows of a corpus, [B, N] int32.

    Args:
        starts: start positions of the documents in the corpus, ascending.
        windows: start positions of the windows. [B]
        seq_length: tokens T per window.
        most: number N of entries, at least the result of ``most_documents``.
    """
    places = np.searchsorted(starts, windows, side="right")[:, None] + np.arange(most - 1)
    beyond = np.append(starts, np.iinfo(np.int64).max)
    inside = beyond[np.minimum(places, len(starts))] - windows[:, None]
    return np.pad(np.minimum(inside, seq_length), ((0, 0), (1, 0))).astype(np.int32)


def check_document_starts(shape: Shape, dtype: str, values: np.ndarray | None, batch: int, length: int) -> None:
    """Reject invalid document_starts.

    Args:
        shape: shape of document_starts.
        dtype: numpy name of their type.
        values: values of document_starts; None: traced by JAX, only shape and type are checked.
        batch: number B of sequences.
        length: number T of tokens per sequence.

    Raises:
        ValueError: document_starts are invalid.
    """
    if len(shape) != 2 or shape[0] != batch or shape[1] < 1:
        raise ValueError(f"document_starts: expected shape [B, N] with B = {batch} and N >= 1, got {list(shape)}")
    if dtype != "int32":
        raise ValueError(f"document_starts: expected int32, got {dtype}")
    if values is None:
        return
    if values[:, 0].any():
        raise ValueError(f"document_starts: expected 0 first in every sequence, got {values[:, 0].tolist()}")
    if (np.diff(values) < 0).any():
        row = int((np.diff(values) < 0).any(1).argmax())
        raise ValueError(
            f"document_starts: expected places that never decrease, got {values[row].tolist()} in sequence {row}"
        )
    if values.max() > length:
        raise ValueError(f"document_starts: expected at most T = {length}, got {values.max()}")

"""Several documents in one sequence: where each begins, as a corpus says it and a model is told.

A model takes ``document_starts`` [B, N]: the places in every sequence where a document begins, the first of them 0, and
after the last as many times T as N asks for. So every batch of a corpus has arrays of one shape, which divide by
sequences as the tokens do.
"""

import numpy as np

Shape = tuple[int, ...]


def most_documents(starts: np.ndarray, seq_length: int) -> int:
    """The most documents that any window of a corpus holds a part of.

    Args:
        starts: where documents begin, ascending.
        seq_length: tokens of the window.
    """
    starts = starts[starts > 0]  # the first of all begins where a window does
    if not len(starts):
        return 1
    # The window that begins just before a document holds it and all that begin less than seq_length - 1 after it.
    ends = np.searchsorted(starts, starts + seq_length - 1)
    return 1 + int((ends - np.arange(len(starts))).max())


def documents_in_windows(starts: np.ndarray, windows: np.ndarray, seq_length: int, most: int) -> np.ndarray:
    """``document_starts`` of windows cut from a corpus.

    Args:
        starts: where documents begin in the corpus, ascending.
        windows: where windows begin. [B]
        seq_length: tokens T of each.
        most: number N of places; as many as ``most_documents`` says are enough.

    Returns:
        [B, N] int32
    """
    places = np.searchsorted(starts, windows, side="right")[:, None] + np.arange(most - 1)
    beyond = np.append(starts, np.iinfo(np.int64).max)
    inside = beyond[np.minimum(places, len(starts))] - windows[:, None]
    return np.pad(np.minimum(inside, seq_length), ((0, 0), (1, 0))).astype(np.int32)


def check_document_starts(shape: Shape, dtype: str, values: np.ndarray | None, batch: int, length: int) -> None:
    """Refuse what does not say where documents begin.

    Args:
        shape, dtype: of document_starts, the type by numpy's name.
        values: None where they are not known yet (traced by JAX); then only shape and type are looked at.
        batch, length: of the tokens, [B, T].

    Raises:
        ValueError: naming document_starts, what was expected, what came.
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

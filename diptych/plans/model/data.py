"""Deterministic batches of a byte-level corpus.

A batch depends on corpus, seed and step only, so that either backend can read any slice of any step in any order. The
counter-based generator of diptych/plans/model/philox.py draws the position of each sequence.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from diptych.plans.config import DataConfig
from diptych.plans.model.documents import documents_in_windows, most_documents
from diptych.plans.model.philox import DATA_SITE, philox_4x32

NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})
"""Folders within the standard library's folder that contain third-party packages or tests."""

SEPARATOR = b"\n"
"""Separator of the files of a folder; part of the preceding file."""


class Batch(NamedTuple):
    """Token ids and their targets."""

    tokens: np.ndarray
    """Token ids. [B, T] int32"""
    targets: np.ndarray
    """Next token of each token. [B, T] int32"""
    document_starts: np.ndarray | None = None
    """Start positions of documents (diptych.plans.model.documents); None: one document per sequence. [B, N] int32"""

    def part(self, first: int, size: int) -> "Batch":
        """Return ``size`` sequences of the batch, starting with sequence ``first``."""
        rows = slice(first, first + size)
        starts = None if self.document_starts is None else self.document_starts[rows]
        return Batch(self.tokens[rows], self.targets[rows], starts)


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation: bytes, or token ids of a tokenizer."""

    name: str
    """Name in messages and reports."""
    training: np.ndarray
    """Training tokens. uint8 bytes, or int32"""
    validation: np.ndarray
    """Validation tokens. uint8 bytes, or int32"""
    seed: int
    """Seed of the data order."""
    training_documents: np.ndarray | None = None
    """Start positions of documents in the training split, ascending; None: batches have no document_starts. int64"""
    validation_documents: np.ndarray | None = None
    """Start positions of documents in the validation split."""

    @cached_property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the bytes and, if known, the document start positions."""
        parts = (self.training, self.validation, self.training_documents, self.validation_documents)
        return hashlib.sha256(b"".join(x.tobytes() for x in parts if x is not None)).hexdigest()[:16]

    @cached_property
    def _most(self) -> dict[tuple[int, int], int]:
        """Cache of the maximum number of documents per window, by identity of the documents and window length."""
        return {}

    def check(self, seq_length: int, vocab_size: int) -> None:
        """Reject a model that cannot be trained on this corpus.

        Raises:
            ValueError: a split is shorter than a sequence and its last target, or a token exceeds the vocabulary.
        """
        for split, data in (("training", self.training), ("validation", self.validation)):
            _places(split, data, seq_length)
            if int(data.max()) >= vocab_size:
                raise ValueError(
                    f"vocab_size: expected more than the corpus's largest token, {int(data.max())}, got {vocab_size}; "
                    "256 takes any byte"
                )

    def batch(self, step: int, batch_size: int, seq_length: int, first: int = 0) -> Batch:
        """Return training sequences of one step.

        Args:
            step: optimizer step, from 0.
            batch_size: number B of sequences.
            seq_length: tokens T per sequence.
            first: index of the first returned sequence within the step's global batch, so that a rank or microbatch
                reads its own slice.

        Raises:
            ValueError: the training split is shorter than seq_length + 1 tokens.
        """
        places = _places("training", self.training, seq_length)
        sample = np.arange(first, first + batch_size)
        words = philox_4x32((self.seed, DATA_SITE), (sample, 0, 0, step)).astype(np.uint64)
        starts = ((words[1] << np.uint64(32)) | words[0]) % np.uint64(places)
        return self._cut(self.training, self.training_documents, starts.astype(np.int64), seq_length)

    def validation_batch(self, index: int, batch_size: int, seq_length: int) -> Batch:
        """Return validation sequences ``index * batch_size`` to ``(index + 1) * batch_size - 1``.

        The stride between sequences is the golden section of the split, so that any number of sequences covers it
        evenly.

        Args:
            index: number of the batch, from 0.
            batch_size: number B of sequences.
            seq_length: tokens T per sequence.

        Raises:
            ValueError: the validation split is shorter than seq_length + 1 tokens.
        """
        places = _places("validation", self.validation, seq_length)
        stride = max(1, round(places * 0.6180339887498949))
        starts = (np.arange(index * batch_size, (index + 1) * batch_size, dtype=np.int64) * stride) % places
        return self._cut(self.validation, self.validation_documents, starts, seq_length)

    def _cut(self, data: np.ndarray, documents: np.ndarray | None, starts: np.ndarray, seq_length: int) -> Batch:
        """Return the batch of the sequences with the given start positions."""
        window = data[starts[:, None] + np.arange(seq_length + 1)].astype(np.int32)
        tokens = np.ascontiguousarray(window[:, :-1])
        targets = np.ascontiguousarray(window[:, 1:])
        if documents is None:
            return Batch(tokens, targets)
        key = (id(documents), seq_length)
        if key not in self._most:
            self._most[key] = most_documents(documents, seq_length)
        return Batch(tokens, targets, documents_in_windows(documents, starts, seq_length, self._most[key]))


class Tokenizer(Protocol):
    """A function from text to token ids."""

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text, without those at its beginning and end."""
        ...

    @property
    def separator(self) -> list[int]:
        """The tokens after each document."""
        ...


def load_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read the configured corpus and split it.

    Args:
        config: settings of the data.
        tokenizer: makes the tokens of each file; None: bytes are tokens.

    Raises:
        ValueError: the path does not exist, cannot be read, or holds no bytes.
    """
    path = config.data_path
    if path is None:
        documents = _read_standard_library()
        name = "Python standard library"
    else:
        if not path.exists():
            raise ValueError(f"data_path: expected an existing file or folder, got {str(path)!r}")
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"data_path: expected a file or folder, got {str(path)!r}, which is a device or pipe")
        try:
            documents = _read_folder(path) if path.is_dir() else [path.read_bytes()]
        except OSError as error:
            raise ValueError(f"data_path: expected readable files, got {error}") from None
        name = str(path)
    if not SEPARATOR.join(documents):
        raise ValueError(f"data_path: expected a corpus with text in it, got 0 bytes from {name!r}")
    data, lengths = _tokens(documents, tokenizer)
    training_length = len(data) - int(len(data) * config.validation_fraction)
    training = data[:training_length]
    validation = data[training_length:]
    if not config.reset_attention_mask:
        return Corpus(name, training, validation, config.data_seed)
    starts = np.cumsum(lengths) - lengths
    starts = starts[starts < len(data)]  # an empty last document has no byte
    first = int(np.searchsorted(starts, training_length))
    return Corpus(name, training, validation, config.data_seed, starts[:first], starts[first:] - training_length)


def _tokens(documents: list[bytes], tokenizer: Tokenizer | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all documents with separators between them, and their number for each document."""
    if tokenizer is None:
        lengths = [len(document) + len(SEPARATOR) for document in documents]
        return np.frombuffer(SEPARATOR.join(documents), np.uint8), np.array(lengths, np.int64)
    parts = [np.array(tokenizer.encode(document) + tokenizer.separator, np.int32) for document in documents]
    data = np.concatenate(parts)
    return data[: len(data) - len(tokenizer.separator)], np.array([len(part) for part in parts], np.int64)


def _read_standard_library() -> list[bytes]:
    """Return the contents of the source files of Python's standard library."""
    return _read_folder(Path(sysconfig.get_path("stdlib")), "*.py", NOT_STANDARD_LIBRARY)


def _read_folder(folder: Path, pattern: str = "*", without: frozenset[str] = frozenset()) -> list[bytes]:
    """Return the contents of all files below a folder in sorted order, except hidden files and excluded folders."""

    def wanted(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        return path.is_file() and not any(part in without or part.startswith(".") for part in parts)

    return [path.read_bytes() for path in sorted(folder.rglob(pattern)) if wanted(path)]


def _places(split: str, data: np.ndarray, seq_length: int) -> int:
    """Return the number of possible start positions of a sequence."""
    places = len(data) - seq_length
    if places < 1:
        raise ValueError(
            f"data_path: expected a {split} split of at least seq_length + 1 = {seq_length + 1} tokens, got "
            f"{len(data)}; give more text, a shorter seq_length or another validation_fraction"
        )
    return places

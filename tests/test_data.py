"""Corpora and batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.plans.config import DataConfig
from diptych.plans.model.data import Corpus, load_corpus
from tests.backends import tiny_corpus


def numbered(length: int = 1000, seed: int = 0) -> Corpus:
    data = (np.arange(length) % 251).astype(np.uint8)
    return Corpus("numbers", data[:900], data[900:], seed)


@given(step=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 9), data=st.data())
def test_any_slice_of_a_batch_is_what_the_whole_batch_holds(step, seed, size, data):
    corpus = numbered(seed=seed)
    whole = corpus.batch(step, size, 16)
    first = data.draw(st.integers(0, size - 1))
    part = corpus.batch(step, size - first, 16, first=first)
    np.testing.assert_array_equal(part.tokens, whole.tokens[first:])
    np.testing.assert_array_equal(part.targets, whole.targets[first:])


def test_targets_follow_tokens():
    batch = numbered().batch(3, 8, 16)
    assert batch.tokens.shape == batch.targets.shape == (8, 16)
    assert batch.tokens.dtype == np.int32
    np.testing.assert_array_equal(batch.targets, (batch.tokens + 1) % 251)


def test_steps_and_seeds_draw_differently():
    draws = [numbered(seed=seed).batch(step, 8, 16).tokens[:, 0] for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_training_never_touches_validation_and_reaches_every_place():
    corpus = numbered(length=1000)
    starts = np.concatenate([corpus.batch(step, 64, 890).tokens[:, 0] for step in range(20)])
    assert set(starts) == set(range(10))  # 900 bytes hold sequences of 890 + 1 at places 0 .. 9


def test_validation_sequences_cover_the_split():
    corpus = tiny_corpus(4000)
    batches = [corpus.validation_batch(index, 4, 16) for index in range(8)]
    places = [corpus.validation.tobytes().find(row.astype(np.uint8).tobytes()) for b in batches for row in b.tokens]
    assert min(places) >= 0
    assert len(set(places)) >= 16


def test_default_corpus_is_the_standard_library():
    corpus = load_corpus(DataConfig())
    assert len(corpus.training) > 1_000_000
    assert b"def " in corpus.validation.tobytes()
    assert len(corpus.validation) / (len(corpus.training) + len(corpus.validation)) == pytest.approx(0.05, abs=1e-3)


def test_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "b.txt").write_text("second" * 9)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("first" * 9)
    (tmp_path / ".hidden").write_text("no")
    corpus = load_corpus(DataConfig(data_path=tmp_path))
    assert (corpus.training.tobytes() + corpus.validation.tobytes()).decode() == "first" * 9 + "\n" + "second" * 9


def test_missing_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"data_path: expected an existing file or folder, got '.*nowhere'"):
        load_corpus(DataConfig(data_path=tmp_path / "nowhere"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_empty_corpus(tmp_path, kind):
    if kind == "file":
        (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"data_path: expected a corpus with text in it, got 0 bytes"):
        load_corpus(DataConfig(data_path=tmp_path / "empty" if kind == "file" else tmp_path))


def test_corpus_shorter_than_a_sequence(tmp_path):
    (tmp_path / "short").write_text("x" * 100)
    corpus = load_corpus(DataConfig(data_path=tmp_path / "short", validation_fraction=0.2))
    corpus.batch(0, 2, 79)
    with pytest.raises(ValueError, match=r"training split of at least seq_length \+ 1 = 81 tokens, got 80"):
        corpus.batch(0, 2, 80)
    with pytest.raises(ValueError, match=r"validation split of at least seq_length \+ 1 = 21 tokens, got 20"):
        corpus.validation_batch(0, 2, 20)

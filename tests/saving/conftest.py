"""A folder with checkpoints, and a corpus."""

from pathlib import Path

import pytest

from tests.saving.support import new_trainer, steps


@pytest.fixture
def saved(tmp_path) -> Path:
    trainer = new_trainer("torch")
    steps(trainer, 0, 3)
    return trainer.save(tmp_path / "run")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path

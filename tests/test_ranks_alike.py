"""Processes of one run that were given other data or settings are named before a step is taken."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from diptych.plans.checkpoint import check_settings_on_all_ranks, run_settings
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import load_corpus
from reference_torch.rank_pool import RankError, RankPool
from tests.backends import backend_module, tiny_corpus

MODEL = TransformerConfig(8, 1, 2, seq_length=8)
TRAIN = TrainConfig(train_iters=4, global_batch_size=2, lr_warmup_iters=1)


def make_trainer(what: str):
    """Make a trainer on this rank, with something of its own on rank 1."""
    import torch.distributed as dist

    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    own = dist.get_rank() == 1
    corpus = tiny_corpus(4000 if own and what == "corpus" else 4096, seed=3 if own and what == "seed" else 0)
    train = replace(TRAIN, lr=0.5) if own and what == "lr" else TRAIN
    Trainer(MODEL, train, corpus, device="cpu", mesh=make_mesh(MODEL))


@pytest.mark.multiprocess
def test_ranks_with_other_data_or_settings_do_not_train_together():
    with RankPool(2, 60.0) as pool:
        pool.run(f"{__name__}:make_trainer", "nothing")
        for what, message in (
            ("corpus", "training_bytes: expected 3891 on every rank, as on rank 0, got 3800 on rank 1"),
            ("seed", "data_seed: expected 0 on every rank, as on rank 0, got 3 on rank 1; give the same settings"),
            ("lr", "lr: expected 0.001 on every rank, as on rank 0, got 0.5 on rank 1"),
        ):
            with pytest.raises(RankError) as error:
                pool.run(f"{__name__}:make_trainer", what)
            assert str(error.value).count(f"ValueError: {what if what == 'lr' else ''}") >= 2  # on both ranks
            assert message in str(error.value)


def test_jax_asks_as_well(monkeypatch):
    train = backend_module("jax", "train")
    monkeypatch.setattr(train, "gather_texts", lambda text: [text, text.replace('"data_seed": 0', '"data_seed": 1')])
    with pytest.raises(ValueError, match="data_seed: expected 0 on every rank, as on rank 0, got 1 on rank 1"):
        train.Trainer(MODEL, TRAIN, tiny_corpus())


def test_what_was_cut_off_is_compared_too():
    settings = run_settings(replace(MODEL, layer_pattern="attention"), TRAIN, tiny_corpus())
    flat = {name: value for part in settings.values() for name, value in part.items()}
    others = json.dumps({**flat, "seed": 9})
    other = hashlib.sha256(others.encode()).hexdigest() + others
    check_settings_on_all_ranks(settings, lambda text: [text[:100], text[:100]])
    with pytest.raises(
        ValueError, match="settings: expected 'one record' on every rank, as on rank 0, got 'another' on rank 1"
    ):
        check_settings_on_all_ranks(settings, lambda text: [text[:100], other[:100]])


def test_a_changed_validation_fraction_is_another_run(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).integers(0, 255, 2000, np.uint8).tobytes())
    first, second = (load_corpus(DataConfig(data_path=path, validation_fraction=share)) for share in (0.1, 0.3))
    trainer = backend_module("torch", "train").Trainer
    trainer(MODEL, TRAIN, first, device="cpu").save(tmp_path / "run")
    message = "expected the settings of its run, got others: training_bytes 1800 in the checkpoint, 1400 here"
    with pytest.raises(ValueError, match=message):
        trainer(MODEL, TRAIN, second, device="cpu").resume(tmp_path / "run")
    trainer(MODEL, TRAIN, first, device="cpu").resume(tmp_path / "run")

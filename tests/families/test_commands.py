"""From a folder of transformers to training in both backends and back, on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.plans.checkpoint import MODEL, read_checkpoint, split_arrays
from diptych.plans.config import DataConfig
from diptych.plans.model.data import load_corpus
from parity.cli.main import main
from parity.cli.run import read_metrics
from parity.cli.tokenizer import tokenizer_beside
from tests.backends import TORCH_DAILY
from tests.families import models

pytestmark = pytest.mark.thorough
SMALL = "--seq-length 16 --global-batch-size 4 --micro-batch-size 2 --train-iters 2 --eval-iters 1 --lr-warmup-iters 0"


def run(line: str) -> None:
    """Run a command, which succeeds."""
    assert main(line.split()) == 0


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of transformers, with ids for all bytes."""
    return models.save(models.build("qwen3_next", vocab_size=256), tmp_path / "tiny", torch.float32)


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer of words to a folder."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "the", "fox", "jumps", "over", "dog"])}
    tokenizer = Tokenizer(kinds.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_model_comes_in_is_compared_sampled_and_goes_out(folder, tmp_path, capsys):
    ours, out, text = tmp_path / "ours", tmp_path / "out", tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    run(f"import {folder} --output {ours}")
    run(f"compare --init {ours} --data-path {text} --output-dir {tmp_path / 'compared'} {SMALL}")
    report = json.loads((tmp_path / "compared" / "report.json").read_text())
    assert report["model"]["qk_layernorm"]
    capsys.readouterr()
    said = []
    for backend in ("torch", "jax"):
        run(f"sample {ours} --backend {backend} --length 5 --temperature 0")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    run(f"export {ours} {out}")
    before, after = (models.transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, out))
    tokens = torch.from_numpy(models.batch())
    assert torch.equal(before(tokens).logits, after(tokens).logits)


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_model_is_trained_on_a_text_with_its_own_tokenizer(backend, folder, tmp_path, capsys):
    with_tokenizer(folder)
    ours, tuned, out, text = (tmp_path / name for name in ("ours", "tuned", "out", "text"))
    text.write_text("the fox jumps over the dog " * 60)
    run(f"import {folder} --output {ours}")
    run(f"train --backend {backend} --init {ours} --save {tuned} --data-path {text} {SMALL} --exit-step 1")
    run(f"train --backend {backend} --resume --save {tuned} --data-path {text} {SMALL}")
    capsys.readouterr()
    run(f"info {tuned}")
    assert "step 2" in capsys.readouterr().out
    config = (tuned / "source" / "config.json").read_bytes()
    (ours / "source" / "config.json").write_text("{}")
    assert main(f"train --backend {backend} --init {ours} --save {tuned} --data-path {text} {SMALL}".split()) == 2
    assert (tuned / "source" / "config.json").read_bytes() == config
    tokenizer = tokenizer_beside(tuned)
    assert tokenizer is not None
    assert tokenizer.encode(b"the fox") == [3, 4]
    corpus = load_corpus(DataConfig(data_path=text), tokenizer)
    np.testing.assert_array_equal(corpus.training[:7], [3, 4, 5, 6, 3, 7, 3])
    run(f"export {tuned} {out}")
    embedding = models.transformers.AutoModelForCausalLM.from_pretrained(out).model.embed_tokens.weight
    trained = split_arrays(read_checkpoint(tuned).arrays, MODEL)["embedding.weight"]
    np.testing.assert_array_equal(embedding.detach().numpy(), trained)
    assert (out / "tokenizer.json").exists()


def test_a_folder_is_planned_without_its_weights(folder, capsys):
    (folder / "model.safetensors").unlink()
    run(f"plan --model {folder} --seq-length 64")
    count = sum(parameter.numel() for parameter in models.build("qwen3_next", vocab_size=256).parameters())
    printed = " ".join(capsys.readouterr().out.split())  # a long path breaks the line
    assert f"3 layers, {count:,} parameters" in printed
    assert main(f"plan --model {folder} --hidden-size 8".split()) == 2
    assert "--hidden-size: expected 24, as in" in capsys.readouterr().err


def test_an_imported_model_is_trained_with_a_load_balancing_loss(tmp_path):
    """The coefficient belongs to the training, not to the weights."""
    theirs = models.save(models.build("qwen3_next with experts", vocab_size=256), tmp_path / "tiny", torch.float32)
    ours, text = tmp_path / "ours", tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    run(f"import {theirs} --output {ours}")
    losses = []
    for coefficient in (0.0, 0.5):
        folder = tmp_path / f"run{coefficient}"
        run(
            f"train --backend torch --init {ours} --save {folder} --data-path {text} {SMALL} --exit-step 1 "
            f"--moe-aux-loss-coeff {coefficient}"
        )
        losses.append(read_metrics(folder / "metrics.jsonl")[0]["loss"])
    assert losses[1] > losses[0] + 0.5  # two layers, each near 1


def test_flags_are_checked_against_the_layers_of_the_folder(folder, capsys):
    """Three pipeline ranks need three layers, which the folder has, not the two of a model without one."""
    run(f"plan --model {folder} --pipeline-model-parallel-size 3")
    assert main(f"plan --model {folder} --pipeline-model-parallel-size 2".split()) == 2
    assert "2 pipeline ranks with 1 stages each, got 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["num-layers 2", "hidden-size 128", "layernorm-epsilon 1e-05", "enable-hyper-connections"]
)
def test_a_flag_with_the_default_value_contradicts_the_weights_too(flag, folder, tmp_path, capsys):
    """It was ignored, because a run without the flag has the same value."""
    ours = tmp_path / "ours"
    run(f"import {folder} --output {ours}")
    for words in (f"train --init {ours} --{flag} {SMALL}", f"plan --model {folder} --{flag}"):
        assert main(words.split()) == 2
        assert f"--{flag.split()[0]}: expected" in capsys.readouterr().err


def test_a_run_on_short_sequences_keeps_the_length_of_the_model(folder, tmp_path):
    ours, tuned, out, text = (tmp_path / name for name in ("ours", "tuned", "out", "text"))
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    run(f"import {folder} --output {ours}")
    run(f"train --init {ours} --save {tuned} --data-path {text} {SMALL} --calculate-per-token-loss --exit-step 1")
    run(f"export {tuned} {out}")
    lengths = [json.loads((path / "config.json").read_text())["max_position_embeddings"] for path in (folder, out)]
    assert lengths[0] == lengths[1] > 16


def test_folders_of_weights_are_told_apart(folder, tmp_path, capsys):
    """A Hugging Face folder in place of an import, and an import in place of a Hugging Face folder."""
    assert main(f"train --init {folder} {SMALL}".split()) == 2
    assert "run diptych import first" in capsys.readouterr().err
    ours = tmp_path / "ours"
    run(f"import {folder} --output {ours}")
    run(f"plan --model {ours}")


@pytest.mark.parametrize(("family", "flags"), [("llama", ""), ("llama", " --ffn-hidden-size 24")])
def test_a_model_from_scratch_is_exported(family, flags, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    sizes = "--hidden-size 16 --num-attention-heads 2 --num-layers 1 --no-enable-hyper-connections"
    run(
        f"train --backend torch {sizes} --untie-embeddings-and-output-weights --save {tmp_path / 'run'} "
        f"--data-path {text} {SMALL} --exit-step 1{flags}"
    )
    run(f"export {tmp_path / 'run'} {tmp_path / 'out'} --family {family}")
    models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_settings_that_the_weights_contradict_are_named(folder, tmp_path, capsys):
    ours = tmp_path / "ours"
    run(f"import {folder} --output {ours}")
    capsys.readouterr()
    assert main(f"train --init {ours} --num-layers 5 {SMALL}".split()) == 2
    assert "--num-layers: expected 3, as in the weights of" in capsys.readouterr().err
    assert main(f"train --save {ours} --resume {SMALL}".split()) == 2
    assert "expected one of a run, got weights alone; begin a run with them by --init" in capsys.readouterr().err

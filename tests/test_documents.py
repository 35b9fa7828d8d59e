"""Several documents in one sequence: none sees another, from the corpus through the model to the trained parameters."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus, load_corpus
from diptych.plans.model.documents import documents_in_windows, most_documents
from parity.compare import relative_difference
from parity.tolerances import GRADIENT, PARAMETERS
from tests.backends import BACKENDS, TORCH_DAILY, backend_module

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=2,
    ffn_hidden_size=16,
    vocab_size=128,
    seq_length=20,
    init_method_std=0.3,
    params_dtype="float64",
    layer_pattern="kda,gdn,attention",
    linear_num_value_heads=4,
)
TRAIN = TrainConfig(train_iters=6, global_batch_size=4, lr=1e-2, min_lr=1e-3, lr_warmup_iters=1, eval_iters=2)
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 20)).astype(np.int32)
STARTS = np.array([[0, 1, 9, 9, 20], [0, 12, 20, 20, 20]], np.int32)
"""A document of one token, an empty one, places left over."""


# ------------------------------------------------------------------------------------------------- corpus

boundaries = st.lists(st.integers(0, 59), unique=True, min_size=1, max_size=20).map(lambda x: np.array(sorted(x)))


@given(starts=boundaries, length=st.integers(1, 25), windows=st.lists(st.integers(0, 34), min_size=1, max_size=5))
@example(starts=np.array([0, 5, 9]), length=6, windows=[0, 5, 4, 3])
def test_windows_know_the_documents_that_begin_in_them(starts, length, windows):
    most = most_documents(starts, length)
    found = documents_in_windows(starts, np.array(windows), length, most)
    assert found.shape == (len(windows), most)
    assert found.dtype == np.int32
    for window, row in zip(windows, found, strict=True):
        inside = [0, *(int(start) - window for start in starts if window < start < window + length)]
        assert row.tolist() == inside + [length] * (most - len(inside))


@given(starts=boundaries, length=st.integers(1, 25))
def test_the_most_documents_of_any_window_is_one_that_occurs(starts, length):
    most = max(1 + sum(window < start < window + length for start in starts) for window in range(60))
    assert most_documents(starts, length) == most


def folder_of(path, lengths, letters="abcdefgh"):
    for number, length in enumerate(lengths):
        (path / f"{number:02}.txt").write_text(letters[number % len(letters)] * length)
    return path


def test_files_are_the_documents_of_a_corpus(tmp_path):
    folder = folder_of(tmp_path, [30, 0, 5, 40, 17, 60, 0])
    config = DataConfig(folder, validation_fraction=0.4, reset_attention_mask=True)
    corpus, plain = load_corpus(config), load_corpus(replace(config, reset_attention_mask=False))
    np.testing.assert_array_equal(corpus.training, plain.training)
    assert corpus.training_documents is not None
    assert corpus.training_documents.tolist() == [0, 31, 32, 38, 79]
    assert corpus.validation_documents is not None
    assert (corpus.validation_documents + len(corpus.training)).tolist() == [97]  # the last file has no byte
    assert corpus.digest != plain.digest
    for batch in (*(corpus.batch(step, 3, 12) for step in range(9)), corpus.validation_batch(0, 5, 12)):
        for row, starts in zip(batch.tokens, batch.document_starts, strict=True):
            parts = [bytes(part) for part in np.split(row.astype(np.uint8), starts[1:])]
            assert all(len(set(part.rstrip(b"\n"))) <= 1 for part in parts), parts
        part = batch.part(1, 2)
        np.testing.assert_array_equal(part.document_starts, batch.document_starts[1:3])
    assert plain.batch(0, 2, 12).document_starts is None


def test_one_file_is_one_document(tmp_path):
    path = tmp_path / "one"
    path.write_bytes(b"abc\n" * 50)
    batch = load_corpus(DataConfig(path, reset_attention_mask=True)).batch(0, 3, 8)
    np.testing.assert_array_equal(batch.document_starts, np.zeros((3, 1)))


# -------------------------------------------------------------------------------------------------- model


def run(backend: str, config: TransformerConfig, tokens, starts, mask=None):
    """Logits, and gradients by name of their sum under fixed weights."""
    model = backend_module(backend, "transformer").GPTModel(config)
    weights = np.random.default_rng(5).standard_normal((*tokens.shape, config.vocab_size))
    if backend == "torch":
        arguments = {"attention_mask": mask, "document_starts": starts}
        arguments = {name: None if x is None else torch.from_numpy(x) for name, x in arguments.items()}
        logits = model(torch.from_numpy(tokens), **arguments)
        (logits * torch.from_numpy(weights)).sum().backward()
        return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}

    given = None if mask is None else jnp.asarray(mask)

    @nnx.jit
    def both(model, starts):
        def weighed(model):
            logits = model(jnp.asarray(tokens), document_starts=starts, attention_mask=given)
            return (logits * weights).sum(), logits

        return nnx.grad(weighed, has_aux=True)(model)

    gradients, logits = both(model, starts if starts is None else jnp.asarray(starts))
    return np.asarray(logits), backend_module("jax", "saving").export_parameters(gradients)


def alone(config: TransformerConfig, tokens, starts) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of every document by itself, and gradients by name as those of run."""
    model, rows = backend_module("torch", "transformer").GPTModel(config), []
    for row, begins in zip(tokens, starts, strict=True):
        parts = [part for part in np.split(row, begins[1:]) if len(part)]
        rows.append(torch.cat([model(torch.from_numpy(part)[None])[0] for part in parts]))
    logits = torch.stack(rows)
    (logits * torch.from_numpy(np.random.default_rng(5).standard_normal(logits.shape))).sum().backward()
    return logits.detach().numpy(), {name: p.grad.numpy() for name, p in model.named_parameters()}


MODELS = {
    "hybrid": {},
    "fused attention, mhc": {"use_flash_attn": True, "enable_hyper_connections": True, "num_residual_streams": 2},
    "kda alone, long convolution": {"layer_pattern": "kda", "linear_conv_kernel_dim": 7},
    "attention alone": {"layer_pattern": "attention"},
}
RECOMPUTED = {
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}


@pytest.mark.parametrize("variant", MODELS)
def test_documents_in_a_sequence_are_as_if_alone(variant):
    config = replace(CONFIG, **MODELS[variant])
    logits, gradients = run("torch", config, TOKENS, STARTS)
    expected, others = alone(config, TOKENS, STARTS)
    assert relative_difference(logits, expected) < 1e-12
    for name, gradient in gradients.items():
        assert relative_difference(gradient, others[name]) < 1e-11, name
    together, _ = run("torch", config, TOKENS, None)
    assert relative_difference(logits, together) > 1e-3


@given(data=st.data())
def test_any_division_into_documents(data):
    config = replace(CONFIG, num_layers=2, layer_pattern="gdn,attention")
    width = data.draw(st.integers(0, 6))
    rows = [[0, *sorted(data.draw(st.lists(st.integers(0, 20), min_size=width, max_size=width)))] for _ in range(2)]
    starts = np.array(rows, np.int32)
    assert relative_difference(run("torch", config, TOKENS, starts)[0], alone(config, TOKENS, starts)[0]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("variant", MODELS)
def test_backends_agree_on_documents_and_every_gradient(variant):
    config = replace(CONFIG, **MODELS[variant])
    logits, gradients = run("torch", config, TOKENS, STARTS)
    theirs, others = run("jax", config, TOKENS, STARTS)
    assert relative_difference(logits, theirs) <= GRADIENT["float64"]
    for name, gradient in gradients.items():
        assert relative_difference(gradient, others[name]) <= GRADIENT["float64"], name


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_no_document_sees_another(backend):
    """What changes in one changes no bit in the others; in the one, all that follows."""
    config = replace(CONFIG, num_layers=2, layer_pattern="kda,attention")
    changed = TOKENS.copy()
    changed[0, 1] += 1  # first of the document at 1 .. 8
    before, after = (run(backend, config, tokens, STARTS)[0] for tokens in (TOKENS, changed))
    differs = (before != after).any(-1)
    assert differs.tolist() == [[False] + 8 * [True] + 11 * [False], 20 * [False]]


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("mode", RECOMPUTED)
def test_recomputation_changes_no_gradient_of_documents(backend, mode):
    logits, gradients = run(backend, CONFIG, TOKENS, STARTS)
    again, others = run(backend, replace(CONFIG, **RECOMPUTED[mode]), TOKENS, STARTS)
    assert relative_difference(logits, again) <= 1e-14
    for name, gradient in gradients.items():
        assert relative_difference(gradient, others[name]) <= 1e-13, name


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_mask_and_documents_both_hold(backend):
    config = replace(CONFIG, num_layers=1, layer_pattern="attention")
    mask = np.ones((2, 20, 20), bool)
    mask[:, :, 3] = False
    logits, _ = run(backend, config, TOKENS, STARTS, mask)
    tokens = np.arange(20)
    own = np.stack([starts[np.searchsorted(starts, tokens, side="right") - 1] for starts in STARTS])
    both = mask & (own[:, :, None] == own[:, None, :])
    assert relative_difference(logits, run(backend, config, TOKENS, None, both)[0]) < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (np.zeros((3, 1), np.int32), r"shape \[B, N\] with B = 2 and N >= 1, got \[3, 1\]"),
        (np.zeros((2, 0), np.int32), r"shape \[B, N\] with B = 2 and N >= 1, got \[2, 0\]"),
        (np.zeros((2, 1), np.float32), "expected int32, got float32"),
        (np.array([[0, 3], [1, 3]], np.int32), r"0 first in every sequence, got \[0, 1\]"),
        (np.array([[0, 3, 2], [0, 3, 4]], np.int32), r"never decrease, got \[0, 3, 2\] in sequence 0"),
        (np.array([[0, 3], [0, 21]], np.int32), r"at most T = 20, got 21"),
    ],
)
def test_bad_places_are_named(backend, starts, message):
    model = backend_module(backend, "transformer").GPTModel(replace(CONFIG, num_layers=1, layer_pattern="attention"))
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    with pytest.raises(ValueError, match=f"document_starts: .*{message}"):
        model(convert(TOKENS), document_starts=convert(starts))


# ----------------------------------------------------------------------------------------------- training


def corpus_of_documents() -> Corpus:
    data = np.random.default_rng(3).integers(0, 128, 3000).astype(np.uint8)
    starts = np.sort(np.random.default_rng(4).choice(np.arange(1, 2000), 250, replace=False))
    return Corpus("documents", data[:2000], data[2000:], 0, np.append(0, starts), np.arange(0, 1000, 9))


def trained(backend: str, config=CONFIG, train=TRAIN, **placed):
    trainer = backend_module(backend, "train").Trainer(config, train, corpus_of_documents(), **placed)
    losses = [trainer.train_step(step).loss for step in range(4)]
    return [*losses, trainer.validation_loss()], trainer.parameters()


def assert_alike(ours, theirs, tolerance: float) -> None:
    assert relative_difference(np.array(ours[0]), np.array(theirs[0])) <= tolerance
    for name, value in ours[1].items():
        assert relative_difference(value, theirs[1][name]) <= tolerance, name


def test_training_tells_the_model_where_documents_begin():
    """The first loss, by hand."""
    corpus = corpus_of_documents()
    batch = corpus.batch(0, 4, 20)
    assert batch.document_starts is not None
    assert (batch.document_starts[:, 1] < 20).any()
    logits = torch.from_numpy(alone(CONFIG, batch.tokens, batch.document_starts)[0])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten().long())
    assert trained("torch")[0][0] == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.slow
def test_backends_train_alike_on_documents():
    config = replace(CONFIG, num_layers=2, layer_pattern="gdn,attention")
    assert_alike(trained("torch", config), trained("jax", config), PARAMETERS["float64"])


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_microbatches_of_documents_add_up(backend):
    assert_alike(trained(backend), trained(backend, train=replace(TRAIN, micro_batch_size=1)), PARAMETERS["float64"])


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_documents_under_offload(backend):
    moved = {"enable_tensor_offload": True, "enable_activation_offload": True, "activation_offload_min_bytes": 1}
    assert_alike(trained(backend), trained(backend, replace(CONFIG, **moved)), PARAMETERS["float64"])


def test_a_run_goes_on_only_with_the_same_documents(tmp_path):
    corpus = corpus_of_documents()
    trainer = backend_module("torch", "train").Trainer(CONFIG, TRAIN, corpus)
    trainer.train_step(0)
    path = trainer.save(tmp_path)
    assert backend_module("torch", "train").Trainer(CONFIG, TRAIN, corpus).resume(path) == 1
    plain = replace(corpus, training_documents=None, validation_documents=None)
    with pytest.raises(CheckpointError, match="reset_attention_mask True in the checkpoint, None here"):
        backend_module("torch", "train").Trainer(CONFIG, TRAIN, plain).resume(path)

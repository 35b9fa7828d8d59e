"""Going on with a text: read in pieces, token by token or at once, a model says the same."""

from dataclasses import replace
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.model.sampling import split_unread
from parity.compare import relative_difference
from tests.backends import BACKENDS, TORCH_DAILY, backend_module

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=16,
    vocab_size=32,
    seq_length=20,
    init_method_std=0.3,
    params_dtype="float64",
    layer_pattern="kda,gdn,attention",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    hidden_dropout=0.1,
)
VARIANTS = {
    "hybrid": {},
    "attention alone": {"layer_pattern": "attention"},
    "mhc": {"enable_hyper_connections": True, "num_residual_streams": 2, "add_bias_linear": True},
    "no convolution, negative eigenvalues": {"linear_conv_kernel_dim": 1, "linear_allow_neg_eigval": True},
    "bounded decays, fused attention": {"kda_lower_bound": -2.0, "use_flash_attn": True},
    "twelve layers": {"num_layers": 12, "layer_pattern": "attention"},
    "whole layers recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
}
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 20)).astype(np.int32)


def at_once(backend: str, model, tokens: np.ndarray) -> np.ndarray:
    if backend == "torch":
        with torch.no_grad():
            return model(torch.from_numpy(tokens), training=False).numpy()
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens, training=False))(model, jnp.asarray(tokens)))


def in_pieces(backend: str, model, tokens: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Logits [B, T, V] of the same tokens, read up to each cut in turn."""
    cache_room, logits = backend_module(backend, "cache"), []
    cache = cache_room.empty_cache(model.config, len(tokens))

    @nnx.jit
    def go_on(model, tokens, cache):
        return model(tokens, cache=cache, training=False), cache

    for begin, end in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        piece = tokens[:, begin:end]
        if backend == "torch":
            with torch.no_grad():
                logits.append(model(torch.from_numpy(piece), cache=cache, training=False).numpy())
        else:
            out, cache = go_on(model, jnp.asarray(piece), cache)
            logits.append(np.asarray(out))
    assert cache.length == tokens.shape[1]
    return np.concatenate(logits, axis=1)


CASES = [
    *(pytest.param("torch", variant) for variant in VARIANTS),
    *(
        pytest.param("jax", variant, marks=pytest.mark.thorough if variant == "hybrid" else pytest.mark.slow)
        for variant in VARIANTS
    ),
]
"""JAX compiles long: make test takes one of its variants."""


@pytest.mark.parametrize(("backend", "variant"), CASES)
def test_prefill_and_single_steps_are_the_whole_forward(backend, variant):
    model = backend_module(backend, "transformer").GPTModel(replace(CONFIG, **VARIANTS[variant]))
    expected = at_once(backend, model, TOKENS)
    actual = in_pieces(backend, model, TOKENS, [7, *range(8, 20)])
    assert relative_difference(actual, expected) < 1e-12
    assert np.abs(expected).max() > 1e-3


RECOMPUTED_EXPERTS = dict(
    num_moe_experts=2, moe_ffn_hidden_size=16, moe_aux_loss_coeff=0.1, hidden_dropout=0.0, num_layers=2
)
RECOMPUTED_EXPERTS |= {"num_layers": 2, **VARIANTS["whole layers recomputed"]}


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_cache_is_filled_once_with_recompute_and_experts(backend):
    """In training mode, too, whose replay would otherwise add the tokens again."""
    for pattern in ("attention", "gdn"):
        model = backend_module(backend, "transformer").GPTModel(
            replace(CONFIG, layer_pattern=f"{pattern}+moe", **RECOMPUTED_EXPERTS)
        )
        cache = backend_module(backend, "cache").empty_cache(model.config, len(TOKENS))
        if backend == "torch":
            weight = model.decoder.layers["0"].self_attention.linear_proj.weight
            found = torch.autograd.grad(model(torch.from_numpy(TOKENS), cache=cache).square().sum(), weight)[0].numpy()
            expected = torch.autograd.grad(model(torch.from_numpy(TOKENS)).square().sum(), weight)[0].numpy()
        else:
            found, filled = nnx.jit(lambda m, x, c: (m(x, cache=c), c))(model, jnp.asarray(TOKENS), cache)
            model(jnp.asarray(TOKENS), cache=cache)
            assert np.array_equal(cache.layers[1][1], filled.layers[1][1])
            expected = at_once("jax", model, TOKENS)
        assert relative_difference(np.asarray(found), np.asarray(expected)) < 1e-12, pattern


@given(cuts=st.sets(st.integers(1, 19)), pattern=st.sampled_from(["kda", "gdn", "kda,attention", "attention,gdn"]))
@example(cuts=set(range(1, 20)), pattern="kda,attention")
@example(cuts={2, 4}, pattern="gdn")
def test_a_text_may_be_cut_anywhere(cuts, pattern):
    model = backend_module("torch", "transformer").GPTModel(replace(CONFIG, layer_pattern=pattern, num_layers=2))
    expected = at_once("torch", model, TOKENS)
    assert relative_difference(in_pieces("torch", model, TOKENS, sorted(cuts)), expected) < 1e-12


@pytest.mark.parametrize(("dtype", "bf16", "bound"), [("float32", False, 1e-5), ("float32", True, 3e-2)])
def test_narrow_types(dtype, bf16, bound):
    config = replace(CONFIG, params_dtype=dtype, bf16=bf16)
    model = backend_module("torch", "transformer").GPTModel(config)
    expected = at_once("torch", model, TOKENS)
    assert relative_difference(in_pieces("torch", model, TOKENS, [7, *range(8, 20)]), expected) < bound


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_decoder_reads_each_token_once_and_of_a_long_text_the_end(backend, monkeypatch):
    model = backend_module(backend, "transformer").GPTModel(
        replace(CONFIG, layer_pattern="gdn,attention", num_layers=2)
    )
    decoding = backend_module(backend, "decoding")
    decoder, text = decoding.Decoder(model), np.random.default_rng(1).integers(0, 32, 24)
    read = []
    monkeypatch.setattr(decoding, "split_unread", lambda *a: read.append(split_unread(*a)) or read[-1])
    for length in (5, 6, 7, 18, 19, 20, 21, 22):
        window = text[:length][-20:]
        padded = np.pad(window, (0, 20 - len(window))).astype(np.int32)  # causal: what follows is not seen
        expected = at_once(backend, model, padded[None])[0, len(window) - 1]
        assert relative_difference(decoder.next_logits(text[:length]), expected) < 1e-12, length
    assert [len(tokens) for _, tokens in read] == [5, 1, 1, 11, 1, 1, 20, 20]
    other = text[3:9]  # does not go on from anything
    padded = np.pad(other, (0, 14)).astype(np.int32)
    assert relative_difference(decoder.next_logits(other), at_once(backend, model, padded[None])[0, 5]) < 1e-12


@given(
    read=st.lists(st.integers(0, 2), max_size=6),
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    length=st.integers(1, 8),
)
def test_what_is_read_after_what_was_read_is_the_text(read, tokens, length):
    goes_on, unread = split_unread(np.array(read, np.int64), np.array(tokens), length, 3)
    assert len(unread) >= 1
    if goes_on:
        assert [*read, *unread] == tokens
        assert len(tokens) <= length
    else:
        assert list(unread) == tokens[-length:]
        assert len(tokens) > length or len(tokens) <= len(read) or tokens[: len(read)] != read


def test_reading_that_fails_leaves_nothing_half_remembered(monkeypatch):
    model = backend_module("torch", "transformer").GPTModel(CONFIG)
    decoder, text = backend_module("torch", "decoding").Decoder(model), TOKENS[0]
    decoder.next_logits(text[:6])
    with monkeypatch.context() as patch:
        patch.setattr(model.decoder.layers["2"].mlp, "forward", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            decoder.next_logits(text[:8])
    fresh = backend_module("torch", "decoding").Decoder(model)
    assert relative_difference(decoder.next_logits(text[:8]), fresh.next_logits(text[:8])) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_that_changes_in_place_between_calls_is_another_text(backend):
    model = backend_module(backend, "transformer").GPTModel(replace(CONFIG, num_layers=1, layer_pattern="attention"))
    decoding = backend_module(backend, "decoding")
    decoder, buffer = decoding.Decoder(model), TOKENS[0, :6].copy()
    decoder.next_logits(buffer[:5])
    buffer[2] = (buffer[2] + 1) % 32
    expected = decoding.Decoder(model).next_logits(buffer.copy())
    assert relative_difference(decoder.next_logits(buffer), expected) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_a_cache_is_refused(backend):
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    model = backend_module(backend, "transformer").GPTModel(replace(CONFIG, num_layers=1, layer_pattern="attention"))
    empty_cache = backend_module(backend, "cache").empty_cache
    cache = empty_cache(model.config, 2)
    model(convert(TOKENS[:, :15]), cache=cache, training=False)
    with pytest.raises(ValueError, match=r"at most 5 tokens after the 15 in the cache, with seq_length=20, got 6"):
        model(convert(TOKENS[:, :6]), cache=cache, training=False)
    starts = convert(np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match="document_starts: expected None with a cache"):
        model(convert(TOKENS[:, :5]), cache=cache, document_starts=starts)
    mask = convert(np.ones((2, 5, 5), bool))
    with pytest.raises(ValueError, match="attention_mask: expected None with a cache"):
        model(convert(TOKENS[:, :5]), cache=cache, attention_mask=mask)
    with pytest.raises(
        ValueError, match="cache: expected a cache of 1 sequences, the batch size of inputs, got one of 2"
    ):
        model(convert(TOKENS[:1, :5]), cache=cache, training=False)
    with pytest.raises(ValueError, match=r"inputs: expected at least one token, got shape \[2, 0\]"):
        model(convert(TOKENS[:, :0]), cache=cache, training=False)
    decoder = backend_module(backend, "decoding").Decoder(model)
    for tokens, message in (
        (np.zeros(0, np.int64), r"at least one, of one text, got shape \[0\]"),
        (np.zeros((1, 2), np.int64), r"at least one, of one text, got shape \[1, 2\]"),
        (np.array([1.5]), "integers, got float64"),
        (np.array([3, 32]), "ids below vocab_size=32, got 32"),
        (np.array([-1, 3]), "ids below vocab_size=32, got -1"),
    ):
        with pytest.raises(ValueError, match=f"tokens: expected {message}"):
            decoder.next_logits(tokens)


def test_where_jit_cannot_refuse_too_many_tokens_logits_are_nan():
    model = backend_module("jax", "transformer").GPTModel(
        replace(CONFIG, num_layers=1, layer_pattern="attention", seq_length=4)
    )
    cache = backend_module("jax", "cache").empty_cache(model.config, 1)
    go_on = nnx.jit(lambda model, tokens, cache: (model(tokens, cache=cache, training=False), cache))
    for number in range(6):
        logits, cache = go_on(model, jnp.asarray(TOKENS[:1, :1]), cache)
        assert bool(jnp.isnan(logits).all()) == (number >= 4), number


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_a_decoder_forgets(backend):
    """New parameters, then reset."""
    models = [backend_module(backend, "transformer").GPTModel(replace(CONFIG, seed=seed)) for seed in (0, 1)]
    decoders = [backend_module(backend, "decoding").Decoder(model) for model in models]
    for decoder in decoders:
        decoder.next_logits(TOKENS[0, :5])
    decoders[0].model = models[1]
    decoders[0].reset()
    expected = decoders[1].next_logits(TOKENS[0, :6])
    assert relative_difference(decoders[0].next_logits(TOKENS[0, :6]), expected) < 1e-12

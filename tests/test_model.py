"""The whole model: against a plain network written out here, the backends against each other, and
stages against the single-device model.
"""

import inspect
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.model.parameters import parameter_specs
from parity.compare import GradientDifference, gradient_norms, relative_difference
from parity.tolerances import GRADIENT
from tests.backends import BACKENDS, TORCH_DAILY, assert_close, backend_module, model_gradients, normal

pytestmark = pytest.mark.usefixtures("few_rounds")

SMALL = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    vocab_size=11,
    seq_length=12,
    init_method_std=0.3,
    params_dtype="float64",
)
HYPER = replace(SMALL, enable_hyper_connections=True, num_residual_streams=3)
GATED = replace(
    SMALL,
    kv_channels=12,
    rotary_percent=0.5,
    qk_layernorm=True,
    attention_output_gate=True,
    layernorm_zero_centered_gamma=True,
    layernorm_epsilon=0.1,
)
POST_NORM = replace(
    SMALL,
    layer_pattern="attention+post-norm,attention",
    rotary_percent=0.0,
    qk_layernorm=True,
    qk_layernorm_scope="projection",
    layernorm_epsilon=0.1,
)
PLAIN = {
    "usual": SMALL,
    "norms after attention, over all heads": POST_NORM,
    "gated, with normed heads": GATED,
    "without positions": replace(SMALL, rotary_percent=0.0),
}


def tokens_for(config: TransformerConfig, batch: int = 2, length: int | None = None, seed: int = 0) -> np.ndarray:
    shape = (batch, length or config.seq_length)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def plain_network(config: TransformerConfig, parameters: dict, tokens, scale: float = 1.0):
    """A transformer from PyTorch's own functions; a sublayer's input is scaled before its norm."""

    def norm(x, weight, factor=1.0):
        weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
        return F.rms_norm(factor * x, weight.shape, weight, config.layernorm_epsilon)

    def rotate(x, weight):  # [B, T, H, d]
        if config.qk_layernorm:
            x = norm(x.flatten(2), weight).view_as(x) if len(weight) > x.shape[-1] else norm(x, weight)
        turned = round(x.shape[-1] * config.rotary_percent)
        x, passed = x[..., :turned], x[..., turned:]
        half = turned // 2
        angle = torch.arange(x.shape[1])[:, None, None] * config.rotary_base ** (
            -torch.arange(half, dtype=x.dtype) / half
        )
        turn = torch.polar(torch.ones_like(angle), angle)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag, passed], -1)

    x = parameters["embedding.weight"][tokens]
    for number in range(config.num_layers):
        p = {k.removeprefix(f"decoder.layers.{number}."): v for k, v in parameters.items()}
        heads = config.num_attention_heads
        before = [p.get(f"{name}_layernorm.weight") for name in ("input", "pre_mlp")]
        after = [p.get(f"post_{name}_layernorm.weight") for name in ("attention", "mlp")]
        normed = x if before[0] is None else norm(x, before[0], scale)
        qkv = normed @ p["self_attention.linear_qkv.weight"].T
        normed_heads = (p.get(f"self_attention.{name}_layernorm.weight") for name in "qk")
        q, k, v = qkv.view(*tokens.shape, 3 * heads, -1).split(heads, 2)
        q, k, v = (t.transpose(1, 2) for t in (*map(rotate, (q, k), normed_heads), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if config.attention_output_gate:
            attended = attended * torch.sigmoid(normed @ p["self_attention.linear_gate.weight"].T)
        output = attended @ p["self_attention.linear_proj.weight"].T
        x = x + (output if after[0] is None else norm(output, after[0]))
        normed = x if before[1] is None else norm(x, before[1], scale)
        gate, value = (normed @ p["mlp.linear_fc1.weight"].T).chunk(2, -1)
        output = (F.silu(gate) * value) @ p["mlp.linear_fc2.weight"].T
        x = x + (output if after[1] is None else norm(output, after[1]))
    return norm(x, parameters["decoder.final_layernorm.weight"]) @ parameters["embedding.weight"].T


def plain_gradients(config, tokens, cotangent, scale=1.0):
    from diptych.plans.model.parameters import initial_value

    parameters = {
        name: torch.from_numpy(initial_value(config.seed, name, spec)).requires_grad_()
        for name, spec in parameter_specs(replace(config, enable_hyper_connections=False)).items()
    }
    logits = plain_network(config, parameters, torch.from_numpy(tokens).long(), scale)
    gradients = torch.autograd.grad(logits, list(parameters.values()), torch.from_numpy(cotangent))
    return logits.detach().numpy(), {n: g.numpy() for n, g in zip(parameters, gradients, strict=True)}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_mhc_it_is_the_plain_network(backend, name):
    config, tokens, cotangent = PLAIN[name], tokens_for(SMALL), normal(1, 2, 12, 11)
    logits, gradients = model_gradients(backend, config, tokens, cotangent)
    expected_logits, expected = plain_gradients(config, tokens, cotangent)
    assert_close([logits], [expected_logits], 1e-13)
    assert gradients.keys() == expected.keys()
    assert_close(list(gradients.values()), [expected[name] for name in gradients], 1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("streams", [1, 2, 4, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mhc_with_alpha_and_bias_zero_is_a_plain_network_that_normalises_half_the_streams(backend, streams):
    """alpha = bias = 0: h_pre = 1/2, h_post = 1, h_res = 1/S; a sublayer then normalises S/2 * x."""
    config = replace(SMALL, enable_hyper_connections=True, num_residual_streams=streams, mhc_init_gating_factor=0.0)
    tokens, cotangent = tokens_for(SMALL), normal(1, 2, 12, 11)
    logits, gradients = model_gradients(backend, config, tokens, cotangent)
    expected_logits, expected = plain_gradients(SMALL, tokens, cotangent, scale=streams / 2)
    assert_close([logits], [expected_logits], 1e-13)
    assert_close([gradients[name] for name in expected], list(expected.values()), 1e-12)


configurations = st.builds(
    lambda heads, head_dim, groups, **settings: TransformerConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=heads if groups is None or heads % groups else groups,
        vocab_size=13,
        seq_length=17,
        init_method_std=0.2,
        **settings,
    ),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 10]),
    groups=st.sampled_from([None, 1, 2]),
    num_layers=st.just(3),
    enable_hyper_connections=st.sampled_from([True, True, False]),
    num_residual_streams=st.integers(1, 5),
    sinkhorn_iterations=st.sampled_from([1, 3, 20]),
    sinkhorn_last=st.sampled_from(["row", "column"]),
    layer_pattern=st.sampled_from(
        [
            "attention",
            "attention+gelu",
            "attention+ffn=7,attention+gelu+no-mlp-hc",
            "attention+no-attention-hc,attention,attention+no-attention-hc+no-mlp-hc",
        ]
    ),
    use_flash_attn=st.booleans(),
    add_bias_linear=st.booleans(),
    untie_embeddings_and_output_weights=st.booleans(),
    hidden_dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
HARD = TransformerConfig(
    hidden_size=18,
    num_layers=3,
    num_attention_heads=3,
    num_query_groups=1,
    vocab_size=13,
    seq_length=17,
    init_method_std=0.2,
    enable_hyper_connections=True,
    num_residual_streams=3,
    layer_pattern="attention+ffn=7,attention+gelu+no-mlp-hc",
    add_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.3,
)
EXAMPLES = max(settings.default.max_examples // 4, 4)
HARD_CASES = {
    "odd sizes": lambda config, length: config.hidden_size % 8 != 0,
    "several streams": lambda config, length: config.residual_streams >= 2,
    "dropout": lambda config, length: config.hidden_dropout > 0,
    "length no power of two": lambda config, length: length & (length - 1) != 0,
    "tied": lambda config, length: not config.untie_embeddings_and_output_weights,
    "untied": lambda config, length: config.untie_embeddings_and_output_weights,
    "mixed layers": lambda config, length: "," in config.layer_pattern,
    "grouped queries": lambda config, length: config.query_groups < config.num_attention_heads,
}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_backends_agree_on_logits_and_every_gradient(dtype):
    drawn = Counter()

    # Shrinking would compile for minutes, and so would every example of the profile.
    @settings(phases=[Phase.explicit, Phase.generate], max_examples=EXAMPLES)
    @given(
        config=configurations,
        batch=st.integers(1, 3),
        length=st.sampled_from([1, 8, 11, 17]),
        step=st.integers(0, 2**32 - 1),
    )
    @example(HARD, 2, 11, 5)
    @example(replace(HARD, untie_embeddings_and_output_weights=False), 1, 17, 6)
    def check(config, batch, length, step):
        # Normalising 2 or 6 numbers is ill-conditioned; float64 covers such widths.
        assume(dtype == "float64" or config.hidden_size >= 12)
        drawn.update(name for name, holds in HARD_CASES.items() if holds(config, length))
        config = replace(config, params_dtype=dtype)
        tokens = tokens_for(config, batch, length, config.seed)
        cotangent = normal(config.seed + 1, batch, length, config.vocab_size).astype(dtype)
        logits, gradients = zip(
            *(model_gradients(b, config, tokens, cotangent, step=step) for b in BACKENDS), strict=True
        )
        assert_close(logits[1:], logits[:1], GRADIENT[dtype])
        assert gradients[0].keys() == gradients[1].keys() == parameter_specs(config).keys()
        norms, whole_norm = gradient_norms(*gradients)
        for name, gradient in gradients[0].items():
            relative = relative_difference(gradient, gradients[1][name])
            judged = GradientDifference(name, step, 0.0, relative, norms[name], whole_norm).judged(dtype)
            assert judged <= GRADIENT[dtype], f"{name}: {relative=:.1e}, {judged=:.1e}"

    check()
    assert set(drawn) == set(HARD_CASES), f"never run: {set(HARD_CASES) - set(drawn)}"


def run(backend: str, model, inputs, **arguments) -> np.ndarray:
    """A model's output as numpy; integer arguments stay integers."""
    wrap = torch.from_numpy if backend == "torch" else jnp.asarray
    arguments = {k: wrap(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    out = model(wrap(inputs), **arguments)
    return out.detach().numpy() if backend == "torch" else np.asarray(out)


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_dropout_follows_samples_and_positions_not_the_layout(backend):
    config = replace(HYPER, hidden_dropout=0.4)
    model = backend_module(backend, "transformer").GPTModel(config)
    tokens = tokens_for(config, batch=4)
    whole = run(backend, model, tokens, step=9)
    half = run(backend, model, tokens[2:], step=9, samples=np.array([2, 3]))
    assert_close([half], [whole[2:]], 1e-14)
    assert (run(backend, model, tokens[2:], step=9) != half).any()
    assert (run(backend, model, tokens, step=10) != whole).any()


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_no_dropout_outside_training(backend):
    config = replace(HYPER, hidden_dropout=0.4)
    model = backend_module(backend, "transformer").GPTModel(config)
    plain = backend_module(backend, "transformer").GPTModel(HYPER)
    tokens = tokens_for(config)
    np.testing.assert_array_equal(run(backend, model, tokens, training=False), run(backend, plain, tokens))
    if backend == "torch":
        np.testing.assert_array_equal(run(backend, model.eval(), tokens), run(backend, plain, tokens))


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_model_is_causal_and_masks_documents(backend):
    model = backend_module(backend, "transformer").GPTModel(HYPER)
    tokens = tokens_for(HYPER)
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % HYPER.vocab_size
    before, after = run(backend, model, tokens), run(backend, model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all(-1).all()

    document = np.arange(12) >= 5  # two documents in one row: the second must not see the first
    mask = np.broadcast_to(document[:, None] == document[None], (2, 12, 12))
    masked = run(backend, model, tokens, attention_mask=np.ascontiguousarray(mask))
    alone = run(backend, model, tokens[:, 5:], positions=np.arange(5, 12))
    assert_close([masked[:, 5:]], [alone], 1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_is_the_cross_entropy_of_the_logits(backend):
    model = backend_module(backend, "transformer").GPTModel(HYPER)
    tokens, targets = tokens_for(HYPER), tokens_for(HYPER, seed=1)
    if backend == "torch":
        logits, loss = run(backend, model, tokens), run(backend, model, tokens, targets=targets)
    else:  # the whole model as one program: its operations alone take longer to compile
        logits, loss = nnx.jit(lambda model, x, y: (model(x), model(x, targets=y)))(model, tokens, targets)
    logits = torch.from_numpy(np.array(logits))
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten().long())
    assert float(loss) == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_many_tokens(backend):
    model = backend_module(backend, "transformer").GPTModel(HYPER)
    with pytest.raises(ValueError, match="inputs: expected at most seq_length=12 tokens, got 13"):
        run(backend, model, tokens_for(HYPER, length=13))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_belong_to_the_first_and_last_stage(backend):
    GPTModel = backend_module(backend, "transformer").GPTModel
    config = replace(SMALL, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"post_process: expected False on stage 0 of 2 \(only stage 1 has that end\)"):
        GPTModel(config)
    with pytest.raises(ValueError, match=r"pre_process: expected False on stage 1 of 2"):
        GPTModel(config, pp_rank=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_out_of_range_are_never_taken_for_others(backend):
    model = backend_module(backend, "transformer").GPTModel(SMALL)
    tokens, targets = tokens_for(SMALL), tokens_for(SMALL)
    for wrong in (-1, -100, SMALL.vocab_size):
        for place in ("inputs", "targets"):
            given = {"inputs": tokens.copy(), "targets": targets.copy()}
            given[place][0, 0] = wrong
            if backend == "torch":
                with pytest.raises(IndexError):
                    run(backend, model, given["inputs"], targets=given["targets"])
            else:
                assert np.isnan(run(backend, model, given["inputs"], targets=given["targets"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_would_broadcast_are_refused(backend):
    """Without the tests' annotation checks, as a user calls it: hence unwrapped."""
    ops, wrap = backend_module(backend, "ops"), torch.from_numpy if backend == "torch" else jnp.asarray
    targets, mask = wrap(np.zeros((2, 1), np.int32)), wrap(np.ones((1, 12, 12), bool))
    with pytest.raises(ValueError, match=r"targets: expected shape \(2, 12\), got \(2, 1\)"):
        inspect.unwrap(ops.cross_entropy)(wrap(normal(0, 2, 12, 5)), targets)
    q, k, v = (wrap(x) for x in normal(0, 3, 2, 12, 1, 4))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(2, 12, 12\), got \(1, 12, 12\)"):
        inspect.unwrap(ops.causal_attention)(q, k, v, mask)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_stages_chained_are_the_whole_model(backend, tied):
    whole = replace(
        HYPER,
        num_layers=4,
        hidden_dropout=0.2,
        untie_embeddings_and_output_weights=not tied,
        layer_pattern="attention,attention+gelu",
    )
    config = replace(whole, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    GPTModel, tokens = backend_module(backend, "transformer").GPTModel, tokens_for(whole)
    expected = run(backend, GPTModel(whole), tokens, step=3)
    travelling, names = tokens, []
    for stage in range(4):
        place = {"vp_stage": stage // 2, "pp_rank": stage % 2}
        ends = {"pre_process": stage == 0, "post_process": stage == 3}
        model = GPTModel(config, **ends, **place)
        names += parameter_specs(config, **ends, **place)
        if stage > 0:
            assert travelling.shape == (2, 12, 3, 16)
        travelling = run(backend, model, travelling, step=3)
    np.testing.assert_array_equal(travelling, expected)
    copies = ["embedding.weight"] if tied else []  # the tied head's copy in the last stage
    assert sorted(names) == sorted([*parameter_specs(whole), *copies])

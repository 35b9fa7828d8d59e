"""Predicted memory against every allocation PyTorch makes."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from diptych.plans.optimizer_shards import has_master_weights, stored_dtype
from reference_torch.distributed_optimizer import DistributedAdamW
from reference_torch.recompute import measure_memory, residual_report
from reference_torch.stage import model_provider, offload_layers
from tests.planner.host_memory import uncounted_host
from tests.recompute.test_recompute import MODES, SELECTIVE

CONFIG = TransformerConfig(
    hidden_size=96,
    num_layers=4,
    num_attention_heads=4,
    seq_length=160,
    enable_hyper_connections=True,
    use_flash_attn=True,
)
VARIANTS = {
    "swiglu, fused attention": {},
    "gelu, dropout, bias": {"activation": "gelu", "hidden_dropout": 0.1, "add_bias_linear": True},
    "explicit attention, groups": {"use_flash_attn": False, "num_query_groups": 2},
    "float64, mixed layers": {
        "params_dtype": "float64",
        "layer_pattern": "attention,attention+gelu+no-mlp-hc,attention+no-attention-hc",
        "untie_embeddings_and_output_weights": True,
    },
    "delta rule": {"layer_pattern": "kda,gdn,attention", "linear_num_value_heads": 8},
    "mhc with a learned head": {"mhc_head": "learned", "mhc_epsilon": 1e-6, "mhc_transpose_h_res": True},
    "no mhc": {"enable_hyper_connections": False},
}


def store_narrow(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Round the parameters that have master weights, as training does."""
    named = dict(model.named_parameters())
    dtypes = {name: stored_dtype(config, name, p.shape) for name, p in named.items()}
    rounded = [p for name, p in named.items() if dtypes[name] != config.params_dtype]
    DistributedAdamW(named.values(), None, 1.0).keep_master_weights(torch.bfloat16, rounded)
    assert rounded
    assert all(p.dtype is torch.bfloat16 for p in rounded)


@cache
def measured(config: TransformerConfig, batch: int):
    seed = torch.Generator().manual_seed(0)  # the tokens decide how many rows each expert has
    tokens, targets = torch.randint(0, config.vocab_size, (2, batch, config.seq_length), generator=seed)
    model = model_provider(config)
    if has_master_weights(config):
        store_narrow(model, config)
    manager = offload_layers([model], config)
    parameters = list(model.parameters())

    def forward():
        return model(tokens, targets)

    def backward(loss):
        if not has_master_weights(config):
            return torch.autograd.grad(loss, parameters)
        loss.backward()  # widens gradients
        return None

    backward(forward())
    model.zero_grad()
    found = measure_memory(forward, backward)
    manager.close()
    return found, residual_report(forward)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prediction_within_two_percent(variant, mode):
    flags = MODES[mode]
    if variant == "no mhc" and ("mhc" in mode or mode == "all modules"):
        flags = {**SELECTIVE, "recompute_modules": ("layernorm", "core_attn", "mlp")}
    config = replace(CONFIG, **VARIANTS[variant], **flags)
    (saved, peak), report = measured(config, batch=4)
    prediction = predict_memory(config, batch=4)
    assert prediction.saved == pytest.approx(saved, rel=0.02)
    assert prediction.peak == pytest.approx(peak, rel=0.02)
    for name, value in report.items():
        assert prediction.saved_by_name[name] == value.bytes, name


DROPOUT = {
    "gelu, bias": VARIANTS["gelu, dropout, bias"],
    "one layer, bfloat16": {"num_layers": 1, "bf16": True},
    "streams of attention alone": {"num_layers": 1, "do_mlp_hyper_connection": False},
    "eight streams of the mlp alone": {
        "num_layers": 1,
        "activation": "gelu",
        "num_residual_streams": 8,
        "do_self_attention_hyper_connection": False,
        "ffn_hidden_size": 96,
    },
    "activations on the host": {
        "enable_activation_offload": True,
        "activation_offload_min_bytes": 1000,
        "activation": "gelu",
        "use_flash_attn": True,
    },
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_of_few_and_of_many_tokens(case, batch):
    """Few tokens need more for random words, of a tile of rows, than for the output and its scaled copy."""
    config = replace(CONFIG, **({"hidden_dropout": 0.1} | DROPOUT[case]))
    (saved, peak), _ = measured(config, batch)
    prediction = predict_memory(config, batch)
    assert prediction.saved == pytest.approx(saved, rel=0.001)
    assert prediction.peak == pytest.approx(peak, rel=0.02 if config.enable_activation_offload else 0.005)


KINDS = {
    "fused attention": {"use_flash_attn": True},
    "attention": {},
    "gelu, fused attention": {"activation": "gelu", "use_flash_attn": True},
    "grouped attention": {"num_query_groups": 2},
    "gated attention": {
        "qk_layernorm": True,
        "attention_output_gate": True,
        "rotary_percent": 0.5,
        "layernorm_zero_centered_gamma": True,
    },
    "post-norm": {
        "layer_pattern": "attention+post-norm,gdn+post-norm",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    "latent attention": {
        "layer_pattern": "mla",
        "rotary_percent": 0.0,
        "kv_lora_rank": 40,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 20,
    },
    "experts": {
        "layer_pattern": "attention+moe,attention+moe+gelu",
        "num_moe_experts": 6,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 24,
    },
    "experts with a shared one": {
        "layer_pattern": "attention+moe",
        "num_moe_experts": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
        "moe_aux_loss_coeff": 0.1,
    },
    "gdn": {"layer_pattern": "gdn"},
    "kda": {"layer_pattern": "kda", "linear_num_value_heads": 8, "linear_value_head_dim": 16},
}
DTYPES = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "master weights": {"bf16": True, "use_distributed_optimizer": True},
    "float64": {"params_dtype": "float64"},
}
RECOMPUTE = {
    "none": {},
    "full uniform": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "full block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "core_attn": {**SELECTIVE, "recompute_modules": ("core_attn",)},
    "without mhc": {**SELECTIVE, "recompute_modules": ("layernorm", "core_attn", "mlp")},
    "mhc": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "activation")},
}
PLAIN = replace(CONFIG, num_layers=3, use_flash_attn=False, enable_hyper_connections=False)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_type_and_mode_within_two_percent(kind, dtype, mode, batch):
    """With and without hyper-connections, of one sequence and of several; without oneDNN (docs/planner.md)."""
    for hyper in (False, True):
        if mode == "mhc" and not hyper:
            continue
        config = replace(PLAIN, **KINDS[kind], **DTYPES[dtype], **RECOMPUTE[mode], enable_hyper_connections=hyper)
        with torch.backends.mkldnn.flags(enabled=False):
            (saved, peak), _ = measured(config, batch)
        prediction = predict_memory(config, batch)
        assert prediction.saved == pytest.approx(saved, rel=1e-3), hyper
        assert prediction.peak == pytest.approx(peak, rel=0.02), hyper


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "master weights"])
@pytest.mark.parametrize("kind", ["gated attention", "latent attention", "experts with a shared one", "gdn", "kda"])
def test_fp8_within_two_percent(kind, dtype, recipe):
    for mode in ("none", "full block"):
        fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "hidden_size": 96}
        config = replace(PLAIN, **KINDS[kind], **DTYPES[dtype], **RECOMPUTE[mode], **fp8)
        (saved, peak), _ = measured(config, 2)
        prediction = predict_memory(config, 2)
        assert prediction.saved == pytest.approx(saved, rel=1e-3)
        assert prediction.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("fp8", [{}, {"fp8": "hybrid", "fp8_recipe": "delayed"}], ids=["plain", "FP8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "master weights"])
@pytest.mark.parametrize(
    "kind", ["attention", "gelu, fused attention", "latent attention", "experts", "gdn", "post-norm"]
)
def test_values_saved_in_8_bits_within_two_percent(kind, dtype, fp8):
    """With experts that are replayed whole, and with inputs that recompute drops, which backward packs."""
    for mode in ("none", "full block", "core_attn", "mhc"):
        given = {"hidden_size": 96, "activation_storage": "fp8", "enable_hyper_connections": mode == "mhc"}
        config = replace(PLAIN, **KINDS[kind], **DTYPES[dtype], **RECOMPUTE[mode], **fp8, **given)
        (saved, peak), report = measured(config, 2)
        prediction = predict_memory(config, 2)
        assert prediction.saved == pytest.approx(saved, rel=1e-3), mode
        assert prediction.peak == pytest.approx(peak, rel=0.02), mode
        for name, value in report.items():
            assert prediction.saved_by_name[name] == value.bytes, (mode, name)


OFFLOADED = {
    "all": {},
    "two": {"activation_offload_layers": "0,3"},
    "no prefetch": {"tensor_offload_num_prefetch_layers": 0},
    "two ahead": {"tensor_offload_num_prefetch_layers": 2, "activation_offload_layers": "0-3"},
    "names": {"activation_offload_layers": "0-2:residual_streams+q+fc1+short_conv,3:residual_streams,4"},
}


@pytest.mark.parametrize("mode", ["none", "full block", "without mhc", "mhc"])
@pytest.mark.parametrize("kind", ["fused attention", "attention", "latent attention", "experts", "gdn", "post-norm"])
def test_offloaded_activations_within_two_percent(kind, mode):
    """In float32: in bfloat16, products on a CPU need temporary buffers as large as a weight."""
    for name, offload in OFFLOADED.items():
        given = {"num_layers": 6, "enable_activation_offload": True, "activation_offload_min_bytes": 1000, **offload}
        config = replace(PLAIN, **KINDS[kind], **RECOMPUTE[mode], **given, enable_hyper_connections=mode == "mhc")
        with uncounted_host():
            saved, peak = measured(config, 2)[0]
        prediction = predict_memory(config, 2)
        assert prediction.saved == pytest.approx(saved, rel=1e-3), name
        assert prediction.peak == pytest.approx(peak, rel=0.02), name
        without = predict_memory(replace(config, enable_activation_offload=False, activation_offload_layers=None), 2)
        assert prediction.saved < 0.95 * without.saved, name


@pytest.mark.parametrize("mode", ["none", "full block", "without mhc"])
def test_some_layers_that_save_in_8_bits_within_two_percent(mode):
    given = {"activation_storage": "fp8", "activation_storage_layers": "1", "layer_pattern": "attention,gdn"}
    config = replace(PLAIN, **RECOMPUTE[mode], **given)
    (saved, peak), report = measured(config, 2)
    prediction = predict_memory(config, 2)
    assert prediction.saved == pytest.approx(saved, rel=1e-3)
    assert prediction.peak == pytest.approx(peak, rel=0.02)
    for name, value in report.items():
        assert prediction.saved_by_name[name] == value.bytes, name


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_outputs_between_streams_are_freed(recipe):
    """The output of an MLP without bias is that of its product, which recompute can free if it is no view."""
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "hidden_size": 96, "enable_hyper_connections": True}
    config = replace(PLAIN, **fp8, recompute_granularity="selective", recompute_modules=("mlp",))
    (saved, _), report = measured(config, 2)
    assert "mlp_output" not in report
    assert predict_memory(config, 2).saved == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize("batch", [1, 3])
def test_saved_bytes_with_dropout_within_a_thousandth(batch):
    """Dropout saves the numbers of its rows, which count where little else is saved."""
    config = replace(PLAIN, hidden_dropout=0.1, **RECOMPUTE["full uniform"])
    (saved, _), _ = measured(config, batch)
    assert predict_memory(config, batch).saved == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize(("length", "batch"), [(640, 1), (1100, 1), (200, 2), (16, 2)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_rule_over_several_segments_and_short_sequences_within_two_percent(kind, length, batch):
    """Backward of a segment begins while the one before it is still there; short sequences have shorter chunks."""
    config = replace(PLAIN, num_layers=1, seq_length=length, **KINDS[kind], bf16=length == 640)
    (saved, peak), _ = measured(config, batch)
    prediction = predict_memory(config, batch)
    assert prediction.saved == pytest.approx(saved, rel=2e-3)
    assert prediction.peak == pytest.approx(peak, rel=0.02)


SMALL = {
    "one head": {"num_attention_heads": 1, "activation": "gelu"},
    "few tokens": {"hidden_size": 48, "seq_length": 12},
    "four tokens of one head": {"hidden_size": 16, "num_attention_heads": 1, "seq_length": 4},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("size", SMALL)
def test_small_models_within_two_percent(size, dtype):
    """Without oneDNN, whose products in bfloat16 need buffers of their own (docs/planner.md)."""
    for mode in ("none", "full block"):
        config = replace(PLAIN, **SMALL[size], **DTYPES[dtype], **RECOMPUTE[mode])
        with torch.backends.mkldnn.flags(enabled=False):
            (saved, peak), _ = measured(config, 2)
        prediction = predict_memory(config, 2)
        assert prediction.saved == pytest.approx(saved, rel=2e-3), mode
        assert prediction.peak == pytest.approx(peak, rel=0.02), mode


def test_kept_terms_add_up_and_grow_with_the_batch():
    one, two = (predict_memory(CONFIG, batch) for batch in (1, 2))
    assert one.saved == sum(one.saved_by_name.values())
    assert {n: 2 * v for n, v in one.saved_by_name.items() if n not in ("rotary angles", "loss")} == {
        n: v for n, v in two.saved_by_name.items() if n not in ("rotary angles", "loss")
    }


def test_predicts_what_no_machine_here_could_run():
    """The size of the mHC paper's example: S=4, C=4096, L=32, T=4096."""
    config = TransformerConfig(
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        seq_length=4096,
        enable_hyper_connections=True,
        use_flash_attn=True,
        bf16=True,
    )
    none = predict_memory(config, 1)
    mhc = predict_memory(replace(config, recompute_granularity="selective", recompute_modules=("mhc", "layernorm")), 1)
    assert none.saved_by_name["residual_streams"] == 64 * 4096 * 4 * 4096 * 2
    assert mhc.saved_by_name["residual_streams"] == 7 * 4096 * 4 * 4096 * 2
    assert none.saved > 40e9

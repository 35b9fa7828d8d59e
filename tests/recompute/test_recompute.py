"""Recompute plans, and what both backends make of them: equal values kept, equal gradients."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from diptych.plans.model.values import VALUES
from diptych.plans.recompute import MODULES, block_length, recompute_blocks
from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from tests.backends import TORCH_DAILY, backend_module, model_gradients, normal

pytestmark = pytest.mark.usefixtures("few_rounds")

MODEL = TransformerConfig(
    hidden_size=24,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=17,
    seq_length=12,
    enable_hyper_connections=True,
    num_residual_streams=3,
    params_dtype="float64",
)
SELECTIVE = {"recompute_granularity": "selective"}
MODES = {
    "none": {},
    "mhc": {**SELECTIVE, "recompute_modules": ("mhc",)},
    "mhc, blocks of 1": {**SELECTIVE, "recompute_modules": ("mhc",), "mhc_recompute_layer_num": 1},
    "mhc, blocks of 3": {**SELECTIVE, "recompute_modules": ("mhc",), "mhc_recompute_layer_num": 3},
    "mhc and layernorm": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm")},
    "layernorm": {**SELECTIVE, "recompute_modules": ("layernorm",)},
    "pre_mlp_layernorm": {**SELECTIVE, "recompute_pre_mlp_layernorm": True},
    "core_attn": {**SELECTIVE, "recompute_modules": ("core_attn",)},
    "activation": {**SELECTIVE, "recompute_modules": ("activation",)},
    "mlp": {**SELECTIVE, "recompute_modules": ("mlp",)},
    "mlp and layernorm": {**SELECTIVE, "recompute_mlp": True, "recompute_pre_mlp_layernorm": True},
    "all modules": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "core_attn", "activation", "mlp")},
    "full, uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    "full, block, activation": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "recompute_activation_function": True,
        "recompute_activation_function_num_layers": 1,
    },
    "mhc, some activations": {
        **SELECTIVE,
        "recompute_hyper_connections": True,
        "recompute_activation_function": True,
        "recompute_activation_function_num_layers": 1,
    },
}


def blocks_of(config: TransformerConfig) -> list[tuple]:
    return [(block.kind, block.layers, sorted(block.modules)) for block in recompute_blocks(config)]


def test_blocks_by_hand():
    selected = [("selective", (0, 1), ["mhc"]), ("selective", (2, 3), ["mhc"])]
    assert blocks_of(replace(MODEL, **MODES["mhc"])) == selected
    assert blocks_of(replace(MODEL, **MODES["mhc, blocks of 3"])) == [
        ("selective", (0, 1, 2), ["mhc"]),
        ("selective", (3,), ["mhc"]),
    ]
    assert blocks_of(replace(MODEL, **MODES["full, uniform"])) == [("full", (0, 1, 2), []), ("full", (3,), [])]
    assert blocks_of(replace(MODEL, **MODES["full, block, activation"])) == [
        ("full", (0,), []),
        ("full", (1,), []),
        ("selective", (2,), ["activation"]),
        ("none", (3,), []),
    ]
    assert blocks_of(replace(MODEL, **MODES["mhc, some activations"])) == [
        ("selective", (0,), ["activation", "mhc"]),
        ("selective", (1, 2), ["mhc"]),
        ("selective", (3,), ["mhc"]),
    ]


def test_no_count_is_all_the_rest_and_zero_is_none():
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_activation_function": True}
    kinds = [kind for kind, *_ in blocks_of(replace(MODEL, **full, recompute_num_layers=1))]
    assert kinds == ["full", "selective", "selective", "selective"]
    nothing = replace(MODEL, **full, recompute_num_layers=0, recompute_activation_function_num_layers=0)
    assert [kind for kind, *_ in blocks_of(nothing)] == ["none"] * 4
    everything = replace(MODEL, **full)
    assert [kind for kind, *_ in blocks_of(everything)] == ["full"] * 4


@pytest.mark.parametrize(("layers", "streams", "best"), [(16, 4, 3), (32, 4, 5), (1, 4, 1), (2, 1, 1), (61, 4, 6)])
def test_block_length_is_the_optimum(layers, streams, best):
    assert block_length(layers, streams) == best

    def cost(length):
        return streams * layers / length + (streams + 2) * length

    assert cost(best) <= 1.03 * min(cost(length) for length in np.linspace(1, layers, 1000))


@given(
    per_stage=st.integers(1, 6),
    pp_size=st.integers(1, 3),
    virtual=st.integers(1, 3),
    mode=st.sampled_from([*MODES]),
    full=st.integers(0, 5),
    activation=st.integers(0, 5) | st.none(),
)
def test_blocks_are_exactly_the_layers_of_every_stage(per_stage, pp_size, virtual, mode, full, activation):
    virtual = virtual if pp_size > 1 else 1
    on_rank = per_stage * virtual
    flags = {k: min(v, per_stage) if k == "mhc_recompute_layer_num" else v for k, v in MODES[mode].items()}
    if "recompute_num_layers" in flags:
        least = 1 if flags["recompute_method"] == "uniform" else 0
        flags["recompute_num_layers"] = max(least, min(full, on_rank))
    if flags.get("recompute_activation_function"):
        room_left = on_rank - flags.get("recompute_num_layers", 0)
        flags["recompute_activation_function_num_layers"] = None if activation is None else min(activation, room_left)
    config = replace(
        MODEL,
        num_layers=on_rank * pp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=virtual if pp_size > 1 else None,
        **flags,
    )
    seen = []
    for rank in range(pp_size):
        kinds = Counter()
        for vp_stage in range(virtual):
            blocks = recompute_blocks(config, vp_stage, rank)
            layers = [number for block in blocks for number in block.layers]
            assert layers == [(vp_stage * pp_size + rank) * per_stage + i for i in range(per_stage)]
            for block in blocks:
                kinds["full"] += len(block.layers) if block.kind == "full" else 0
                kinds["activation"] += len(block.layers) if "activation" in block.modules else 0
                assert (block.kind == "selective") == bool(block.modules)
                assert block.dropped <= set(VALUES)
            if blocks[0].modules and "mhc" in blocks[0].modules and not flags.get("recompute_activation_function"):
                lengths = [len(block.layers) for block in blocks]
                assert lengths[:-1] == [lengths[0]] * (len(lengths) - 1)
                assert lengths[-1] <= lengths[0]
            seen += layers
        if flags.get("recompute_method") == "block":
            assert kinds["full"] == flags["recompute_num_layers"]
            wanted = flags["recompute_activation_function_num_layers"]
            assert kinds["activation"] == (room_left if wanted is None else wanted)
    assert sorted(seen) == list(range(config.num_layers))


def test_every_module_drops_values_that_exist():
    for module, values in MODULES.items():
        assert values, module
        assert set(values) <= set(VALUES)


def reports(config: TransformerConfig) -> tuple[dict, dict]:
    """residual_report of the loss in both backends."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.seq_length))
    targets = np.roll(tokens, -1, 1)
    model = backend_module("torch", "transformer").GPTModel(config)
    ours = backend_module("torch", "recompute").residual_report(
        lambda: model(torch.from_numpy(tokens), torch.from_numpy(targets), step=3)
    )
    graph, params = nnx.split(backend_module("jax", "transformer").GPTModel(config), nnx.Param)
    theirs = backend_module("jax", "recompute").residual_report(
        lambda p: nnx.merge(graph, p)(jnp.asarray(tokens), jnp.asarray(targets), step=3), params
    )
    return ours, theirs


MIXED = {"layer_pattern": "attention,attention+gelu+no-mlp-hc,attention+no-attention-hc", "add_bias_linear": True}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"activation": "gelu", "hidden_dropout": 0.2, "use_flash_attn": True},
        {**MIXED, "hidden_dropout": 0.1},
        {"enable_hyper_connections": False, "params_dtype": "float32"},
    ],
    ids=["swiglu", "gelu, dropout, flash", "mixed layers", "no mhc"],
)
def test_both_backends_keep_the_same_values(mode, variant):
    flags = MODES[mode]
    if not variant.get("enable_hyper_connections", True) and "mhc" in mode + str(flags):
        flags = {"recompute_modules": ("layernorm", "activation", "core_attn"), **SELECTIVE}
    config = replace(MODEL, **variant, **flags)
    ours, theirs = reports(config)
    assert {n: (v.dtype, v.bytes) for n, v in ours.items()} == {n: (v.dtype, v.bytes) for n, v in theirs.items()}
    dropped_everywhere = frozenset.intersection(*(block.dropped for block in recompute_blocks(config)))
    assert not set(ours) & (dropped_everywhere - {"residual_streams"})
    if mode == "none":
        assert {"residual_streams", "input_layernorm", "q", "k", "v", "core_attn", "fc1", "activation"} <= set(ours)


@pytest.mark.thorough
def test_streams_are_kept_at_block_boundaries_only():
    stream_bytes = 2 * MODEL.seq_length * MODEL.num_residual_streams * MODEL.hidden_size * 8
    for mode, flags in MODES.items():
        config = replace(MODEL, **flags)
        blocks = [b for b in recompute_blocks(config) if "residual_streams" in b.dropped]
        if len(blocks) == len(recompute_blocks(config)):
            ours, _ = reports(config)
            assert ours["residual_streams"].bytes == len(blocks) * stream_bytes, mode
    assert reports(MODEL)[0]["residual_streams"].bytes == 2 * MODEL.num_layers * stream_bytes


def test_a_value_with_two_names_has_the_first():
    """As of a norm before a mixer, if tensor-parallel ranks exchange nothing between the two."""
    for backend, x in (("torch", torch.ones(3, requires_grad=True)), ("jax", jnp.ones(3))):
        recompute = backend_module(backend, "recompute")

        def twice(x, recompute=recompute):
            y = recompute.name_value(recompute.name_value(x * 2, "input_layernorm"), "region_input")
            return y * y

        assert [*recompute.residual_report(twice, x)] == ["input_layernorm"], backend


def test_name_must_be_a_known_value():
    for backend, x in (("torch", torch.ones(1)), ("jax", jnp.ones(1))):
        with pytest.raises(ValueError, match=r"name: expected one of \('residual_streams', .* got 'h_pst'"):
            backend_module(backend, "recompute").name_value(x, "h_pst")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_gradients_do_not_change_and_agree_between_the_backends(dtype):
    """PyTorch bitwise; JAX, whose compiler fuses anew, to 1e-13 and 2e-6."""
    drawn = Counter()
    examples = 3 if settings.get_current_profile_name() == "all" else 1  # JAX compiles twice for each

    @settings(phases=[Phase.explicit, Phase.generate], max_examples=examples)
    @given(
        mode=st.sampled_from([m for m in MODES if m != "none"]),
        variant=st.sampled_from([{}, {"activation": "gelu", "use_flash_attn": True}, MIXED]),
        dropout=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 2**20),
    )
    def check(mode, variant, dropout, seed):
        drawn[mode] += 1
        plain = replace(MODEL, params_dtype=dtype, hidden_dropout=dropout, seed=seed, init_method_std=0.2, **variant)
        tokens = np.random.default_rng(seed).integers(0, 17, (2, 12)).astype(np.int32)
        cotangent = normal(seed, 2, 12, 17).astype(dtype)
        results = {
            (backend, config is plain): model_gradients(backend, config, tokens, cotangent, step=seed)
            for backend in ("torch", "jax")
            for config in (plain, replace(plain, **MODES[mode]))
        }
        for name, expected in results["torch", True][1].items():
            np.testing.assert_array_equal(results["torch", False][1][name], expected, err_msg=name)
        whole = np.concatenate([g.ravel() for g in results["jax", True][1].values()])
        again = np.concatenate([g.ravel() for g in results["jax", False][1].values()])
        assert relative_difference(whole, again) <= {"float64": 1e-13, "float32": 2e-6}[dtype]
        ours = np.concatenate([results["torch", False][1][name].ravel() for name in results["jax", False][1]])
        assert relative_difference(ours, again) <= GRADIENT[dtype]

    check()
    assert len(drawn) >= min(examples, 2), drawn


@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_evaluation_and_inference_recompute_nothing(backend):
    config = replace(MODEL, **MODES["all modules"])
    tokens = np.arange(12)[None]
    model, plain = (backend_module(backend, "transformer").GPTModel(c) for c in (config, MODEL))
    if backend == "torch":
        with torch.no_grad():
            np.testing.assert_array_equal(model(torch.from_numpy(tokens)), plain(torch.from_numpy(tokens)))
        model.eval()
        report = backend_module(backend, "recompute").residual_report
        assert report(model, torch.from_numpy(tokens)) == report(plain, torch.from_numpy(tokens))
    else:
        np.testing.assert_allclose(model(jnp.asarray(tokens)), plain(jnp.asarray(tokens)), rtol=1e-12)


def test_jax_drops_by_one_checkpoint_a_block():
    def checkpoints(config):
        graph, params = nnx.split(backend_module("jax", "transformer").GPTModel(config), nnx.Param)
        program = jax.make_jaxpr(lambda p: nnx.merge(graph, p)(jnp.zeros((1, 8), int)))(params)
        return sum(equation.primitive.name.startswith("remat") for equation in program.jaxpr.eqns)

    assert checkpoints(replace(MODEL, **MODES["mhc"])) == 2
    assert checkpoints(replace(MODEL, **MODES["layernorm"])) == 4
    assert checkpoints(replace(MODEL, **MODES["full, block, activation"])) == 3


@pytest.mark.thorough
def test_table_in_the_docs_is_what_both_backends_keep():
    from benchmarks.saved_values import BEGIN, END, PAGE, table

    page = PAGE.read_text()
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)] == table()


@pytest.mark.parametrize(
    ("length", "batch", "tensor_parallel", "gib"),
    [(12288, 2, 4, 8.06), (8096, 2, 4, 5.31), (16384, 2, 4, 10.75), (12288, 1, 4, 4.03), (12288, 2, 8, 4.03)],
)
def test_llama2_7b_activation_table(length, batch, tensor_parallel, gib):
    """What activation recompute no longer keeps: the activation and the product, by the formula and by the plan."""
    saved = 2 * 2 * length * batch * (11008 / tensor_parallel) * 32 / 2**30
    assert round(saved, 2) == gib
    config = TransformerConfig(
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        ffn_hidden_size=11008 // tensor_parallel,
        seq_length=length,
        use_flash_attn=True,
        bf16=True,
    )
    totals = [predict_memory(replace(config, recompute_activation_function=on), batch).saved for on in (False, True)]
    assert (totals[0] - totals[1]) / 2**30 == pytest.approx(saved, rel=1e-3)

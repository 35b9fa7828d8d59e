"""The memory of a tensor-parallel rank is what its plan says, within 2%: exchanges, parts of embedding and loss."""

import math
from dataclasses import replace

import pytest

from diptych.planner.memory import predict_memory
from diptych.planner.memory.ranks import parameter_bytes
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.tensor_parallel import rank_config
from reference_torch.rank_pool import RankPool
from tests.planner.test_memory import DTYPES, KINDS, PLAIN, RECOMPUTE

HYPER = {"enable_hyper_connections": True, "hidden_dropout": 0.1, "add_bias_linear": True}
OUTPUTS_MOVED = {
    "num_layers": 6,
    "enable_activation_offload": True,
    "activation_offload_min_bytes": 1000,
    "activation_offload_layers": "0-3:pre_mlp_layernorm+attention_output+mlp_output+post_mlp_layernorm",
}
POST = "attention+post-norm"
CASES = {
    "attention": ("attention", "float32", "none", HYPER),
    "grouped attention": ("grouped attention", "bfloat16", "none", {}),
    "gated attention": ("gated attention", "float32", "none", {}),
    "latent attention": ("latent attention", "float32", "core_attn", HYPER),
    "experts": ("experts with a shared one", "float32", "none", HYPER),
    "kda": ("kda", "float32", "full uniform", {}),
    "gdn": ("gdn", "float64", "without mhc", HYPER),
    "mhc": ("attention", "float32", "mhc", HYPER),
    "outputs on the host": ("attention", "float32", "none", {**HYPER, **OUTPUTS_MOVED}),
    "outputs without bias on the host": ("attention", "float32", "none", {**OUTPUTS_MOVED, "layer_pattern": POST}),
}
DAILY = ("outputs on the host",)


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=240.0) as pool:
        yield pool


@pytest.mark.multiprocess
@pytest.mark.parametrize("tokens", [False, True], ids=["", "tokens"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in DAILY else pytest.mark.thorough) for c in CASES])
def test_s1_the_memory_of_a_rank_within_two_percent(ranks, case, tokens):
    kind, dtype, mode, more = CASES[case]
    settings = {**KINDS[kind], **DTYPES[dtype], **RECOMPUTE[mode], **more}
    config = replace(PLAIN, **settings, tensor_model_parallel_size=2, sequence_parallel=tokens)
    saved, peak = ranks.run("tests.planner.jobs:measure_rank", config, 8)[0]
    prediction = predict_memory(config, 8)
    assert prediction.saved == pytest.approx(saved, rel=0.005)
    assert prediction.peak == pytest.approx(peak, rel=0.02)


def test_s1_a_rank_holds_the_parameters_of_its_part():
    config = replace(PLAIN, tensor_model_parallel_size=4)
    own = sum(4 * math.prod(spec.shape) for spec in parameter_specs(rank_config(config)).values())
    assert parameter_bytes(config, 0) == own < parameter_bytes(PLAIN, 0) / 2

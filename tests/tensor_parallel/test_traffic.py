"""The bytes that tensor-parallel ranks send are what the plan says, and its times include them."""

from collections import Counter
from dataclasses import replace

import pytest

from diptych.planner.reports.mesh import describe_mesh
from diptych.planner.step_time import Machine, step_time
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TrainConfig, TransformerConfig
from reference_torch.rank_pool import RankPool
from tests.tensor_parallel.test_training import CONFIG, EXPERTS, FOUR, HYPER, NORMS, SELECTIVE, STAGES, TOKENS

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
MESHES = {
    "two": (2, 1, {}),
    "tokens, replayed": (2, 1, {**TOKENS, **FULL, **NORMS}),
    "four, replicas": (8, 2, {**FOUR, **NORMS}),
    "tokens of stages of experts": (4, 1, {**TOKENS, **STAGES, **EXPERTS}),
    "experts": (2, 1, EXPERTS),
    "stages, replicas, mhc": (8, 2, {**TOKENS, **STAGES, **HYPER, **SELECTIVE}),
    "context, bf16": (4, 1, {"context_parallel_size": 2, "bf16": True, "params_dtype": "float32"}),
    "context of stages": (8, 1, {**TOKENS, **STAGES, **HYPER, "context_parallel_size": 2}),
    "FP8": (8, 2, {**TOKENS, **STAGES, "params_dtype": "float32", "fp8": "hybrid"}),
    "FP8, histories": (4, 2, {"params_dtype": "float32", "fp8": "hybrid", "fp8_recipe": "delayed"}),
}
"""Ranks, replicas, settings."""
DAILY = ("tokens, replayed", "context, bf16")


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in MESHES])
def test_s1_bytes_on_the_wire_are_those_that_pytorch_sends(name):
    ranks, replicas, settings = MESHES[name]
    config = replace(CONFIG, **settings)
    train = TrainConfig(train_iters=2, global_batch_size=8, micro_batch_size=2, eval_iters=1)
    with RankPool(ranks) as pool:
        sent = pool.run("tests.planner.jobs:count_step", config, train)
    terms = {term.name: term for term in wire_traffic(config, 2, 4 // replicas, replicas)}
    total = {name: term.total for name, term in terms.items()}
    found = sum(sent, Counter())
    n, cp = config.tensor_model_parallel_size, config.context_parallel_size
    rings = found.pop("all_gather tp", 0) + found.pop("reduce_scatter tp", 0)
    sums = found.pop("all_reduce tp", 0)
    expected = total.pop("inputs and outputs of regions") + total.pop("gradients of repeated parameters", 0)
    assert rings * n + sums * (n - 1) == expected * n
    for own, place in zip(sent, range(ranks), strict=True):
        pp_rank = place // n % config.pipeline_model_parallel_size
        rings, sums = own["all_gather tp"] + own["reduce_scatter tp"], own["all_reduce tp"]
        names = ("inputs and outputs of regions", "gradients of repeated parameters")
        planned = sum(terms[name].by_rank[pp_rank] for name in names if name in terms)
        assert planned == pytest.approx(rings + sums * (n - 1) / n, abs=2)  # each term is rounded up
    messages = total.pop("activations", 0) + total.pop("gradients of activations", 0)
    assert found.pop("isend pp", 0) == messages
    assert found.pop("all_reduce embedding", 0) == 2 * total.pop("gradient of tied embedding", 0)
    copies = replicas * cp
    group = "all_reduce dp_cp" if cp > 1 else "all_reduce dp"
    assert found.pop(group, 0) * (copies - 1) == total.pop("gradients of parameters", 0) * copies
    assert found.pop("all_reduce cp", 0) * (cp - 1) == total.pop("gradients of keys and values", 0) * cp
    assert found.pop("all_gather cp", 0) + found.pop("isend cp", 0) == sum(total.values())
    assert total.keys() == ({"keys and values", "states and gradients", "tokens of convolutions"} if cp > 1 else set())
    assert not found, "bytes that the plan does not have"


def test_exchanges_take_time_and_shares_of_layers_save_some():
    whole = TransformerConfig(hidden_size=1024, num_layers=4, num_attention_heads=16, seq_length=1024, vocab_size=32768)
    part = replace(whole, tensor_model_parallel_size=4, sequence_parallel=True)
    fast = Machine(network_bandwidth=1e15, network_latency=0.0)
    slow = Machine(network_bandwidth=1e9)
    assert 0.25 < step_time(part, 1, 1, machine=fast).total / step_time(whole, 1, 1, machine=fast).total < 0.5
    waits = sum(stage.exchanged for stage in step_time(part, 1, 1, machine=slow).stages)
    assert waits > 0.0
    full = replace(part, recompute_granularity="full", recompute_method="uniform")
    assert sum(stage.exchanged for stage in step_time(full, 1, 1, machine=slow).stages) > waits


def test_the_mesh_in_words():
    assert describe_mesh(replace(CONFIG, **STAGES), 2) == (
        "8 ranks: 2 replicas of 2 pipeline ranks of 2 tensor-parallel ranks"
    )

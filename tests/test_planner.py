"""The planner of whole meshes: what ranks hold and send, against what they do, and against what was published."""

from collections import Counter
from dataclasses import replace

import pytest

from plans.config import TrainConfig, TransformerConfig
from plans.wire import wire_traffic
from reference_torch.rank_pool import RankPool

PRELOAD = ("torch.distributed", "tests.planner_jobs")
TINY = TransformerConfig(
    hidden_size=8,
    num_layers=4,
    num_attention_heads=2,
    num_query_groups=1,
    seq_length=12,
    layer_pattern="kda,gdn,attention,attention",
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    pipeline_timeout=60.0,
)
STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
MHC = {"enable_hyper_connections": True, "num_residual_streams": 2}
MESHES = {
    "replicas of stages": (4, 2, {**STAGES, **MHC, "untie_embeddings_and_output_weights": False}),
    "context ranks of stages, bf16": (4, 1, {**STAGES, "context_parallel_size": 2, "bf16": True}),
    "gathered, replayed": (4, 2, {"context_parallel_size": 2, **CORE}),
    "ring": (3, 1, {"context_parallel_size": 3, "cp_exchange": "ring", **FULL, "linear_conv_kernel_dim": 11}),
    "scan": (4, 1, {"context_parallel_size": 4, "cp_exchange": "scan", "cp_wire_dtype": "bfloat16"}),
}
"""Ranks, replicas, settings. Of the ring's convolutions one reads beyond the rank before."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", MESHES)
def test_bytes_on_the_wire_are_those_that_pytorch_sends(name):
    ranks, replicas, settings = MESHES[name]
    config = replace(TINY, **settings)
    train = TrainConfig(train_iters=2, global_batch_size=8, micro_batch_size=2, eval_iters=1)
    with RankPool(ranks, preload=PRELOAD) as pool:
        sent = pool.run("tests.planner_jobs:count_step", config, train)
    terms = {term.name: term for term in wire_traffic(config, 2, 4 // replicas, replicas)}
    total = {name: term.total for name, term in terms.items()}
    found = sum(sent, Counter())
    copies = ranks // config.pipeline_model_parallel_size
    assert found["isend pp"] == total.pop("activations", 0) + total.pop("gradients of activations", 0)
    gradients = found["all_reduce dp_cp"] + (found["all_reduce dp"] if config.context_parallel_size == 1 else 0)
    assert gradients * (copies - 1) == total.pop("gradients of parameters") * copies
    assert found["all_reduce embedding"] == 2 * total.pop("gradient of the tied embedding", 0)
    cp = config.context_parallel_size
    assert found["all_reduce cp"] * (cp - 1) == total.pop("gradients of keys and values", 0) * cp
    assert found["all_gather cp"] + found["isend cp"] == sum(total.values())
    assert cp == 1 or all(total.values())
    by_rank = [sum(term.by_rank[place] for term in terms.values()) for place in range(len(terms["gradients of parameters"].by_rank))]
    assert all(by_rank)

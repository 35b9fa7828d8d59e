"""Shards of a distributed optimizer: what a rank has, keeps and sends."""

from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.step_time import Machine, step_time
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.optimizer_shards import SHARD_MULTIPLE, own_shard, shard_size
from diptych.plans.schedule.named import schedule_for
from reference_torch.groups import GATHER, SCATTER
from reference_torch.rank_pool import RankPool
from tests.distributed_optimizer.test_training import settings

WIDE = TransformerConfig(hidden_size=1024, num_layers=4, num_attention_heads=16, seq_length=1024, vocab_size=32768)


@given(st.integers(0, 400), st.integers(1, 9))
def test_shards_are_all_elements_in_order(elements, ranks):
    x = np.arange(elements)
    shards = [x[own_shard(elements, ranks, rank)] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(shards), x)
    assert all(len(shard) <= shard_size(elements, ranks) for shard in shards)
    assert all(shard.size == 0 or shard[0] % SHARD_MULTIPLE == 0 for shard in shards)
    assert shard_size(elements, ranks) * ranks <= elements + SHARD_MULTIPLE * ranks


MESHES = (
    "replicas of stages, bfloat16",
    "replicas of stages, FP8",
    *("replicas of stages", "three replicas", "replicas, context", "replicas of ranks and stages"),
)


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [MESHES[0], *(pytest.param(cut, marks=pytest.mark.slow) for cut in MESHES[1:])])
def test_s2_memory_and_messages_are_the_predicted_ones(cut):
    replicas, config, train = settings(cut)
    ranks = replicas * config.model_parallel_size
    batch, count = train.microbatch if train.micro_batch_size else 2, 1 if train.micro_batch_size is None else 2
    with RankPool(ranks, timeout=300.0) as pool:
        measured = pool.run("tests.distributed_optimizer.jobs:held_bytes", config, train)
        sent = pool.run("tests.planner.jobs:count_step", config, train)
    stages = predict_stages(config, batch)
    memory = rank_memories(config, schedule_for(config, count), stages, replicas)
    n, p = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    for place in range(n * p):  # the first replica and context rank have most
        predicted = asdict(memory[place // n % p])
        assert measured[place] == {name: predicted[name] for name in measured[place]}
        for other in measured[place :: n * p]:
            assert all(other[name] <= size for name, size in measured[place].items())
    terms = {term.name: term for term in wire_traffic(config, batch, count, replicas)}
    group = "dp_cp" if config.context_parallel_size > 1 else "dp"
    for name, call in (
        ("gradients of parameters", SCATTER),
        ("updated parameters", GATHER),
    ):
        assert sum(sent, Counter())[f"{call} {group}"] == terms[name].total
        for rank, own in enumerate(sent):
            assert own[f"{call} {group}"] == terms[name].by_rank[rank // n % p]


def test_master_weights_need_less_memory_and_fewer_bytes():
    unsharded = replace(WIDE, bf16=True)
    sharded = replace(unsharded, use_distributed_optimizer=True)
    (before,), (after,) = (rank_memories(c, schedule_for(c, 1), predict_stages(c, 1), 8) for c in (unsharded, sharded))
    rounded = 2 * 12 * WIDE.num_layers * WIDE.hidden_size**2  # bytes
    assert after.parameters == pytest.approx(before.parameters - rounded, rel=0.01)
    assert after.master_weights == pytest.approx(2 * rounded / 8, rel=0.1)
    assert after.gradients == before.gradients
    assert after.activations == pytest.approx(before.activations - rounded, rel=0.05)
    sent = [{term.name: sum(term.by_rank) for term in wire_traffic(c, 1, 1, 8)} for c in (unsharded, sharded)]
    assert sent[1]["updated parameters"] < 0.75 * sent[1]["gradients of parameters"] == 0.375 * sum(sent[0].values())


def test_a_shard_needs_less_memory_and_no_more_messages():
    sharded = replace(WIDE, use_distributed_optimizer=True)
    schedule, stages = schedule_for(WIDE, 1), predict_stages(WIDE, 1)
    (unsharded,), (own,) = (rank_memories(config, schedule, stages, 8) for config in (WIDE, sharded))
    assert own.moments == pytest.approx(unsharded.moments / 8, rel=1e-3)
    assert unsharded.total - own.total == unsharded.moments - own.moments
    assert rank_memories(sharded, schedule, stages, 1) == [unsharded]
    found, expected = (sum(sum(term.by_rank) for term in wire_traffic(config, 1, 1, 8)) for config in (sharded, WIDE))
    assert found == expected
    times = [step_time(config, 1, 1, 8, machine=Machine()) for config in (sharded, WIDE)]
    assert times[0].update == pytest.approx(times[1].update / 8, rel=1e-3)
    assert times[0].gradients == pytest.approx(times[1].gradients)

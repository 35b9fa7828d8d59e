"""Shares of a distributed optimizer: what a rank has, keeps and sends."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.step_time import Machine, step_time
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.optimizer_shares import SHARE_MULTIPLE, join_shares, own_share, share_size
from diptych.plans.schedule.named import schedule_for
from reference_torch.groups import GATHER, SCATTER
from reference_torch.rank_pool import RankPool
from tests.distributed_optimizer.test_training import settings

WIDE = TransformerConfig(hidden_size=1024, num_layers=4, num_attention_heads=16, seq_length=1024, vocab_size=32768)


@given(st.integers(0, 400), st.integers(1, 9))
def test_shares_are_all_entries_in_order(entries, ranks):
    x = np.arange(entries)
    shares = [x[own_share(entries, ranks, rank)] for rank in range(ranks)]
    assert np.array_equal(join_shares(shares, x.shape), x)
    assert all(len(share) <= share_size(entries, ranks) for share in shares)
    assert all(share.size == 0 or share[0] % SHARE_MULTIPLE == 0 for share in shares)
    assert share_size(entries, ranks) * ranks <= entries + SHARE_MULTIPLE * ranks


MESHES = ("replicas of stages", "three replicas", "replicas, context", "replicas of ranks and stages")


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [MESHES[0], *(pytest.param(cut, marks=pytest.mark.slow) for cut in MESHES[1:])])
def test_s2_moments_and_messages_are_the_predicted_ones(cut):
    replicas, config, train = settings(cut)
    ranks = replicas * config.model_parallel_size
    batch, count = train.microbatch if train.micro_batch_size else 2, 1 if train.micro_batch_size is None else 2
    with RankPool(ranks, timeout=300.0) as pool:
        measured = pool.run("tests.distributed_optimizer.jobs:moment_bytes", config, train)
        sent = pool.run("tests.planner.jobs:count_step", config, train)
    stages = predict_stages(config, batch)
    memory = rank_memories(config, schedule_for(config, count), stages, replicas)
    n, p = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    for place in range(n * p):  # the first replica and context rank have most
        assert measured[place] == memory[place // n % p].moments
        assert all(each <= measured[place] for each in measured[place :: n * p])
    terms = {term.name: term for term in wire_traffic(config, batch, count, replicas)}
    group = "dp_cp" if config.context_parallel_size > 1 else "dp"
    for name, call in (
        ("gradients of parameters", SCATTER),
        ("updated parameters", GATHER),
    ):
        assert sum(sent, Counter())[f"{call} {group}"] == terms[name].total
        for rank, own in enumerate(sent):
            assert own[f"{call} {group}"] == terms[name].by_rank[rank // n % p]


def test_a_share_needs_less_memory_and_no_more_messages():
    shared = replace(WIDE, use_distributed_optimizer=True)
    schedule, stages = schedule_for(WIDE, 1), predict_stages(WIDE, 1)
    (whole,), (own,) = (rank_memories(config, schedule, stages, 8) for config in (WIDE, shared))
    assert own.moments == pytest.approx(whole.moments / 8, rel=1e-3)
    assert whole.total - own.total == whole.moments - own.moments
    assert rank_memories(shared, schedule, stages, 1) == [whole]
    found, expected = (sum(sum(term.by_rank) for term in wire_traffic(config, 1, 1, 8)) for config in (shared, WIDE))
    assert found == expected
    times = [step_time(config, 1, 1, 8, machine=Machine()) for config in (shared, WIDE)]
    assert times[0].update == pytest.approx(times[1].update / 8, rel=1e-3)
    assert times[0].gradients == pytest.approx(times[1].gradients)

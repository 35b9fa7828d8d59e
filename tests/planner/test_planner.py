"""The planner of whole meshes: what ranks hold and send, against what they do, and against what was published."""

import io
import re
import time
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from diptych.planner.memory import activation_recompute_saving, predict_memory
from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.memory.ranks import moved_bytes, offload_use, parameter_bytes, rank_memories
from diptych.planner.memory.stages import predict_stage_memory, predict_stages
from diptych.planner.reports.mesh import describe_mesh, join_equal_ranks, print_mesh, printed_rows
from diptych.planner.reports.schedule import plan_pipeline
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.offload import Use, layer_storages, plan_offload, rank_layers, rank_uses
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import num_stages
from parity.cli.main import main
from reference_torch.rank_pool import RankPool
from reference_torch.stage import model_provider
from reference_torch.train import Trainer
from tests.backends import tiny_corpus

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
ZIGZAG = {"cp_attention_layout": "zigzag"}
MHC = {"enable_hyper_connections": True, "num_residual_streams": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}

# Bytes on the wire.

MESHES = {
    "replicas of stages": (4, 2, {**STAGES, **MHC}),
    "context ranks of stages, bf16": (4, 1, {**STAGES, "context_parallel_size": 2, "bf16": True}),
    "gathered, replayed": (4, 2, {"context_parallel_size": 2, **CORE}),
    "ring": (3, 1, {"context_parallel_size": 3, "cp_exchange": "ring", **FULL, "linear_conv_kernel_dim": 11}),
    "scan": (4, 1, {"context_parallel_size": 4, "cp_exchange": "scan", "cp_wire_dtype": "bfloat16"}),
    "zigzag": (3, 1, {**ZIGZAG, "context_parallel_size": 3, "seq_length": 6, **CORE}),
    "pipelined, replayed": (3, 1, {"context_parallel_size": 3, "cp_exchange": "pipelined", **FULL}),
    "zigzag, parts of odd length": (4, 1, {**ZIGZAG, "context_parallel_size": 4, "seq_length": 10}),
}
"""Ranks, replicas, settings. Of the ring's convolutions one reads beyond the rank before."""
DAILY = ("context ranks of stages, bf16", "zigzag")


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in MESHES])
def test_bytes_on_the_wire_are_those_that_pytorch_sends(name):
    ranks, replicas, settings = MESHES[name]
    config = replace(TINY, **settings)
    train = TrainConfig(train_iters=2, global_batch_size=8, micro_batch_size=2, eval_iters=1)
    with RankPool(ranks) as pool:
        sent = pool.run("tests.planner.jobs:count_step", config, train)
    terms = {term.name: term for term in wire_traffic(config, 2, 4 // replicas, replicas)}
    total = {name: term.total for name, term in terms.items()}
    by_rank = {name: term.by_rank for name, term in terms.items()}
    found, p, cp = sum(sent, Counter()), config.pipeline_model_parallel_size, config.context_parallel_size
    copies, group = ranks // p, "all_reduce dp_cp" if cp > 1 else "all_reduce dp"
    for place, own in enumerate(sent):
        messages = [by_rank[name][place % p] for name in ("activations", "gradients of activations") if p > 1]
        assert own["isend pp"] == sum(messages)
        assert -(-own[group] * (copies - 1) // copies) == by_rank["gradients of parameters"][place % p]
    assert found["isend pp"] == total.pop("activations", 0) + total.pop("gradients of activations", 0)
    assert found[group] * (copies - 1) == total.pop("gradients of parameters") * copies
    assert found["all_reduce embedding"] == 2 * total.pop("gradient of tied embedding", 0)
    assert found["all_reduce cp"] * (cp - 1) == total.pop("gradients of keys and values", 0) * cp
    assert found["all_gather cp"] + found["isend cp"] == sum(total.values())
    assert len(total) == (3 + (config.cp_attention_layout == "zigzag") if cp > 1 else 0)
    assert all(total.values())
    for place in range(p):
        most = max(own["all_gather cp"] + own["isend cp"] for own in sent[place::p])
        assert most <= sum(by_rank[name][place] for name in total) <= 1.5 * most


def test_terms_without_their_ranks_are_left_out():
    assert wire_traffic(TINY, 2, 4) == []
    assert [term.name for term in wire_traffic(TINY, 2, 4, 2)] == ["gradients of parameters"]
    names = [term.name for term in wire_traffic(replace(TINY, **STAGES, **UNTIED), 2, 4)]
    assert names == ["activations", "gradients of activations"]


# Bytes of one rank.

PARTS = {
    "attention": {},
    "fused": {"use_flash_attn": True, "bf16": True},
    "fused, recomputed": {"use_flash_attn": True, **CORE},
    "fused, full recompute": {"use_flash_attn": True, "recompute_granularity": "full", "recompute_method": "uniform"},
    "zigzag": ZIGZAG,
    "zigzag, fused": {**ZIGZAG, "use_flash_attn": True, "bf16": True},
    "gdn, kda": {"layer_pattern": "gdn,kda"},
    "kda, recomputed": {"layer_pattern": "kda", **CORE},
    "attention, pipelined": {"cp_exchange": "pipelined"},
    "attention, pipelined, recomputed": {"cp_exchange": "pipelined", **CORE},
    "kda, pipelined": {"layer_pattern": "kda", "cp_exchange": "pipelined"},
}


@pytest.mark.multiprocess
def test_memory_of_a_part_of_the_tokens_is_pytorchs():
    """Within 2%; a rank whose first sequence began on it keeps less of the delta rule."""
    base = TransformerConfig(64, 2, 4, num_query_groups=2, seq_length=256, context_parallel_size=2)
    with RankPool(2) as pool:
        for settings in PARTS.values():
            config = replace(base, **settings)
            measured = pool.run("tests.planner.jobs:measure_part", config, 1)
            assert predict_stage_memory(config, 0, 1).saved == pytest.approx(measured[1][0], rel=0.02), settings
            (peak,) = rank_peaks(config, schedule_for(config, 1), 1)
            assert peak == pytest.approx(max(most for _, most in measured), rel=0.02), settings


@pytest.mark.parametrize("ends", [{}, UNTIED])
def test_parameters_and_moments_are_pytorchs(ends):
    config = replace(TINY, **STAGES, **MHC, **ends)
    stages = [model_provider(config, s == 0, s == 3, s // 2, s % 2) for s in range(4)]
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages]
    assert [parameter_bytes(config, stage) for stage in range(4)] == sizes
    memory = rank_memories(config, schedule_for(config, 2), predict_stages(config, 1))
    assert [rank.parameters for rank in memory] == [sizes[0] + sizes[2], sizes[1] + sizes[3]]
    assert all(rank.gradients == rank.parameters and rank.on_host == 0 for rank in memory)
    alone = replace(TINY, **MHC, **ends)
    trainer = Trainer(alone, TrainConfig(train_iters=2, global_batch_size=2), tiny_corpus(), device="cpu")
    trainer.train_step(0)
    moments = [x for state in trainer._optimizer.state.values() for n, x in state.items() if n.startswith("exp_avg")]
    (whole,) = rank_memories(alone, schedule_for(alone, 1), predict_stages(alone, 2))
    assert whole.moments == sum(x.nbytes for x in moments)
    assert whole.total == whole.parameters + whole.gradients + whole.moments + predict_memory(alone, 2).saved


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_activations_are_the_schedules_peak(schedule):
    virtual = 2 if schedule == "interleaved" else None
    layout = "Et|t|t|tttttL" if virtual is None else None
    replayed = {**FULL, "recompute_method": "uniform"} if schedule == "zb-h1" else {}  # more waits for W than for I
    config = replace(
        TINY,
        num_layers=8,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=layout,
        **replayed,
    )
    plan = plan_pipeline(config, 2, 8)
    memory = rank_memories(config, plan.schedule, predict_stages(config, 2))
    assert tuple(rank.activations + rank.waiting for rank in memory) == plan.simulation.peak_bytes
    assert any(rank.waiting for rank in memory) == (schedule == "zb-h1")


def test_stages_that_are_alike_are_simulated_once(monkeypatch):
    config = replace(TINY, num_layers=64, layer_pattern="kda,attention", pipeline_model_parallel_size=32)
    config = replace(config, pipeline_model_parallel_layout="Ettt|t|tt|(tt|)*27t|tttL")
    one_by_one = [predict_stage_memory(config, stage, 1) for stage in range(num_stages(config))]
    asked = []

    def counted(*arguments):
        asked.append(arguments)
        return predict_stage_memory(*arguments)

    monkeypatch.setattr("diptych.planner.memory.stages.predict_stage_memory", counted)
    assert predict_stages(config, 1) == one_by_one
    assert len(set(one_by_one)) == 5
    assert len(asked) == 5


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("settings", [{}, {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}])
def test_offloaded_layers_on_the_device_are_the_plans(ahead, settings):
    config = replace(
        TINY, num_layers=8, **STAGES, **settings, enable_tensor_offload=True, tensor_offload_num_prefetch_layers=ahead
    )
    storages, memory = layer_storages(config), rank_memories(config, schedule_for(config, 4), predict_stages(config, 1))
    sizes = {number: sum(each.values()) for number, each in storages.items()}
    assert len(set(sizes.values())) == 3
    for rank, found in enumerate(memory):
        layers = rank_layers(config, rank)
        uses = rank_uses(config, 4, rank) + [Use("S", layer) for layer in layers]
        peak = plan_offload(uses, storages, ahead).peak_bytes
        once, twice = (plan_offload(uses * count, storages, ahead) for count in (1, 2))
        second = twice.bytes_in + twice.bytes_out - once.bytes_in - once.bytes_out
        assert offload_use([use.layer for use in uses], sizes, ahead) == (peak, second)
        assert moved_bytes(config, schedule_for(config, 4))[rank] == second
        assert found.on_host == sum(sizes[layer] for layer in layers)
        assert found.parameters == found.gradients - found.on_host + peak
        assert found.total == found.parameters + 3 * found.gradients + found.activations


# What was published.

PUBLISHED = [
    (12288, 2, 4, 8.05),
    (8096, 2, 4, 5.31),
    (16384, 2, 4, 12.49),
    (12288, 1, 4, 4.04),
    (12288, 2, 8, 4.02),
]
"""seq_length, microbatch, tensor-parallel ranks, G saved by activation recompute in Llama-2-7B."""
LLAMA = TransformerConfig(4096, 32, 32, ffn_hidden_size=11008, vocab_size=32000, bf16=True, use_flash_attn=True)


def test_published_savings_of_activation_recompute_but_one():
    ratios = [
        activation_recompute_saving(replace(LLAMA, seq_length=length), batch, tp) / 2**30 / published
        for length, batch, tp, published in PUBLISHED
    ]
    assert [ratio for place, ratio in enumerate(ratios) if place != 2] == pytest.approx([1.0] * 4, abs=3e-3)
    assert ratios[2] == pytest.approx(10.75 / 12.49, abs=1e-3)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_saving_is_the_simulations_on_one_rank(activation):
    config = replace(LLAMA, seq_length=256, num_layers=3, activation=activation)
    plan = replace(config, recompute_granularity="selective", recompute_modules=("activation",))
    assert predict_memory(config, 2).saved - predict_memory(plan, 2).saved == activation_recompute_saving(config, 2)
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=rf"tp_size: expected a divisor of .* here \[11008\], got {wrong}"):
            activation_recompute_saving(config, 2, wrong)


# The command.

BIG = (
    "plan --hidden-size 8192 --num-layers 128 --num-attention-heads 64 --seq-length 8192 --bf16 --use-flash-attn "
    "--micro-batch-size 1 --num-microbatches 512 --pipeline-model-parallel-size 64 "
    "--virtual-pipeline-model-parallel-size 2 --context-parallel-size 8 --data-parallel-size 8"
)


@pytest.mark.thorough
@pytest.mark.alone
def test_four_thousand_ranks_are_planned_quickly_and_shown_briefly(capsys):
    start = time.process_time()
    assert main(BIG.split()) == 0
    assert time.process_time() - start < 20.0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "4,096 ranks: 8 replicas of 8 context ranks of 64 pipeline ranks"
    assert len(lines) < 120
    assert max(map(len, lines)) <= 100
    assert "blocks, stages 0 to 127: 1 of 1 layer: no recompute" in out
    assert re.search(r"^Most on pipeline rank 0: [0-9.]+ GiB", out, re.M)
    assert len(re.findall(r"^ +\.\.\. ", out, re.M)) == 9  # three tables by rank leave three runs out each


@pytest.mark.parametrize(
    ("settings", "replicas", "words"),
    [
        ({}, 1, "1 rank"),
        ({}, 3, "3 ranks: 3 replicas"),
        ({"pipeline_model_parallel_size": 2}, 1, "2 ranks: 2 pipeline ranks"),
        ({"context_parallel_size": 2}, 2, "4 ranks: 2 replicas of 2 context ranks"),
    ],
)
def test_the_mesh_in_words(settings, replicas, words):
    assert describe_mesh(replace(TINY, **settings), replicas) == words


def test_printed_bytes_are_the_plans():
    config = replace(TINY, hidden_size=512, **STAGES)
    printed = io.StringIO()
    print_mesh(Console(file=printed, width=120), config, 2, 4, 3)
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.getvalue().splitlines()]
    for place, rank in enumerate(rank_memories(config, schedule_for(config, 4), predict_stages(config, 2))):
        sizes = (rank.parameters, rank.gradients, rank.moments, rank.activations, rank.total)
        assert [str(place), *(f"{size / 2**20:,.1f}" for size in sizes)] in rows
    for name, algorithm, by_rank, total in wire_traffic(config, 2, 4, 3):
        most = max(by_rank)
        where = "every" if min(by_rank) == most else ", ".join(str(r) for r in range(2) if by_rank[r] == most)
        where = "0 to 1" if where == "0, 1" else where
        assert [name, algorithm, f"{most / 2**20:,.1f}", where, f"{total / 2**20:,.1f}"] in rows


def test_rows_that_are_alike_are_one():
    cells = [["a"], ["b"], ["b"], ["b"], ["a"]]
    assert join_equal_ranks(cells) == [("0", "a"), ("1 to 3", "b"), ("4", "a")]


@pytest.mark.parametrize("count", [1, 16, 17, 18, 64, 1000])
def test_long_tables_show_first_some_and_last_rows(count):
    rows = printed_rows(count)
    places = [place for place in rows if place is not None]
    assert places == sorted(set(places))
    assert (places == [*range(count)]) == (None not in rows) == (count <= 16)
    assert {*range(min(count, 5)), *range(max(0, count - 5), count)} <= {*places}
    assert len(rows) <= 16


def test_replicas_are_counted(capsys):
    assert main(["plan", "--data-parallel-size", "0"]) == 2
    assert "--data-parallel-size: expected at least 1, got 0" in capsys.readouterr().err

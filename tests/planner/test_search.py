"""The search for the fastest way to train, against trying all; and the times it goes by."""

import json
import math
import re
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.planner.request import parse_bytes
from diptych.planner.search import RECOMPUTE, Configuration, Outcome, _configurations, _Predictions, search
from diptych.planner.step_time import Machine, StageTimes, costs_of, step_time, wavefront_delay
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.delta_rule import chunk_flops
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.placement import SCHEDULES
from diptych.plans.schedule.simulate import simulate
from diptych.plans.training import check_trainable
from parity.cli.main import main

MODEL = TransformerConfig(hidden_size=64, num_layers=4, num_attention_heads=4, vocab_size=128, seq_length=32)
SLOW = Machine(1e9, 4e9, 1e8, 1e-5, 1e9)
"""On which every part of a step counts."""
FEW = ("none", "1f1b", "interleaved", "zb-v", "v-min")


def every_way(config, ranks, batch, schedules):
    """All combinations of everything that is searched, of which what is accepted remains."""
    found = []
    sizes = range(1, ranks + 1)
    recompute = {n: s for n, s in RECOMPUTE.items() if config.enable_hyper_connections or "mhc" not in n}
    for p, cp, tp, dp, schedule, v in product(sizes, sizes, sizes, sizes, schedules, (None, 2, 4)):
        is_v = schedule in ("zb-v", "v-half", "v-min", "dualpipe-v")
        several = is_v or schedule.startswith("interleaved")
        if p * cp * tp * dp != ranks or (v is None) == several or (is_v and v != 2):
            continue
        divides_tokens = tp > 1 and config.seq_length % (cp * tp) == 0
        for mode, offload, size, m in product(recompute, (False, True), range(1, batch + 1), range(1, batch + 1)):
            if size * m * dp != batch:
                continue
            settings_ = {
                "pipeline_model_parallel_size": p,
                "context_parallel_size": cp,
                "tensor_model_parallel_size": tp,
                "sequence_parallel": divides_tokens,
                "pipeline_schedule": schedule,
                "virtual_pipeline_model_parallel_size": v,
                "enable_tensor_offload": offload,
                **recompute[mode],
            }
            try:
                made = replace(config, **settings_)
                check_trainable(made, TrainConfig(global_batch_size=batch, micro_batch_size=size), dp)
            except ValueError:
                continue
            found.append(Configuration(made, size, m, dp, mode))
    return found


LOSSES = "(memory|operations|bubble|exchanges|gradients|update|copies|recomputation)"


def all_ways(config, ranks, limit, batch, machine, schedules):
    """Seconds of every way that fits and than which no other is both as fast and as small, fastest first."""
    found = []
    for way in every_way(config, ranks, batch, schedules):
        predictions = _Predictions(machine)
        memory = predictions.memory(way)
        seconds = predictions.found(way, memory).seconds
        assert predictions.bound(way) <= seconds * (1 + 1e-12), way.description
        if memory.total <= limit:
            found.append((seconds, memory.total))
    return [
        (seconds, total)
        for seconds, total in sorted({*found})
        if not any(s <= seconds and t <= total and (s, t) != (seconds, total) for s, t in found)
    ]


@pytest.mark.thorough
@settings(max_examples=4)
@given(
    ranks=st.sampled_from([2, 4]),
    limit=st.sampled_from([600_000, 1_100_000, 2_000_000, 10**9]),
    rate=st.sampled_from([1e9, 1e11]),
    streams=st.booleans(),
)
def test_nothing_faster_is_missed(ranks, limit, rate, streams):
    config = replace(MODEL, enable_hyper_connections=streams, num_residual_streams=2)
    machine = replace(SLOW, compute_rate=rate)
    expected = all_ways(config, ranks, limit, 4, machine, FEW)
    outcome = search(config, ranks, limit, 4, machine, 5, FEW)
    assert [found.seconds for found in outcome.best] == pytest.approx([seconds for seconds, _ in expected[:5]])
    assert [found.memory.total for found in outcome.best] == [total for _, total in expected[:5]]
    assert all(found.memory.total <= limit for found in outcome.best)
    for found in outcome.best:
        assert sum(found.shares.values()) == pytest.approx(1.0)
        assert min(found.shares.values()) >= -1e-9


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (2, 4), (4, 8)])
def test_no_way_is_forgotten_and_none_is_taken_twice(ranks, batch, streams):
    config = replace(MODEL, enable_hyper_connections=streams, num_residual_streams=2)
    found = [*_configurations(config, ranks, batch, SCHEDULES, Outcome([], 0, 0, 0))]
    assert len({*found}) == len(found)
    assert {*found} == {*every_way(config, ranks, batch, SCHEDULES)}
    assert {way.config.pipeline_schedule for way in found} == ({*SCHEDULES} - {"none"} if ranks > 1 else set()) | {
        "none"
    }


def test_no_schedule_beats_the_bound():
    for way in _configurations(MODEL, 2, 4, SCHEDULES, Outcome([], 0, 0, 0)):
        predictions = _Predictions(SLOW)
        seconds = predictions.found(way, predictions.memory(way)).seconds
        assert predictions.bound(way) <= seconds * (1 + 1e-12), way.description


def test_less_memory_is_never_faster_and_is_named():
    wide = search(MODEL, 4, 10**9, 8, SLOW, 1, FEW)
    tight = search(MODEL, 4, 1_100_000, 8, SLOW, 1, FEW)
    assert tight.best[0].seconds > wide.best[0].seconds
    assert re.match(r"memory: .* takes \S+ s and needs ", tight.best[0].constraint)
    assert not wide.best[0].constraint.startswith("memory")
    none = search(MODEL, 4, 1000, 8, SLOW, 1, FEW)
    assert none.best == []
    assert none.too_large == none.considered
    predictions, (way, memory) = _Predictions(SLOW), none.smallest
    assert memory.total == min(predictions.memory(each).total for each in every_way(MODEL, 4, 8, FEW))
    assert search(MODEL, 4, memory.total, 8, SLOW, 1, FEW).best[0].memory.total == memory.total
    assert predictions.memory(way) == memory


def test_memory_is_named_only_if_a_way_that_needs_more_is_faster():
    """Ways of one bound, of which the slowest does not fit: gpipe keeps more than 1f1b, and is no faster."""
    schedules = ("none", "gpipe", "1f1b")
    found = search(MODEL, 4, 10**9, 8, SLOW, 1, schedules).best[0]
    again = search(MODEL, 4, found.memory.total, 8, SLOW, 1, schedules).best[0]
    assert again.seconds == found.seconds
    assert not again.constraint.startswith("memory")


@pytest.mark.parametrize(
    ("exchange", "sequences", "heads", "divided"),
    [
        ("all_gather", 8, 4, "context_parallel_size"),
        ("pipelined", 2, 1, "context_parallel_size"),
        ("pipelined", 2, 4, "tensor_model_parallel_size"),
    ],
)
def test_every_way_runs_as_it_is_simulated(exchange, sequences, heads, divided):
    """What the search says of its ways is what the plan of each configuration says.

    Of eight sequences no context ranks in a pipeline are left: replicas are as fast and as small. Of two sequences none
    are left if heads can be divided.
    """
    config = replace(MODEL, layer_pattern="kda", cp_exchange=exchange, num_attention_heads=heads)
    found = search(config, 4, 10**9, sequences, SLOW, 20, FEW).best
    assert any(getattr(each.configuration.config, divided) > 1 for each in found)
    for each in found:
        chosen = each.configuration
        config, *sizes = chosen.config, chosen.micro_batch_size, chosen.num_microbatches
        assert each.seconds == pytest.approx(step_time(config, *sizes, chosen.data_parallel_size, SLOW).total)
    first = search(MODEL, 4, 10**9, 8, SLOW, 1, FEW).best[0]
    way = first.configuration
    alone = step_time(way.config, way.micro_batch_size, way.num_microbatches, way.data_parallel_size, SLOW)
    assert first.seconds == pytest.approx(alone.total)
    assert way.num_microbatches * way.micro_batch_size * way.data_parallel_size == 8
    assert way.data_parallel_size * way.config.model_parallel_size == 4


def test_progress_covers_every_part_of_the_search():
    parts = []

    def progress(steps, total, part):
        steps = list(steps)
        parts.append((part, total, len(steps)))
        return steps

    outcome = search(MODEL, 4, 2**40, 8, SLOW, schedules=FEW, progress=progress)
    count = outcome.considered
    assert count > 100
    assert parts == [
        ("listing configurations", None, count),
        ("bounding their times", count, count),
        ("simulating the fastest", count, count),
    ]


def test_what_cannot_be_searched_is_refused():
    for arguments, message in (
        ((MODEL, 0, 1, 4), "ranks: expected at least 1, got 0"),
        ((MODEL, 1, 0, 4), "memory_limit: expected at least 1, got 0"),
        ((MODEL, 7, 10**9, 4), "ranks: expected a number that 4 layers and 4 sequences can be divided over, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            search(*arguments)
    with pytest.raises(ValueError, match=r"schedules: expected some of .*, got '2f2b'"):
        search(MODEL, 1, 1, 4, schedules=("2f2b",))
    with pytest.raises(ValueError, match="memory_bandwidth: expected a finite number above 0, got 0"):
        Machine(memory_bandwidth=0.0)


# Times.


def products(config: TransformerConfig, tokens: int) -> tuple[float, float]:
    """Of linear layers, with those of the head; of attention's scores and weights."""
    matrices = {
        name: shape
        for name, (shape, *_) in parameter_specs(config).items()
        if len(shape) == 2 and "embedding" not in name
    }
    numbers = sum(a * b for a, b in matrices.values()) + config.vocab_size * config.hidden_size
    return 2.0 * tokens * numbers, 4.0 * tokens * config.seq_length * config.hidden_size * config.num_layers


def test_without_bandwidth_to_wait_for_only_products_count():
    """F = products, I as many of linear layers and twice attention's, W those of linear layers."""
    machine = Machine(1e9, 1e30, 1e30, 0.0)
    (time,) = StageTimes(machine).of(MODEL, 2)
    linear, attention = products(MODEL, 2 * MODEL.seq_length)
    assert time.forward * 1e9 == pytest.approx(linear + attention)
    assert time.input_gradient * 1e9 == pytest.approx(linear + 2 * attention)
    assert time.weight_gradient * 1e9 == pytest.approx(linear)
    whole = replace(MODEL, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    (again,) = StageTimes(machine).of(whole, 2)
    last = MODEL.vocab_size + MODEL.num_layers * MODEL.layer(0).ffn_hidden_size
    # Neither the head, nor of a layer the last map: torch.utils.checkpoint stops where nothing more is kept.
    not_again = 2.0 * 2 * MODEL.seq_length * MODEL.hidden_size * last
    assert again.recomputed * 1e9 == pytest.approx(linear + attention - not_again, rel=1e-6)
    assert again.input_gradient == pytest.approx(time.input_gradient + again.recomputed)


@pytest.mark.parametrize("settings_", [{}, {"pipeline_schedule": "zb-v", "virtual_pipeline_model_parallel_size": 2}])
def test_stages_share_the_models_time(settings_):
    divided = replace(MODEL, pipeline_model_parallel_size=2, **settings_)
    whole, parts = (StageTimes(SLOW).of(config, 2) for config in (unsharded(divided), divided))
    for field in ("forward", "input_gradient", "weight_gradient"):
        assert sum(getattr(part, field) for part in parts) == pytest.approx(getattr(whole[0], field))


def test_a_slower_wire_costs_messages_exchanges_and_sums():
    config = replace(MODEL, pipeline_model_parallel_size=2, context_parallel_size=2)
    fast, slow = (step_time(config, 2, 4, 2, replace(SLOW, network_bandwidth=rate)) for rate in (1e12, 1e7))
    assert slow.gradients > fast.gradients
    assert slow.stages[0].exchanged > fast.stages[0].exchanged
    assert slow.simulation.makespan > fast.simulation.makespan
    assert slow.update == fast.update
    costs = costs_of(config, slow.stages, 2, replace(SLOW, network_bandwidth=1e7))
    assert slow.simulation.makespan == simulate(schedule_for(config, 4), costs).makespan


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_only_linear_layers_leave_a_product_to_w(rule):
    """As the executor splits a backward: what has parameters of another kind comes with I."""
    config = replace(MODEL, layer_pattern=rule, enable_hyper_connections=True)
    (time,) = StageTimes(Machine(1e9, 1e30, 1e30, 0.0)).of(config, 2)
    shapes = {name: shape for name, (shape, *_) in parameter_specs(config).items() if ".linear_" in name}
    numbers = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    numbers += MODEL.vocab_size * MODEL.hidden_size
    assert time.weight_gradient * 1e9 == pytest.approx(2.0 * 2 * MODEL.seq_length * numbers)


def test_the_rule_is_computed_again_in_its_backward():
    for rule in ("gdn", "kda"):
        (stage,) = StageTimes(Machine(1e9, 1e30, 1e30, 0.0)).of(replace(MODEL, layer_pattern=rule), 2)
        rules = stage.forward - stage.weight_gradient  # all else that has products is linear layers
        assert stage.input_gradient == pytest.approx(stage.weight_gradient + 3 * rules)


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "scan"])
def test_maps_of_states_cost_columns_and_pipelined_none(exchange):
    config = replace(MODEL, layer_pattern="gdn", context_parallel_size=2)
    machine = Machine(1e9, 1e30, 1e30, 0.0)
    with_map, without = (
        StageTimes(machine).of(replace(config, cp_exchange=each), 1)[0] for each in (exchange, "pipelined")
    )
    _, heads, key, value = config.linear_heads
    size = MODEL.seq_length // 2  # a part of 16 tokens, half of a sequence, is one chunk of 16
    chunks = MODEL.num_layers * heads
    columns = chunk_flops(size, key, value + key) - chunk_flops(size, key, value)
    assert (with_map.forward - without.forward) * 1e9 == pytest.approx(chunks * columns)
    assert with_map.input_gradient - without.input_gradient == pytest.approx(3 * (with_map.forward - without.forward))
    whole = (StageTimes(machine).of(replace(config, cp_exchange=each), 2)[0] for each in (exchange, "pipelined"))
    assert len({stage.forward for stage in whole}) == 1  # no sequence goes on


@pytest.mark.parametrize(("exchange", "rounds"), [("all_gather", 1), ("ring", 7), ("scan", 4)])
def test_messages_that_follow_one_another_are_waited_for(exchange, rounds):
    """A second each; a convolution's tokens are one more, both ways."""
    config = replace(MODEL, num_layers=1, layer_pattern="gdn", context_parallel_size=8, cp_exchange=exchange)
    (time,) = StageTimes(Machine(1e30, 1e30, 1e30, 1.0)).of(config, 4)
    assert time.exchanged == pytest.approx(2 * (rounds + 1))
    slow, slower = (StageTimes(Machine(1e30, 1e30, rate, 0.0)).of(config, 4)[0].exchanged for rate in (1e9, 1e6))
    assert slower == pytest.approx(1e3 * slow)
    _, heads, key, value = config.linear_heads
    state, token = 4 * heads * key * value, 4 * (2 * config.linear_heads[0] * key + heads * value)
    if exchange == "ring":
        halo = (config.linear_conv_kernel_dim - 1) * token
        assert slow * 1e9 == pytest.approx(2 * (7 * state + halo))


def test_pipelined_ranks_wait_and_look_only_where_sequences_go_on():
    """Of one sequence over four ranks the last sees four parts; of two over four, a pair of ranks shares each."""
    machine = Machine(1e9, 1e30, 1e30, 0.0)
    config = replace(MODEL, context_parallel_size=4, cp_exchange="pipelined")
    waits, scores = {}, {}
    for batch in (1, 2, 4):
        stages = StageTimes(machine).of(config, batch)
        linear, _ = products(config, batch * MODEL.seq_length // 4)
        layer = sum(stages[0][:3]) / MODEL.num_layers
        waits[batch] = wavefront_delay(config, batch, stages, machine) / layer
        part = batch * MODEL.seq_length // 4
        scores[batch] = (stages[0].forward * 1e9 - linear) / (4 * part * MODEL.hidden_size * MODEL.num_layers)
    assert waits == pytest.approx({1: 3.0, 2: 1.0, 4: 0.0})
    assert scores == pytest.approx(dict.fromkeys(waits, MODEL.seq_length)), "keys that a query is held against"


def test_the_table_of_measured_steps_is_the_benchmark_s():
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks/results/step_time-cpu.json").read_text())
    page = (root / "docs/planner.md").read_text()
    jax = {row["case"]: f"{row['ratio']:.2f} " for row in results["jax"]["rows"]}
    found = 0
    for row in results["torch"]["rows"]:
        if f"\n| {row['case']} | " in page:
            found += 1
            cells = f"{row['predicted_seconds']:.3f} | {row['measured_seconds']:.3f} | {row['ratio']:.2f}"
            assert f"\n| {row['case']} | {cells} | {jax.get(row['case'], '')}|\n" in page
    assert found == 13
    pairs = [f"{results[backend]['pairs_in_order']} of" for backend in ("torch", "jax")]
    assert all(each in page for each in pairs)


# The command.


def test_the_command_prints_ways_and_what_holds_them_back(capsys):
    command = (
        "plan --hidden-size 64 --num-layers 4 --num-attention-heads 4 --vocab-size 128 --seq-length 32 "
        "--memory-limit 3MB --ranks 4 --global-batch-size 8 --num-results 3 --compute-rate 0.001 --memory-bandwidth 4"
    )
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "4 ranks of 2.9 MiB, 8 sequences per step" in out
    assert len(re.findall(r"^ +\d\S* +[\d,]+ +\d+\.\d +\d+% ", out, re.M)) == 3
    assert "limited by memory" in out.replace("\n", " ")
    assert len(re.findall(rf"^ +\d\S* .*% +{LOSSES} +\S", out, re.M)) == 3
    assert main([*command.replace("3MB", "3KB").split()]) == 2
    said = r"--memory-limit: expected enough memory for .*no configuration fits, .+ needs least, [\d.]+ MiB; give more"
    assert re.search(said, capsys.readouterr().err)


def test_tensor_parallel_ranks_whose_number_does_not_divide_the_length_are_tried(capsys):
    sizes = "--hidden-size 1024 --num-layers 2 --num-attention-heads 8 --vocab-size 32000 --seq-length 1023"
    asked = f"plan --ranks 2 --memory-limit 80GiB --global-batch-size 1 {sizes} --no-enable-hyper-connections"
    assert main(asked.split()) == 0
    assert "tp 2" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thousand_ranks_are_searched_quickly(capsys):
    start = time.process_time()
    sizes = "--hidden-size 4096 --num-layers 32 --num-attention-heads 32 --seq-length 4096 --bf16 --use-flash-attn"
    assert main(f"plan {sizes} --memory-limit 80GiB --ranks 1024".split()) == 0
    assert time.process_time() - start < 150, "about 40 beside other work"
    out = capsys.readouterr().out
    assert "1,024 ranks of 81,920.0 MiB" in out
    assert len(re.findall(rf"% +{LOSSES} +\S", out)) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 4", "--memory-limit: expected a value, since --memory-limit and ranks go together, got None"),
        ("--memory-limit 80GiB", "ranks: expected a value, since"),
        ("--ranks 4 --memory-limit lots", "--memory-limit: expected a size such as 80GiB or 80GB, got 'lots'"),
        ("--ranks 0 --memory-limit 80GiB", "ranks: expected at least 1, got 0"),
        (
            "--num-results 3",
            "--num-results: expected 10 without --memory-limit and ranks, which ask for a search, got 3",
        ),
        ("--global-batch-size 3", "--global-batch-size: expected None without --memory-limit and ranks"),
        *(
            (
                f"--ranks 4 --memory-limit 1GiB {words}",
                f"{name}: expected {default} with --memory-limit and ranks, which",
            )
            for words, name, default in (
                ("--pipeline-schedule 1f1b --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size", "1"),
                ("--schedule gpipe --pipeline-model-parallel-size 2", "--schedule", "None"),
                ("--context-parallel-size 2", "--context-parallel-size", "1"),
                ("--data-parallel-size 2", "--data-parallel-size", "1"),
                ("--micro-batch-size 2", "--micro-batch-size", "8"),
                ("--num-microbatches 2", "--num-microbatches", "8"),
                ("--recompute-granularity selective --recompute-modules mlp", "--recompute-granularity", "None"),
                ("--enable-tensor-offload", "--enable-tensor-offload", "False"),
                ("--enable-activation-offload", "--enable-activation-offload", "False"),
            )
        ),
    ],
)
def test_wrong_requests_are_refused(words, message, capsys):
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_read():
    sizes = {"80GiB": 80 * 2**30, "1.5 TB": 1_500_000_000_000, "512 MiB": 2**29, "100B": 100}
    assert {text: parse_bytes("size", text) for text in sizes} == sizes

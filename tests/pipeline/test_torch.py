"""The PyTorch pipeline on real gloo ranks: equal to the single-device model, in the order of the tables."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from diptych.plans.mesh import unsharded
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.messages import Message, lower
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import layers_by_stage
from tests.pipeline.draws import any_cut
from tests.pipeline.jobs import TINY, Case, Outcome, unsharded_outcome
from tests.pipeline.support import JOBS, check, check_gradients, divided, equal_to_unsharded, multiprocess
from tests.pipeline.toy_jobs import Passing, Toy, toy_outcome

ON_TWO = {
    "gpipe": Case(divided(2, "gpipe"), 4),
    "1f1b": Case(divided(2, "1f1b"), 4, size=2),
    "1f1b, fewer microbatches than ranks": Case(divided(2, "1f1b"), 1),
    "zb-h1": Case(divided(2, "zb-h1"), 4),
    "zb-h1, one microbatch": Case(divided(2, "zb-h1"), 1),
    "interleaved": Case(divided(2, v=2), 4),
    "interleaved in groups of three, the last of two": Case(divided(2, v=2, microbatch_group_size_per_vp_stage=3), 5),
    "zb-h2": Case(divided(2, "zb-h2"), 4),
    "interleaved-zb1p": Case(divided(2, "interleaved-zb1p", v=2), 4),
    "interleaved-zb1p, one microbatch": Case(divided(2, "interleaved-zb1p", v=2), 1),
    "zb-v": Case(divided(2, "zb-v", v=2), 4),
    "zb-v, one microbatch, untied": Case(divided(2, "zb-v", v=2, untie_embeddings_and_output_weights=True), 1),
    "v-half": Case(divided(2, "v-half", v=2), 5),
    "v-min, layers recomputed": Case(
        divided(2, "v-min", v=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        4,
    ),
    "dualpipe-v": Case(divided(2, "dualpipe-v", v=2), 5),
    "dualpipe-v, forward only": Case(divided(2, "dualpipe-v", v=2), 4, forward_only=True),
    "untied": Case(divided(2, "1f1b", untie_embeddings_and_output_weights=True), 2),
    "without hyper-connections, biases": Case(
        divided(2, "zb-h1", enable_hyper_connections=False, add_bias_linear=True), 3
    ),
    "layers unlike each other": Case(
        divided(2, "1f1b", layer_pattern="attention+gelu+no-mlp-hc,attention+ffn=8,attention+no-attention-hc"), 3
    ),
    "mhc recomputed": Case(divided(2, "1f1b", recompute_granularity="selective", recompute_modules=("mhc",)), 3),
    "layers recomputed": Case(
        divided(2, "zb-h1", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1), 3
    ),
    "activation recomputed": Case(divided(2, "zb-h1", recompute_activation_function=True), 3),
    "mhc and mlp recomputed, backward split": Case(
        divided(2, "zb-h1", recompute_granularity="selective", recompute_modules=("mhc", "mlp")), 3
    ),
    "delta rule": Case(divided(2, "1f1b", layer_pattern="kda,gdn,attention"), 3),
    "delta rule, backward split, recomputed": Case(
        divided(
            2,
            "zb-h1",
            layer_pattern="kda,gdn,attention",
            recompute_granularity="selective",
            recompute_modules=("mhc", "core_attn"),
        ),
        3,
    ),
    "documents": Case(divided(2, "1f1b", layer_pattern="kda,gdn,attention"), 3, size=2, documents=True),
    "nothing overlaps": Case(divided(2, "1f1b", overlap_p2p_comm=False), 4),
    "nothing overlaps, interleaved": Case(divided(2, v=2, overlap_p2p_comm=False), 4),
    "nothing is freed": Case(divided(2, "1f1b", deallocate_pipeline_outputs=False), 3),
    "shapes are announced": Case(divided(2, "1f1b", variable_seq_lengths=True), 3),
    "shapes are announced, nothing overlaps": Case(
        divided(2, v=2, variable_seq_lengths=True, overlap_p2p_comm=False), 2
    ),
    "lengths differ": Case(divided(2, "1f1b", variable_seq_lengths=True), 4, lengths=(6, 3, 1, 5)),
    "lengths differ, interleaved": Case(divided(2, v=2, variable_seq_lengths=True), 4, lengths=(2, 6, 4, 3)),
    "forward only": Case(divided(2, "zb-h1"), 3, forward_only=True),
    "forward only, interleaved": Case(divided(2, v=2), 4, forward_only=True),
    "bf16": Case(divided(2, "1f1b", params_dtype="float32", bf16=True), 2),
    "bf16, backward split": Case(divided(2, "zb-h1", params_dtype="float32", bf16=True), 2),
}


@multiprocess
def test_two_ranks_compute_what_one_process_does(two):
    equal_to_unsharded(two, ON_TWO)


ON_FOUR = {
    "fewer microbatches than ranks": Case(divided(4, "1f1b"), 2),
    "1f1b": Case(divided(4, "1f1b"), 6),
    "zb-h1": Case(divided(4, "zb-h1"), 6),
    "zb-h1, fewer microbatches than ranks": Case(divided(4, "zb-h1"), 3),
    "zb-h2": Case(divided(4, "zb-h2"), 8),
    "zb-v": Case(divided(4, "zb-v", v=2, num_layers=8), 8),
    "v-half": Case(divided(4, "v-half", v=2, num_layers=8, overlap_p2p_comm=False), 6),
    "v-min, shapes are announced": Case(divided(4, "v-min", v=2, num_layers=8, variable_seq_lengths=True), 4),
    "dualpipe-v": Case(divided(4, "dualpipe-v", v=2, num_layers=8), 8),
    "v-half, stages without layers": Case(divided(4, "v-half", v=2, pipeline_model_parallel_layout="E|t||tt||t||L"), 4),
    "gpipe": Case(divided(4, "gpipe"), 3),
    "interleaved": Case(divided(4, v=2, num_layers=8), 8),
    "interleaved-zb1p": Case(divided(4, "interleaved-zb1p", v=2, num_layers=8), 8),
    "seven layers": Case(divided(4, pipeline_model_parallel_layout="Ett|tt|tt|tL", num_layers=7), 4),
    "a stage without layers": Case(divided(4, pipeline_model_parallel_layout="Et||ttt|L"), 4),
    "a stage without layers or hyper-connections": Case(
        divided(4, pipeline_model_parallel_layout="Et||ttt|L", enable_hyper_connections=False), 4
    ),
    "a stage without layers or hyper-connections, backward split": Case(
        divided(
            4,
            "zb-h1",
            pipeline_model_parallel_layout="E|tt||ttL",
            enable_hyper_connections=False,
            hidden_dropout=0.0,
        ),
        4,
    ),
    "uneven ends": Case(
        divided(4, v=2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2, num_layers=12),
        4,
    ),
    "embedding and loss counted": Case(
        divided(4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True, num_layers=6),
        4,
    ),
    "documents": Case(divided(2, "1f1b", layer_pattern="kda,gdn,attention"), 3, size=2, documents=True),
    "nothing overlaps": Case(divided(4, "zb-h1", overlap_p2p_comm=False), 5),
    "two replicas": Case(divided(2, "1f1b"), 3),
    "two replicas, interleaved": Case(divided(2, v=2), 2),
    "two replicas, backward split, untied": Case(divided(2, "zb-h1", untie_embeddings_and_output_weights=True), 2),
}


@multiprocess
def test_four_ranks_compute_what_one_process_does(four):
    equal_to_unsharded(four, ON_FOUR)


def test_one_process_goes_through_the_same_executor():
    from tests.pipeline.jobs import run_case

    case = Case(TINY, 3)
    check(case, [run_case(case)], unsharded_outcome(case))


# Data parallel.


@multiprocess
def test_gradients_are_summed_once_a_chunk_after_its_last_backward(four):
    """Two replicas of two ranks with two stages each; untied, so that no other sum is under way."""
    case = Case(divided(2, v=2, untie_embeddings_and_output_weights=True), 2)
    for rank, (begun, outcome) in enumerate(four.run(f"{JOBS}:all_reduces", case)):
        backwards = [(place, action.stage) for place, action in enumerate(outcome.trace) if action.kind == "B"]
        assert begun == sorted({stage: place for place, stage in backwards}.values()), f"rank {rank}"
        assert len(begun) == 2


# The contract.


LENGTHS = (6, 2, 1, 4)


@multiprocess
@pytest.mark.parametrize("per_token", [True, False], ids=["mean over tokens", "mean of means"])
def test_microbatches_of_different_token_counts(two, four, per_token):
    """Reports are the microbatches' own means; only the gradient is normalised by the option."""
    config = divided(2, "1f1b", variable_seq_lengths=True, calculate_per_token_loss=per_token)
    lengths = (*LENGTHS, 3, 5, 6, 6)
    for pool, replicas in ((two, 1), (four, 2)):
        case = Case(config, 4, size=2, lengths=lengths[: 4 * replicas], tokens_reported=True)
        weights = [length / sum(case.lengths) for length in case.lengths] if per_token else None
        check(case, pool.run(f"{JOBS}:run_case", case), unsharded_outcome(case, replicas, weights))


TOYS = {
    "one tensor, saved by the operation that made it": (None, 1),
    "two tensors, one made of the other": (None, 2),
    "three tensors": (None, 3),
    "data passed on": (0, 1),
    "an input passed on": (1, 1),
    "two inputs passed on": (1, 2),
}


@multiprocess
@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("name", TOYS)
def test_stages_of_other_making(three, name, freed):
    passing, tensors = TOYS[name]
    config = divided(3, "1f1b", deallocate_pipeline_outputs=freed, pipeline_model_parallel_layout="Et|tt|tL")
    stages = [(Passing if i == passing else Toy)(i, tensors) for i in range(3)]
    expected = toy_outcome(stages, 4)
    gradients = {
        k: v
        for rank in three.run("tests.pipeline.toy_jobs:run_toy", passing, tensors, config, 4)
        for k, v in rank.items()
    }
    check_gradients([Outcome([], gradients, [])], expected)


@multiprocess
def test_anything_can_be_collected_where_there_is_no_loss(two):
    config = divided(2, "1f1b")
    assert two.run("tests.pipeline.toy_jobs:collect_shapes", config, 3) == [[], [{"shape": [1, 3, 4]}] * 3]


@multiprocess
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_1f1b_by_hand_over_compound_calls(three, count, overlap):
    config = divided(
        3, "1f1b", overlap_p2p_comm=overlap, pipeline_model_parallel_layout="Et|tt|tL", pipeline_timeout=5.0
    )
    gradients = {
        k: v
        for rank in three.run("tests.pipeline.toy_jobs:one_forward_one_backward", config, count)
        for k, v in rank.items()
    }
    check_gradients([Outcome([], gradients, [])], toy_outcome([Toy(i) for i in range(3)], count))


def order_of(steps) -> list[str]:
    """What a rank's program lets happen: receives posted before the action in front of them, everything else as is."""
    listed: list[str] = []
    for place, step in enumerate(steps):
        if isinstance(step, Action):
            end = next((i for i, s in enumerate(steps[place + 1 :], place + 1) if isinstance(s, Action)), len(steps))
            listed += [f"post {s}" for s in steps[place + 1 : end] if s.direction == "RECV"]
            listed.append(str(step))
        elif step.direction == "SEND":
            listed.append(str(step))
    first = next(i for i, s in enumerate(steps) if isinstance(s, Action))
    return [f"post {s}" for s in steps[:first] if s.direction == "RECV"] + listed


@multiprocess
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_receives_are_posted_before_the_action_in_front_of_them(four, name):
    config = divided(4, name, v=2, num_layers=8) if name == "interleaved" else divided(4, name)
    case = Case(config, 5 if name != "interleaved" else 4)
    program = lower(schedule_for(config, case.num_microbatches))
    for rank, events in enumerate(four.run(f"{JOBS}:events", case)):
        happened = [
            event if isinstance(event, str) else f"post {event[1]}" if event[0] == "post" else str(event[1])
            for event in [str(event) if isinstance(event, Action) else event for event in events]
            if isinstance(event, str) or event[0] != "use"
        ]
        assert happened == order_of(program[rank])
        used = [event[1] for event in events if not isinstance(event, Action) and event[0] == "use"]
        assert set(used) == {s for s in program[rank] if isinstance(s, Message) and s.direction == "RECV"}


@multiprocess
def test_a_communicator_serves_many_steps(two):
    """More than a tag counts."""
    case, count = Case(divided(2, "1f1b", num_layers=2, enable_hyper_connections=False), 2), 40
    per_rank = two.run(f"{JOBS}:repeated_steps", case, count)
    for step in (0, 31, 32, count - 1):
        check(case, [outcomes[step] for outcomes in per_rank], unsharded_outcome(case._replace(step=step)))


@multiprocess
@pytest.mark.parametrize("per_token", [False, True])
def test_steps_add_their_gradients_to_what_is_there(two, per_token):
    """Also those of a tied embedding, which are summed over ranks."""
    config = divided(2, "1f1b", calculate_per_token_loss=per_token)
    case = Case(config, 2, tokens_reported=per_token)
    for once, twice in two.run(f"{JOBS}:gradients_of_two_steps", case):
        check_gradients([Outcome([], twice, [])], {name: 2.0 * gradient for name, gradient in once.items()})


@multiprocess
def test_the_trainer_takes_stages_without_layers(four):
    config = divided(4, pipeline_model_parallel_layout="Et||ttt|L", enable_hyper_connections=False)
    losses = four.run(f"{JOBS}:train_briefly", config, 2)
    from tests.pipeline.jobs import train_briefly

    expected = train_briefly(unsharded(config), 2)
    for rank in losses:
        assert rank == pytest.approx(expected, rel=1e-10)


# Any schedule, sizes and split.


@st.composite
def any_case(draw) -> Case:
    cut = draw(any_cut())
    names = ("enable_hyper_connections", "overlap_p2p_comm", "deallocate_pipeline_outputs", "variable_seq_lengths")
    config = replace(TINY, **cut.settings, **{name: draw(st.booleans()) for name in names})
    count, lengths = cut.num_microbatches, None
    if config.variable_seq_lengths:
        lengths = tuple(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    return Case(config, count, lengths=lengths)


HARD = {
    "fewer microbatches than ranks": lambda c, p, v: c.num_microbatches < p,
    "a group that is not whole": lambda c, p, v: (
        c.config.pipeline_schedule == "interleaved" and c.num_microbatches % (p + 1) == p
    ),
    "an empty stage in the middle": lambda c, p, v: 0 in layers_by_stage(c.config)[1:-1],
    "three virtual stages": lambda c, p, v: v == 3,
    "lengths that differ": lambda c, p, v: len(set(c.lengths or ())) > 1,
    "a split backward without hyper-connections": lambda c, p, v: (
        c.config.pipeline_schedule not in ("gpipe", "1f1b", "interleaved") and not c.config.enable_hyper_connections
    ),
    "no overlap": lambda c, p, v: not c.config.overlap_p2p_comm,
}
HARD_CASES = (
    Case(
        divided(
            2,
            "interleaved",
            3,
            num_layers=5,
            pipeline_model_parallel_layout="Et|tt||t|t|L",
            microbatch_group_size_per_vp_stage=3,
            overlap_p2p_comm=False,
            variable_seq_lengths=True,
        ),
        5,
        lengths=(3, 6, 1, 4, 4),
    ),
    Case(divided(3, "zb-h1", num_layers=2, pipeline_model_parallel_layout="Et||tL", enable_hyper_connections=False), 2),
)
"""Between them they have all of that: what is drawn anew each time may lack one."""


@multiprocess
def test_any_schedule_over_any_split_computes_what_one_process_does(two, three, four):
    drawn: Counter[str] = Counter()

    @settings(phases=(Phase.explicit, Phase.generate))
    @given(any_case())
    @example(HARD_CASES[0])
    @example(HARD_CASES[1])
    def compute(case):
        p, v = case.config.pipeline_model_parallel_size, case.config.virtual_pipeline_model_parallel_size or 1
        drawn.update(name for name, holds in HARD.items() if holds(case, p, v))
        ranks = {2: two, 3: three, 4: four}[p].run(f"{JOBS}:run_case", case)
        check(case, ranks, unsharded_outcome(case))

    compute()
    assert drawn.keys() == HARD.keys(), f"never run: {HARD.keys() - drawn.keys()}"


@multiprocess
def test_freeing_what_was_sent_lowers_the_peak(two):
    """Measured on a stage that keeps several microbatches: one output each, less what is under way."""
    peaks = {}
    for freed in (True, False):
        config = divided(2, "gpipe", deallocate_pipeline_outputs=freed)
        peaks[freed] = two.run("tests.pipeline.memory_jobs:kept_bytes", config, 8, 1 << 16)[0]
    assert peaks[False] - peaks[True] == 7 * ((1 << 16) - 1) * 8
    assert peaks[True] < 2 * (1 << 16) * 8


@multiprocess
def test_tensors_the_other_rank_does_not_expect_are_not_sent(two):
    """Of a wrong type they would overrun its buffer, which ends its process."""
    wrong_type, too_many = two.run("tests.pipeline.memory_jobs:refused_sends", divided(2))[0]
    assert re.match(r"tensors: expected float64 in SEND 0F0 to rank 1, got torch.float32; .* cast", wrong_type)
    assert re.match(r"tensors: expected at most 8 in SEND 0F1 to rank 1, got 9", too_many)

"""The PyTorch pipeline on real gloo ranks: equal to the undivided model, in the order of the tables."""

import re
import weakref
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from plans.actions import Action
from plans.communication import Message, lower
from plans.config import TransformerConfig
from plans.partition import layers_by_stage, undivided
from plans.placement import V_SCHEDULES, schedule_name
from plans.schedule import schedule_for
from reference_torch.pipeline import (
    DeferredWeightGradients,
    backward_step,
    custom_backward,
    deallocate_output_tensor,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_step_calc_loss,
    get_forward_backward_func,
    get_pp_rank_microbatches,
    infer_tensor_shapes,
    own_memory,
)
from reference_torch.rank_pool import RankPool
from reference_torch.stage import PipelineStage
from tests.pipeline_draws import any_cut
from tests.pipeline_jobs import TINY, Case, Outcome, Passing, Toy, toy_outcome, undivided_outcome

PRELOAD = ("torch.distributed", "reference_torch.train")
JOBS = "tests.pipeline_jobs"
multiprocess = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def two():
    with RankPool(2, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def three():
    with RankPool(3, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4, preload=PRELOAD) as pool:
        yield pool


# The undivided model.


def divided(p: int, schedule: str | None = None, v: int | None = None, **settings) -> TransformerConfig:
    return replace(
        TINY,
        pipeline_model_parallel_size=p,
        pipeline_schedule=schedule,
        virtual_pipeline_model_parallel_size=v,
        **settings,
    )


def check(case: Case, ranks: list[Outcome], expected: Outcome) -> None:
    """Losses on the last stage's rank alone, every gradient of the undivided model, actions as planned.

    Ranks of one replica follow each other; all replicas end with the same gradients.
    """
    dtype, p = case.config.compute_dtype, case.config.pipeline_model_parallel_size
    schedule = schedule_for(case.config, case.num_microbatches, case.forward_only)
    home = schedule.rank_of(schedule.num_stages - 1)
    replicas = [ranks[first : first + p] for first in range(0, len(ranks), p)]
    for number, replica in enumerate(replicas):
        for rank, outcome in enumerate(replica):
            if rank != home:
                assert outcome.reports == []
            actions = schedule.actions[rank]
            assert tuple(outcome.trace) == actions, f"rank {rank}"
        count = case.num_microbatches
        losses = expected.reports[number * count : (number + 1) * count]
        assert replica[home].reports == pytest.approx(losses, rel=GRADIENT[dtype], abs=0)
        check_gradients(replica, {} if case.forward_only else expected.gradients, dtype)


def check_gradients(ranks: list[Outcome], expected: dict[str, np.ndarray], dtype: str = "float64") -> None:
    """Each expected gradient on some rank, and the same on every rank that has it."""
    assert {name for outcome in ranks for name in outcome.gradients} == expected.keys()
    for rank, outcome in enumerate(ranks):
        for name, gradient in outcome.gradients.items():
            assert gradient.dtype == expected[name].dtype
            difference = relative_difference(gradient, expected[name])
            assert difference <= GRADIENT[dtype], f"rank {rank}, {name}: {difference:.1e}"


def equal_to_undivided(pool: RankPool, cases: dict[str, Case]) -> None:
    per_rank = pool.run(f"{JOBS}:run_cases", [*cases.values()])
    for place, (name, case) in enumerate(cases.items()):
        replicas = pool.size // case.config.pipeline_model_parallel_size
        try:
            check(case, [outcomes[place] for outcomes in per_rank], undivided_outcome(case, replicas))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


ON_TWO = {
    "gpipe": Case(divided(2, "gpipe"), 4),
    "1f1b": Case(divided(2, "1f1b"), 4, size=2),
    "1f1b, fewer microbatches than ranks": Case(divided(2, "1f1b"), 1),
    "zb-h1": Case(divided(2, "zb-h1"), 4),
    "zb-h1, one microbatch": Case(divided(2, "zb-h1"), 1),
    "interleaved": Case(divided(2, v=2), 4),
    "interleaved in groups of three, the last of two": Case(divided(2, v=2, microbatch_group_size_per_vp_stage=3), 5),
    "zb-h2": Case(divided(2, "zb-h2"), 4),
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
    equal_to_undivided(two, ON_TWO)


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
    equal_to_undivided(four, ON_FOUR)


def test_one_process_goes_through_the_same_executor():
    from tests.pipeline_jobs import run_case

    case = Case(TINY, 3)
    check(case, [run_case(case)], undivided_outcome(case))


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
        check(case, pool.run(f"{JOBS}:run_case", case), undivided_outcome(case, replicas, weights))


TOYS = {
    "one tensor, saved by the operation that made it": (None, 1),
    "two tensors, one made of the other": (None, 2),
    "three tensors": (None, 3),
    "data handed on": (0, 1),
    "an input handed on": (1, 1),
    "two inputs handed on": (1, 2),
}


@multiprocess
@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("name", TOYS)
def test_stages_of_other_making(three, name, freed):
    passing, tensors = TOYS[name]
    config = divided(3, "1f1b", deallocate_pipeline_outputs=freed, pipeline_model_parallel_layout="Et|tt|tL")
    stages = [(Passing if i == passing else Toy)(i, tensors) for i in range(3)]
    expected = toy_outcome(stages, 4)
    gradients = {k: v for rank in three.run(f"{JOBS}:run_toy", passing, tensors, config, 4) for k, v in rank.items()}
    check_gradients([Outcome([], gradients, [])], expected)


@multiprocess
def test_anything_can_be_collected_where_there_is_no_loss(two):
    config = divided(2, "1f1b")
    assert two.run(f"{JOBS}:collect_shapes", config, 3) == [[], [{"shape": [1, 3, 4]}] * 3]


@multiprocess
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_1f1b_by_hand_over_compound_calls(three, count, overlap):
    config = divided(
        3, "1f1b", overlap_p2p_comm=overlap, pipeline_model_parallel_layout="Et|tt|tL", pipeline_timeout=5.0
    )
    gradients = {k: v for rank in three.run(f"{JOBS}:one_forward_one_backward", config, count) for k, v in rank.items()}
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
    for rank, told in enumerate(four.run(f"{JOBS}:events", case)):
        happened = [
            event if isinstance(event, str) else f"post {event[1]}" if event[0] == "post" else str(event[1])
            for event in [str(event) if isinstance(event, Action) else event for event in told]
            if isinstance(event, str) or event[0] != "use"
        ]
        assert happened == order_of(program[rank])
        used = [event[1] for event in told if not isinstance(event, Action) and event[0] == "use"]
        assert set(used) == {s for s in program[rank] if isinstance(s, Message) and s.direction == "RECV"}


@multiprocess
def test_a_communicator_serves_many_steps(two):
    """More than a tag counts."""
    case, count = Case(divided(2, "1f1b", num_layers=2, enable_hyper_connections=False), 2), 40
    per_rank = two.run(f"{JOBS}:repeated_steps", case, count)
    for step in (0, 31, 32, count - 1):
        check(case, [outcomes[step] for outcomes in per_rank], undivided_outcome(case._replace(step=step)))


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
    from tests.pipeline_jobs import train_briefly

    expected = train_briefly(undivided(config), 2)
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


@multiprocess
def test_any_schedule_over_any_split_computes_what_one_process_does(two, three, four):
    drawn: Counter[str] = Counter()

    @settings(phases=(Phase.explicit, Phase.generate))
    @given(any_case())
    def compute(case):
        p, v = case.config.pipeline_model_parallel_size, case.config.virtual_pipeline_model_parallel_size or 1
        drawn.update(name for name, holds in HARD.items() if holds(case, p, v))
        ranks = {2: two, 3: three, 4: four}[p].run(f"{JOBS}:run_case", case)
        check(case, ranks, undivided_outcome(case))

    compute()
    assert drawn.keys() == HARD.keys(), f"never drawn: {HARD.keys() - drawn.keys()}"


# What the functions refuse.


def step_arguments(config, **more):
    return {
        "forward_step_func": lambda iterator, model: None,
        "data_iterator": iter([]),
        "model": torch.nn.Linear(1, 1),
        "num_microbatches": 2,
        "seq_length": 3,
        "micro_batch_size": 1,
        "config": config,
        **more,
    }


def test_each_function_runs_its_own_schedules():
    for function, own in FUNCTIONS.items():
        plain = [divided(2, name) for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")]
        for config in (TINY, *plain, divided(2, v=2), *(divided(2, name, 2) for name in V_SCHEDULES)):
            name = schedule_name(config)
            if name in own:
                assert get_forward_backward_func(config) is function
            else:
                with pytest.raises(
                    ValueError, match=rf"config: expected .* with this function, got .* '{name}'; choose"
                ):
                    function(**step_arguments(config))


FUNCTIONS = {
    forward_backward_no_pipelining: ("none",),
    forward_backward_pipelining_without_interleaving: ("gpipe", "1f1b", "zb-h1", "zb-h2"),
    forward_backward_pipelining_with_interleaving: ("interleaved", *V_SCHEDULES),
}


def test_models_and_iterators_are_one_a_virtual_stage():
    plain, virtual = forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving
    config, model = divided(2, v=2), torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="model: expected 2, one a virtual stage of the rank, got 1"):
        virtual(**step_arguments(config, model=[model]))
    with pytest.raises(ValueError, match="data_iterator: expected 2, one a virtual stage of the rank, got 1"):
        virtual(**step_arguments(config, model=[model] * 2))
    with pytest.raises(ValueError, match="model: expected 1, one a virtual stage of the rank, got 2"):
        plain(**step_arguments(divided(2), model=[model] * 2))


@pytest.mark.parametrize("config", [TINY, divided(2), divided(2, v=2)], ids=schedule_name)
def test_what_is_no_loss_has_no_backward(config):
    with pytest.raises(ValueError, match=r"collect_non_loss_data: expected False .*, got True; give forward_only=True"):
        get_forward_backward_func(config)(**step_arguments(config, collect_non_loss_data=True))


def test_a_pipeline_needs_its_groups():
    with pytest.raises(ValueError, match=r"pg_collection: expected this rank's groups .*=2, got none; make them by"):
        forward_backward_pipelining_without_interleaving(**step_arguments(divided(2)))


def test_sizes_a_schedule_cannot_have_are_refused():
    arguments = step_arguments(divided(4, v=2, num_layers=8), model=[torch.nn.Linear(1, 1)] * 2)
    arguments["data_iterator"] = [iter([])] * 2
    for count, message in ((2, "num_microbatches: expected at least pp_size=4"), (6, "the last group to be whole")):
        with pytest.raises(ValueError, match=message):
            forward_backward_pipelining_with_interleaving(**{**arguments, "num_microbatches": count})


MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("result", "per_token", "message"),
    [
        (torch.ones(()), False, r"expected a reducer that returns .*, got Tensor; use collect_non_loss_data"),
        ((torch.ones(()),), False, r"expected a reducer that returns .*, got tuple of 1"),
        ((1, 2, 3, 4), False, r"expected a reducer that returns .*, got tuple of 4"),
        ((torch.ones(()), {}), True, r"expected .*\(loss, num_tokens, report\) with calculate_per_token_loss, got 2"),
    ],
)
def test_a_reducer_returns_two_values_or_three(result, per_token, message):
    config = replace(TINY, calculate_per_token_loss=per_token)
    with pytest.raises(ValueError, match=message):
        forward_step_calc_loss(MODEL, torch.ones(3), lambda output: result, config, None, False, 2, [])


class Report(NamedTuple):
    loss: torch.Tensor
    name: str


def test_reports_are_copies():
    loss = torch.ones((), requires_grad=True) * 2.0
    report = {"loss": loss, "list": [loss], "pair": (loss, "name"), "named": Report(loss, "it")}
    store = []
    scaled, tokens = forward_step_calc_loss(MODEL, None, lambda output: (loss, report), TINY, None, False, 4, store)
    with torch.no_grad():
        loss *= 100.0
    (kept,) = store
    assert (scaled.item(), tokens.item()) == (0.5, 0)
    for copy in (kept["loss"], kept["list"][0], kept["pair"][0], kept["named"].loss):
        assert copy.item() == 2.0
        assert not copy.requires_grad
    assert (kept["pair"][1], kept["named"].name) == ("name", "it")


def test_tokens_divide_a_sum_once_or_not_at_all():
    loss = torch.tensor(6.0)
    for per_token, expected, counted in ((False, 6.0 / 3 / 4, 0), (True, 6.0, 3)):
        config, store = replace(TINY, calculate_per_token_loss=per_token), []
        for tokens in (3, torch.tensor(3), torch.tensor(3.0)):
            value, count = forward_step_calc_loss(
                MODEL, None, lambda output, n=tokens: (loss, n, loss), config, None, False, 4, store
            )
            assert (value.item(), count.item()) == (expected, counted)


def test_token_counts_may_be_the_sum_of_a_mask():
    """Sums of floats are floats."""
    config = replace(TINY, calculate_per_token_loss=True)
    gradients = []
    for dtype in (torch.int64, torch.float32):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)

        def step(iterator, model, dtype=dtype):
            loss = model(next(iterator)).sum()
            return loss, lambda loss: (loss, torch.tensor(3, dtype=dtype), loss)

        data = iter([torch.ones(3, 2), torch.ones(3, 2)])
        forward_backward_no_pipelining(
            **step_arguments(config, model=model, data_iterator=data, forward_step_func=step)
        )
        gradients.append(model.weight.grad)
    assert gradients[0].tolist() == gradients[1].tolist() == [[1.0, 1.0]]


def test_warm_up_counts():
    config = divided(4, v=2, num_layers=8, microbatch_group_size_per_vp_stage=5)
    assert get_pp_rank_microbatches(10, config, 0) == (20, False, 11, 9)
    assert get_pp_rank_microbatches(10, config, 3) == (20, False, 5, 15)
    assert get_pp_rank_microbatches(5, config, 0) == (10, True, 10, 0)
    assert get_pp_rank_microbatches(10, config, 3, forward_only=True) == (20, True, 20, 0)
    assert get_pp_rank_microbatches(2, divided(4), 0) == (2, True, 2, 0)
    assert get_pp_rank_microbatches(8, divided(4), 1) == (8, False, 2, 6)
    assert get_pp_rank_microbatches(8, TINY, 0) == (8, False, 0, 8)
    assert get_pp_rank_microbatches(8, divided(4, "zb-h2"), 0) == (8, False, 6, 2)
    assert get_pp_rank_microbatches(8, divided(4, "gpipe"), 3) == (8, True, 8, 0)


def test_shapes_between_stages_hold_all_streams():
    assert infer_tensor_shapes(5, 3, TINY) == ([(3, 5, 16)], [(3, 5, 16)])
    assert infer_tensor_shapes(5, 3, replace(TINY, enable_hyper_connections=False)) == ([(3, 5, 8)], [(3, 5, 8)])


# Freeing what was sent.


def test_freed_outputs_give_their_bytes_back_and_keep_their_node():
    x = torch.randn(100, 100, requires_grad=True)
    out = x * 2.0
    node, storage = out.grad_fn, weakref.ref(out.untyped_storage())
    deallocate_output_tensor(out, True)
    assert out.grad_fn is node
    assert out.untyped_storage().nbytes() == out.element_size()
    assert storage() is None
    custom_backward(out, torch.full((100, 100), 3.0))
    assert (x.grad == 6.0).all()


def test_freeing_is_off_by_default_and_takes_what_it_is_given():
    outs = [torch.ones(5, requires_grad=True) * i for i in range(3)]
    for thing in (outs[0], outs, {"a": outs[1]}, None):
        deallocate_output_tensor(thing)
    assert [len(out) for out in outs] == [5, 5, 5]
    deallocate_output_tensor(outs[:1], True)
    deallocate_output_tensor({"a": outs[1], "b": 3}, True)
    assert deallocate_output_tensor(None, True) is None
    assert [len(out) for out in outs] == [1, 1, 5]


def test_views_are_not_freed_but_copied():
    whole = torch.ones(4, 6, requires_grad=True) * 2.0
    with pytest.raises(ValueError, match=r"out: expected tensors that own .* a view of shape \[24\] of .* \[4, 6\]"):
        deallocate_output_tensor(whole.view(24), True)
    for out in (whole.view(24), whole[1:]):
        copy = own_memory(out)
        assert copy.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
        assert copy.grad_fn is not None
        assert torch.equal(copy, out)
    assert own_memory(whole) is whole
    assert own_memory([whole])[0] is whole
    assert all(copy is not whole for copy in own_memory([whole, whole]))


@pytest.mark.parametrize(
    "function", [torch.exp, torch.sigmoid, torch.tanh, lambda y: y.softmax(-1), lambda y: y.max(-1, keepdim=True)[0]]
)
def test_backward_from_a_freed_output_is_ordinary_backward(function):
    """Also where the operation that made it keeps it for its backward."""
    start = torch.randn(4, 6, dtype=torch.float64)
    x, y = (start.clone().requires_grad_() for _ in range(2))
    cotangent = torch.randn_like(function(start))
    out = function(x * 3.0)
    deallocate_output_tensor(out, True)
    assert backward_step(x, out, cotangent) is x.grad
    function(y * 3.0).backward(cotangent)
    assert torch.equal(x.grad, y.grad)


def test_backward_through_lists():
    x = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    outs = [x[0] * 2.0 + x[1] * 5.0, x[1] * 3.0, torch.ones(4)]
    gradients = backward_step(x, outs, [torch.full((3,), 1.0), torch.full((3,), 10.0), torch.ones(4)])
    assert [g.tolist() for g in gradients] == [[2.0] * 3, [35.0] * 3, [0.0] * 2]
    assert backward_step(None, x[0].sum(), None) is None
    handed_on = torch.ones(3, requires_grad=True)
    assert backward_step([handed_on], handed_on, torch.full((3,), 4.0))[0].tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="grad_output: expected 2 gradients, one an output, got 1"):
        custom_backward([x[0] * 2, x[1] * 2], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"grad_output: expected a gradient for an output of shape \[3\], got None"):
        custom_backward(x[0] * 2, None)


@multiprocess
def test_freeing_what_was_sent_lowers_the_peak(two):
    """Measured on a stage that keeps several microbatches: one output each, less what is under way."""
    peaks = {}
    for freed in (True, False):
        config = divided(2, "gpipe", deallocate_pipeline_outputs=freed)
        peaks[freed] = two.run(f"{JOBS}:kept_bytes", config, 8, 1 << 16)[0]
    assert peaks[False] - peaks[True] == 7 * ((1 << 16) - 1) * 8
    assert peaks[True] < 2 * (1 << 16) * 8


@multiprocess
def test_tensors_the_other_rank_does_not_expect_are_not_sent(two):
    """Of a wrong type they would overrun its buffer, which ends its process."""
    wrong_type, too_many = two.run(f"{JOBS}:refused_sends", divided(2))[0]
    assert re.match(r"tensors: expected float64 in SEND 0F0 to rank 1, got torch.float32; .* cast", wrong_type)
    assert re.match(r"tensors: expected at most 8 in SEND 0F1 to rank 1, got 9", too_many)


# Backward in two parts.


class Tied(torch.nn.Module):
    """One weight used three times, as it is, cast, and through a view of the input; one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.unused_bias = torch.nn.Linear(6, 6)
        self.unused_bias.bias.requires_grad_(False)

    def forward(self, x):
        y = self.first(x).tanh()
        y = self.frozen(y).view(2, -1, 6).transpose(0, 1)
        y = Double.apply(self.first(y).sigmoid())
        y = torch.nn.functional.linear(y.to(torch.bfloat16), self.first.weight.to(torch.bfloat16)).float()
        return self.unused_bias(y)[1:]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2.0 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2.0 * gradient


def split_gradients(model, x, function=lambda model, x: model(x), autocast=False):
    """Output, gradients of the input and of all weights after I, and after W."""
    deferred = DeferredWeightGradients()
    with deferred, torch.autocast("cpu", enabled=autocast):
        out = function(model, x)
    with deferred:
        custom_backward(out, torch.ones_like(out))
    after_inputs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    deferred.run()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    deferred.run()  # nothing is left to do
    for name, p in model.named_parameters():
        assert p.grad is None or torch.equal(p.grad, gradients[name])
        p.grad = None
    return out, after_inputs, gradients


def whole_gradients(model, x, function=lambda model, x: model(x), autocast=False):
    with torch.autocast("cpu", enabled=autocast):
        out = function(model, x)
    out.backward(torch.ones_like(out))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return out, gradients


def recomputed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def deep():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))


SPLIT = {
    "linear maps": (deep, (4, 6), {}),
    "one vector": (deep, (6,), {}),
    "many dimensions": (deep, (2, 3, 4, 6), {}),
    "tied, frozen, viewed and cast": (Tied, (4, 6), {}),
    "recomputed": (deep, (4, 6), {"function": recomputed}),
    "tied, recomputed": (Tied, (4, 6), {"function": recomputed}),
    "recomputed twice over": (deep, (4, 6), {"function": lambda m, x: recomputed(lambda x: recomputed(m, x), x)}),
    "autocast": (deep, (4, 6), {"autocast": True}),
}


@pytest.mark.parametrize("first_stage", [True, False], ids=["first stage", "later stage"])
@pytest.mark.parametrize("name", SPLIT)
def test_inputs_first_and_weights_later_give_the_same_gradients(name, first_stage):
    make, shape, how = SPLIT[name]
    model, x = make(), torch.randn(shape, requires_grad=not first_stage)
    out, gradients = whole_gradients(model, x, **how)
    of_input, x.grad = x.grad, None
    split_out, after_inputs, split = split_gradients(model, x, **how)
    assert torch.equal(out, split_out)
    assert first_stage or torch.equal(x.grad, of_input)
    assert split.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(split[key], gradient, rtol=1e-6, atol=1e-6)
    if not how.get("autocast"):
        assert not {key for key in after_inputs if key.endswith("weight")}, "a weight's gradient came with its input's"


def stage_of(**changes) -> tuple[PipelineStage, TransformerConfig]:
    config = replace(divided(2, "zb-h1", hidden_dropout=0.0), **changes)
    return PipelineStage(config, pre_process=True, post_process=False, pp_rank=0), config


STAGES = {
    "plain": {"enable_hyper_connections": False},
    "biases": {"add_bias_linear": True},
    "mhc recomputed": {"recompute_granularity": "selective", "recompute_modules": ("mhc",)},
    "layers recomputed": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "mlp and activation recomputed": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
    "bf16": {"params_dtype": "float32", "bf16": True},
}


@pytest.mark.parametrize("name", STAGES)
def test_weights_of_a_stage_wait_for_w(name):
    """Every linear map's weight, and nothing else."""
    stage, config = stage_of(**STAGES[name])
    tokens = torch.arange(12).view(2, 6)
    _, gradients = whole_gradients(stage, tokens)
    _, after_inputs, split = split_gradients(stage, tokens)
    linear = {key for key in gradients if re.search(r"linear_\w+\.weight$", key)}
    assert len(linear) == 8
    assert after_inputs.keys() == gradients.keys() - linear
    for key, gradient in gradients.items():
        assert relative_difference(split[key].numpy(), gradient.numpy()) <= GRADIENT[config.compute_dtype], key


@pytest.mark.parametrize("hyper", [False, True], ids=["plain", "mhc"])
def test_split_backward_does_no_work_twice(hyper):
    """FLOPs of I and W together, against B, at a width of 512."""
    stage, _ = stage_of(
        hidden_size=512, num_layers=2, seq_length=16, enable_hyper_connections=hyper, params_dtype="float32"
    )
    tokens = torch.arange(16)[None] % 24
    deferred, flops = DeferredWeightGradients(), {}
    out = stage(tokens)
    with FlopCounterMode(display=False) as counter:
        custom_backward(out, torch.ones_like(out))
    flops["B"] = counter.get_total_flops()
    with deferred:
        out = stage(tokens)
    with FlopCounterMode(display=False) as counter, deferred:
        custom_backward(out, torch.ones_like(out))
    flops["I"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        deferred.run()
    flops["W"] = counter.get_total_flops()
    print(flops)
    assert (flops["I"] + flops["W"]) / flops["B"] <= 1.05
    assert 0.8 <= flops["I"] / flops["W"] <= 1.25

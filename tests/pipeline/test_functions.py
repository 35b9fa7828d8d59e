"""Megatron's functions of the PyTorch pipeline: what they take, refuse, divide by and report."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from diptych.plans.schedule.placement import V_SCHEDULES
from reference_torch.pipeline import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_step_calc_loss,
    get_forward_backward_func,
    get_pp_rank_microbatches,
    infer_tensor_shapes,
)
from tests.pipeline.jobs import TINY
from tests.pipeline.support import divided


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
            name = config.schedule_name
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
    with pytest.raises(ValueError, match="model: expected 2, one for each virtual stage of the rank, got 1"):
        virtual(**step_arguments(config, model=[model]))
    with pytest.raises(ValueError, match="data_iterator: expected 2, one for each virtual stage of the rank, got 1"):
        virtual(**step_arguments(config, model=[model] * 2))
    with pytest.raises(ValueError, match="model: expected 1, one for each virtual stage of the rank, got 2"):
        plain(**step_arguments(divided(2), model=[model] * 2))


@pytest.mark.parametrize("config", [TINY, divided(2), divided(2, v=2)], ids=lambda config: config.schedule_name)
def test_what_is_no_loss_has_no_backward(config):
    with pytest.raises(ValueError, match=r"collect_non_loss_data: expected False .*, got True; give forward_only=True"):
        get_forward_backward_func(config)(**step_arguments(config, collect_non_loss_data=True))


def test_a_pipeline_needs_its_groups():
    with pytest.raises(ValueError, match=r"pg_collection: expected this rank's groups .*=2, got none; make them by"):
        forward_backward_pipelining_without_interleaving(**step_arguments(divided(2)))


def test_sizes_a_schedule_cannot_have_are_refused():
    arguments = step_arguments(divided(4, v=2, num_layers=8), model=[torch.nn.Linear(1, 1)] * 2)
    arguments["data_iterator"] = [iter([])] * 2
    for count, message in ((2, "num_microbatches: expected at least pp_size=4"), (6, "a last group of")):
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
    (stored,) = store
    assert (scaled.item(), tokens.item()) == (0.5, 0)
    for copy in (stored["loss"], stored["list"][0], stored["pair"][0], stored["named"].loss):
        assert copy.item() == 2.0
        assert not copy.requires_grad
    assert (stored["pair"][1], stored["named"].name) == ("name", "it")


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

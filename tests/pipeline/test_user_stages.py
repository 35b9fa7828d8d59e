"""Stages of users' making that once went wrong: equal to the same stages in one process, or refused by name at once."""

import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.plans.config import TransformerConfig
from reference_torch.groups import ProcessGroups
from reference_torch.pipeline import get_forward_backward_func
from tests.fuzz.grammars._pipeline_stages import BAD, BAD_LOSSES, Planned, Program, Stage, StageSpec
from tests.fuzz.grammars._pipeline_steps import run
from tests.fuzz.grammars.pipelines import check
from tests.fuzz.harness import EQUAL, REFUSED
from tests.pipeline import module_jobs

LINEAR = StageSpec(("linear",))
TWO = Program(2, "1f1b", (LINEAR, LINEAR), 3)
SPLIT = replace(TWO, schedule="zb-h1")


def first(*operations: str, output: str = "tensor", program: Program = TWO) -> Program:
    return replace(program, stages=(StageSpec(operations, output), LINEAR))


EQUAL_TO_COMPOSED = {
    "a weight's hook, backward split": first("weight hook", program=SPLIT),
    "a hook after accumulation, backward split": first("accumulation hook", program=SPLIT),
    "complex weights, backward split": first("linear", "complex", program=SPLIT),
    "a weight that is a vector, backward split": first("linear", "vector weight", program=SPLIT),
    "relu in place, backward split": first("relu in place", program=SPLIT),
    "a frozen first stage": first("frozen"),
    "stages of one rank share a map, two replicas": Program(
        2, "interleaved", (StageSpec(("shared",)),) * 4, 4, virtual=2, replicas=2
    ),
    "stages of one rank share a map, tokens counted": Program(
        2, "zb-v", (StageSpec(("shared", "linear")),) * 4, 4, virtual=2, steps=2, reducer="tokens", per_token=True
    ),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", EQUAL_TO_COMPOSED)
def test_equal_to_the_composed_stages(name):
    assert check(EQUAL_TO_COMPOSED[name]).verdict == EQUAL


SAYS = {
    "none": "expected stage n to return a tensor or a list of tensors, got None; return what the next stage reads",
    "detached": "output of stage n: expected a tensor that requires a gradient, got a detached one, .*freeze what is",
    "made without gradient": "output of stage n: expected a tensor that requires a gradient",
    "dict": "to return a tensor or a list of tensors, got a dict",
    "empty": "expected stage n to return n tensors, got n; return as many as the next stage receives",
    "one too many": "expected stage n to return n tensors, got n",
    "nested": "to return a tensor or a list of tensors, got a list of a list of a tensor",
    "list with none": "to return a tensor or a list of tensors, got a list of None",
    "longer": r"a tensor of shape \[n, n, n\], which the next stage receives, got \[n, n, n\]; .*variable_seq_lengths",
    "wider": r"to return a tensor of shape \[n, n, n\], which the next stage receives, got \[n, n, n\]",
    "flat": r"to return a tensor of shape \[n, n, n\], which the next stage receives, got \[n, n\]",
    "one element": r"to return a tensor of shape \[n, n, n\], which the next stage receives, got \[\]",
    "broadcastable": r"to return a tensor of shape \[n, n, n\], which the next stage receives",
    "another type": r"to return floatn, got a tensor \[n, n, n\] of floatn; .*cast the output",
    "integers": r"to return floatn, got a tensor \[n, n, n\] of intn",
    "number": "to return a tensor or a list of tensors, got a float",
    "array": "to return a tensor or a list of tensors, got a ndarray",
    "sparse": r"to return floatn, got a sparse_coo tensor",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("output", "schedule"), [*((output, "1f1b") for output in BAD), ("none", "zb-v"), ("wider", "zb-v")]
)
def test_an_output_that_cannot_be_sent_is_refused_at_once(output, schedule):
    """Also between two stages of one rank, which exchange no message. pipeline_timeout is 60 s."""
    program = first("linear", output=output)
    if schedule == "zb-v":
        stages = (LINEAR, StageSpec(("linear",), output), LINEAR, LINEAR)
        program = Program(2, schedule, stages, 4, virtual=2)
    begin = time.monotonic()
    outcome = check(program)
    assert time.monotonic() - begin < 30.0
    assert outcome.verdict == REFUSED
    assert re.search(SAYS[output], outcome.detail), outcome.detail


@pytest.mark.parametrize("reducer", BAD_LOSSES)
def test_a_loss_that_cannot_be_differentiated_is_refused(reducer):
    says = {
        "loss none": "whose loss is a tensor of one element, got None",
        "loss number": "whose loss is a tensor of one element, got a float; return e.g. the mean",
        "loss of several": r"whose loss is a tensor of one element, got a tensor \[2\] of float64",
        "loss detached": "loss of stage 0: expected a tensor that requires a gradient, got a detached one",
    }
    with pytest.raises(ValueError, match=says[reducer]) as error:
        run(Program(1, "none", (LINEAR,), 2, reducer=reducer))
    assert error.value.__notes__ == ["rank 0, 0F0: forward of stage 0, microbatch 0"]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda output: output, r"a tensor \[1, 3, 4\] of float64"),
        (lambda output: (output, None), r"a tuple of a tensor \[1, 3, 4\] of float64, None"),
        (lambda output: (output, len, 3), "a tuple of a tensor .*, a builtin_function_or_method, a int"),
    ],
)
def test_a_step_function_that_returns_no_reducer_is_refused(returned, says):
    config = TransformerConfig(hidden_size=4, num_layers=1, num_attention_heads=1, params_dtype="float64")
    with pytest.raises(ValueError, match=rf"expected \(output, reducer\), got {says}; return the model's"):
        get_forward_backward_func(config)(
            forward_step_func=lambda data, model: returned(model(next(data))),
            data_iterator=iter([torch.rand(1, 3, 4, dtype=torch.float64)]),
            model=torch.nn.Linear(4, 4, dtype=torch.float64),
            num_microbatches=1,
            seq_length=3,
            micro_batch_size=1,
            config=config,
        )


IN_PLACE = {
    "what a stage received": (
        replace(TWO, stages=(LINEAR, StageSpec(("input in place",)))),
        "expected stage n not to change the tensor that it received, got an operation in place on it; .*change a copy",
    ),
    "data, before its backward": (
        replace(first("linear", program=TWO), data="reused"),
        "nBn: expected values saved for backward unchanged, got one changed in place .*yield new tensors",
    ),
    "data, between input and weight gradients": (
        replace(SPLIT, stages=(LINEAR, StageSpec(("one linear of data", "linear"))), data="reused", num_microbatches=4),
        "nWn|unchanged from I to W|changed in place",
    ),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", IN_PLACE)
def test_memory_that_changes_under_way_is_refused(name):
    program, says = IN_PLACE[name]
    outcome = check(program)
    assert outcome.verdict == REFUSED
    assert re.search(says, outcome.detail), outcome.detail


@pytest.mark.multiprocess
@pytest.mark.parametrize("raises", [("F", 1, 2), ("B", 0, 1)])
def test_an_exception_of_a_stage_reaches_the_caller_with_its_place(raises):
    assert check(replace(TWO, raises=raises)).detail == f"the program's own exception in {raises[0]}"


def test_a_step_that_fails_leaves_the_gradients_of_earlier_steps():
    program = Program(1, "none", (LINEAR,), 3, raises=("F", 0, 2))
    stage = Stage(program, 0)
    (operation,) = stage.operations
    weight, bias = operation.linear.weight, operation.linear.bias
    weight.grad = before = torch.ones_like(weight)
    threads = threading.active_count()

    def reduce(output):
        return output.mean(), output.mean()

    with pytest.raises(Planned, match="forward of stage 0") as error:
        get_forward_backward_func(program.config)(
            forward_step_func=lambda data, model: (model(next(data)), reduce),
            data_iterator=iter(torch.rand(3, 1, 3, 4, dtype=torch.float64)),
            model=stage,
            num_microbatches=3,
            seq_length=3,
            micro_batch_size=1,
            config=program.config,
            pg_collection=ProcessGroups(),
        )
    assert error.value.__notes__ == ["rank 0, 0F2: forward of stage 0, microbatch 2"]
    assert weight.grad is before
    assert bool(before.eq(1.0).all())
    assert bias.grad is None
    assert threading.active_count() == threads


@pytest.mark.multiprocess
def test_a_rank_may_share_parameters_with_several_sets_of_ranks(three):
    model = module_jobs.Overlapping()
    model(module_jobs.overlapping_inputs()).square().mean().backward()
    expected = {"first": model.first.grad.numpy(), "second": model.second.grad.numpy()}
    found = three.run("tests.pipeline.module_jobs:gains_of_overlapping_stages")
    assert [{*gradients} for gradients in found] == [{"first"}, {"first", "second"}, {"second"}]
    for gradients in found:
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-12)

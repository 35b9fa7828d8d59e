"""PipelineExecutor: any modules, pytrees and losses, equal to the same stages one after the other."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diptych.plans.schedule.csv import schedule_from_csv
from diptych.plans.schedule.named import build_schedule
from reference_torch.pipeline import PipelineExecutor, split_batch
from reference_torch.rank_pool import RankPool
from tests.pipeline import module_jobs
from tests.pipeline.module_jobs import batch, composed, loss, stages

JOBS = "tests.pipeline.module_jobs"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_process_runs_all_stages(reduction):
    losses, gradients, evaluated = module_jobs.run("1f1b", 2, 4, True, reduction)
    expected = composed(2, 4, True, reduction)
    assert losses == evaluated == expected[0]
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-14, atol=1e-14, msg=name)


@pytest.mark.multiprocess
@pytest.mark.parametrize("lengths", [False, True], ids=["equal shapes", "other shapes"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pytrees_between_ranks(three, schedule, lengths):
    ranks = three.run(f"{JOBS}:run", schedule, 3, 4, lengths)
    losses, gradients = composed(3, 4, lengths)
    assert [rank[0] for rank in ranks[:2]] == [[[]] * 3] * 2
    assert ranks[2][0] == ranks[2][2] == [pytest.approx(each, rel=1e-14) for each in losses]
    found = {name: gradient for rank in ranks for name, gradient in rank[1].items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13, msg=name)


SAYS = {
    "shapes": r"output of stage 0: expected .*\[2, 3, 4\].*, as in the first microbatch, got .*variable_shapes=True",
    "detached": "output of stage 1: expected a tensor that requires a gradient, got a detached one",
    "not sent": "output of stage 1: expected .* got a leaf that cannot be sent to another rank",
    "subclass": r"output of stage 1: expected a tensor, .* got a Named; convert it to a plain dense tensor \(DTensor",
    "sparse": r"output of stage 1: expected a tensor, .* got a torch\.sparse_coo",
    "tensor in a class": "it contains a tensor, and its class is not registered as a pytree",
    "in place": "to change the tensor that it received, got an operation in place",
    "error": "ZeroDivisionError.*rank 1, 1F0: forward of stage 1, microbatch 0",
}


@pytest.mark.parametrize("case", SAYS)
def test_what_cannot_go_on_is_refused(case):
    first, _ = module_jobs.refused(case)
    assert re.search(SAYS[case].replace("rank 1", "rank 0"), first)


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", ["shapes", "error"])
def test_an_error_of_one_rank_ends_all(case):
    """In new ranks, since gloo closes the connections of a failed one."""
    with RankPool(3) as pool:
        ranks = pool.run(f"{JOBS}:refused", case)
    assert any(re.search(SAYS[case], first) for first, _ in ranks), ranks
    assert all(first for first, _ in ranks), "a rank believes that the step went well"
    assert all("make a new PipelineExecutor" in second for _, second in ranks)


REFUSED = {
    "no microbatches": (lambda: PipelineExecutor(stages(), "1f1b"), "num_microbatches: expected the number"),
    "no stage": (lambda: PipelineExecutor([], "1f1b", 4), "stages: expected a multiple of 1"),
    "None": (lambda: PipelineExecutor([*stages()[:2], None], "1f1b", 4), "a module for stage 2, which belongs to rank"),
    "reduction": (lambda: PipelineExecutor(stages(), "1f1b", 4, loss_reduction="max"), "expected 'mean' or 'sum'"),
    "table": (lambda: PipelineExecutor(stages(), build_schedule("1f1b", 2, 4)), "a table for 1 ranks and 3 stages"),
    "counts": (
        lambda: PipelineExecutor(stages(), build_schedule("none", 1, 2, 3), 3),
        "num_microbatches: expected 2, as in the table",
    ),
    "a tensor": (lambda: _pipeline().step(torch.zeros(4, 2)), "inputs: expected a list of 4 microbatches, got Tensor"),
    "none": (lambda: _pipeline().step(), "inputs: expected a list of 4 microbatches, got NoneType"),
    "three": (lambda: _pipeline().step(batch(0, 3)[0]), "inputs: expected 4 microbatches, got 3; make them"),
    "targets": (lambda: _pipeline().step(batch(0, 4)[0], batch(0, 2)[1]), "targets: expected 4 microbatches, got 2"),
    "split": (lambda: split_batch(torch.zeros(6, 2), 4), r"dimension 0 is a multiple of 4, .* shape \[6, 2\]; leave"),
    "shared": (
        lambda: PipelineExecutor(stages(), "1f1b", 4, shared_parameters=[{0: "embedding.weight", 1: "map.weigh"}]),
        "expected a parameter 'map.weigh' in stage 1",
    ),
    "not shared": (
        lambda: PipelineExecutor(stages(), "1f1b", 4, shared_parameters=[{1: "map.weight", 2: "map.weight"}]),
        "expected one parameter in the stages .1, 2. of one rank, got 2",
    ),
    "no loss": (
        lambda: PipelineExecutor(stages(), "1f1b", 4).step(batch(0, 4)[0]),
        r"the output of the last stage, without loss_fn: expected a loss.* got a tensor \[2, 3\]",
    ),
    "loss": (
        lambda: PipelineExecutor(stages(), "1f1b", 4, lambda out, target: out).step(*batch(0, 4)),
        r"loss_fn: expected a loss, a tensor of one element, got a tensor \[2, 3\]",
    ),
}


def _pipeline():
    return PipelineExecutor(stages(), "1f1b", 4, loss)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name):
    call, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.multiprocess
def test_a_buffer_that_a_stage_fills_again_is_not_overwritten_while_it_is_sent(two):
    assert two.run(f"{JOBS}:reused") == [[[]] * 3, [[0.0, 2.0, 4.0, 6.0]] * 3]


@pytest.mark.multiprocess
def test_replicas_have_the_gradients_and_buffers_of_ddp(two):
    """Batch norms follow the first replica, and unused parameters keep no gradient."""
    for found, expected in zip(*(two.run(f"{JOBS}:replicated", pipeline) for pipeline in (True, False)), strict=True):
        for mine, wanted in zip(found, expected, strict=True):
            assert mine.keys() == wanted.keys()
            for name, tensor in wanted.items():
                if tensor is None:
                    assert mine[name] is None, name
                else:
                    torch.testing.assert_close(mine[name], tensor, rtol=1e-14, atol=1e-14, msg=name)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_options_of_ddp_that_fix_its_reductions_are_refused(option, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stage = DistributedDataParallel(nn.Linear(4, 4), **{option: True})
        with pytest.raises(ValueError, match=f"DistributedDataParallel without {option}, .* got {option}=True; leave"):
            PipelineExecutor([stage], "none", 1, loss).step([torch.ones(2, 4)], [torch.ones(2, 4)])
    finally:
        dist.destroy_process_group()


def test_sharded_parameters_do_not_show_what_they_share():
    stage = nn.Linear(4, 4)
    stage.weight.to_local = None  # as those of fully_shard have it
    with pytest.raises(ValueError, match=r"shared_parameters: expected a list, .* give .. if they share nothing"):
        PipelineExecutor([stage], "none", 1, loss)
    PipelineExecutor([stage], "none", 1, loss, shared_parameters=[])


def test_a_step_that_fails_leaves_earlier_gradients_and_one_process_goes_on():
    modules = stages()
    pipeline = PipelineExecutor(modules, "1f1b", 4, loss)
    pipeline.step(*batch(0, 4))
    before = module_jobs.gradients_of(dict(enumerate(modules)))
    with pytest.raises(ValueError, match="inputs"):
        pipeline.step(batch(0, 3)[0])
    hook = modules[2].register_forward_hook(lambda module, args, out: out.detach())
    with pytest.raises(ValueError, match="loss of stage 2: expected a tensor that requires a gradient"):
        pipeline.step(*batch(1, 4))
    hook.remove()
    after = module_jobs.gradients_of(dict(enumerate(modules)))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_table_from_a_file_is_run():
    """One rank with two stages, in an order that no name has."""
    table = schedule_from_csv("0F0,1F0,0F1,1B0,1F1,0B0,1B1,0B1\n")
    trace = []
    modules = [nn.Linear(2, 2), nn.Linear(2, 1)]
    PipelineExecutor(modules, table, loss_fn=lambda out, target: out.sum()).step(
        split_batch(torch.ones(2, 2), 2), trace=trace
    )
    assert " ".join(map(str, trace)) == "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"


def test_batches_are_split_as_pytrees():
    parts = split_batch({"x": torch.arange(6).view(6, 1), "name": "n"}, 3)
    assert [part["x"].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert {part["name"] for part in parts} == {"n"}

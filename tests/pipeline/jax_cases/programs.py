"""What runs is the schedule, in any type, with kernels, and no collective is inside a branch; bad input is named."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import jax_impl.pipeline.executor as executor
from benchmarks.jobs.sleeping_jax import Sleeping, time_sleeping
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.lockstep import Rows, lockstep_makespan
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import Costs
from jax_impl import ops
from jax_impl.pipeline import make_pipeline_step
from jax_impl.pipeline.programs import Task
from jax_impl.staged_parameters import StagedParameters
from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from tests.pipeline.jax_cases.support import (
    DROPPED,
    FOUR,
    HYPER,
    PLAIN,
    ROUNDS,
    STEP,
    batch_of,
    model_of,
    reference,
    run_step,
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_kernels_drop_out_and_recompute_in_stages_as_in_the_single_device_model(schedule, monkeypatch):
    """Interpreted; their masks are made with all rounds, and have a place in the model that is no variable."""
    monkeypatch.setattr(ops, "ROUNDS", ROUNDS)
    plain = replace(
        HYPER, hidden_size=8, ffn_hidden_size=8, seq_length=8, recompute_modules=("mhc", "activation"), impl="reference"
    )
    config = replace(plain, impl="triton", pipeline_model_parallel_size=2, pipeline_schedule=schedule)
    losses, expected = reference(plain, 2)
    loss, gradients, step = run_step(config, 2)
    assert loss == pytest.approx(losses.mean(), rel=GRADIENT["float64"])
    for name, ours, theirs in zip(step.names, gradients, expected, strict=True):
        assert relative_difference(ours, theirs) <= GRADIENT["float64"], name


def test_kernels_are_not_interpreted_by_too_few_threads(monkeypatch):
    config = replace(HYPER, impl="triton", pipeline_model_parallel_size=2)
    monkeypatch.setenv("NPROC", "7")
    message = r"impl: expected at least 8 threads .* on 2 devices, got 7; set the environment variable NPROC=8 before"
    with pytest.raises(ValueError, match=message):
        make_pipeline_step(model_of(config), config)
    make_pipeline_step(model_of(config), replace(config, impl="reference"))


def test_both_transforms_run_the_same_function():
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    (loss, gradients, _), (other_loss, others, _) = (
        run_step(config, 4, transform=transform) for transform in ("pmap", "shard_map")
    )
    assert loss == other_loss
    for ours, theirs in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_forward_only_gives_losses_without_dropout():
    config = replace(DROPPED, **FOUR)
    model = model_of(config)
    step = make_pipeline_step(model, config, training=False, forward_only=True)
    losses = step(step.stage_parameters(nnx.split(model, nnx.Param)[1]), *batch_of(5), STEP)
    np.testing.assert_allclose(losses, reference(unsharded(config), 5, training=False)[0], rtol=1e-13)
    assert step.trace(5) == schedule_for(config, 5, forward_only=True).actions


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_what_runs_is_the_schedule(schedule, monkeypatch):
    """Every rank reports what it runs while it runs it, and on which samples."""
    config = replace(PLAIN, **FOUR, pipeline_schedule=schedule)
    m, ran = 4, defaultdict(list)

    def report(kind: str, rank, stage, microbatch) -> None:
        ran[int(rank)].append(f"{int(stage)}{kind}{int(microbatch)}")

    def reported(kind: str, name: str, method):
        def run(self, *arguments):
            row = next(argument for argument in arguments if isinstance(argument, Rows))

            def reporting(stage, branch, done):
                jax.debug.callback(partial(report, kind), jax.lax.axis_index("pp"), stage, getattr(row, name))
                return executor._Execution._run_program_of(self, stage, branch, done)

            with monkeypatch.context() as patch:
                patch.setattr(self, "_run_program_of", reporting, raising=False)
                return method(self, *arguments)

        return run

    backward = "I" if schedule == "zb-h1" else "B"
    for name, kind in (("forward", "F"), ("backward", backward), ("weights", "W")):
        method = "_weight_gradients" if name == "weights" else f"_{name}"
        wrapped = reported(kind, f"{name}_microbatch", getattr(executor._Execution, method))
        monkeypatch.setattr(executor._Execution, method, wrapped)
    run_step(config, m)
    jax.effects_barrier()
    expected = schedule_for(config, m).actions
    assert [ran[rank] for rank in range(4)] == [[str(action) for action in actions] for actions in expected]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_a_slot_costs_its_slowest_rank(schedule):
    """Nobody sends, and so waits for others to, before it has done its own work."""
    config = replace(PLAIN, num_layers=4, pipeline_model_parallel_size=4, pipeline_schedule=schedule)
    case = Sleeping(config, 8, Costs(0.04, 0.02, 0.02))
    predicted = lockstep_makespan(schedule_for(config, 8), case.costs)
    assert predicted <= min(time_sleeping(case, 4)) <= 1.3 * predicted


# No collective in a branch.

COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "pgather", "all_gather", "all_to_all", "reduce_scatter")


def collectives(program, inside: bool = False) -> list[tuple[str, bool]]:
    """Name of every collective of a jaxpr, and whether it is in a branch of a cond or in a loop of unknown length."""
    found = []
    for equation in program.eqns:
        name = equation.primitive.name
        if name.startswith(COLLECTIVES):
            found.append((name, inside))
        for inner in jaxprs_in_params(equation.params):
            found += collectives(inner, inside or name in ("cond", "while"))
    return found


@pytest.mark.parametrize("transform", ["pmap", "shard_map"])
def test_no_collective_is_in_a_branch(transform):
    config = replace(HYPER, hidden_dropout=0.0, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1")
    found = collectives(traced(config, transform=transform))
    assert {name.removesuffix("_invariant") for name, _ in found} == {"ppermute", "psum"}
    assert not [name for name, inside in found if inside]


def traced(config: TransformerConfig, **options):
    step = make_pipeline_step(model_of(config), config, **options)
    staged = step.stage_parameters(nnx.split(model_of(config), nnx.Param)[1])
    tokens, targets = batch_of(3)
    return jax.make_jaxpr(lambda staged: step(staged, tokens, targets, STEP))(staged).jaxpr


@pytest.mark.parametrize("tokens", [False, True])
def test_only_full_recompute_repeats_exchanges_of_tensor_parallel_ranks(tokens):
    """A replay sums the output of each region again, or gathers its input; what follows the last sum reads it."""
    ranks = {"tensor_model_parallel_size": 2, "sequence_parallel": tokens}
    plain = replace(HYPER, vocab_size=12, hidden_dropout=0.0, **ranks)
    modes = {
        "none": {"recompute_granularity": None, "recompute_modules": ()},
        "selective": {
            "recompute_granularity": "selective",
            "recompute_modules": ("mhc", "layernorm", "core_attn", "activation", "mlp"),
        },
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "recompute_modules": (),
        },
    }
    counts = {}
    for name, mode in modes.items():
        found = collectives(traced(replace(plain, **mode), transform="shard_map"))
        counts[name] = Counter(name.removesuffix("_invariant") for name, _ in found)
    assert not counts["selective"] - counts["none"]
    regions = 4  # nothing reads the last sum of the second layer, whose MLP has no hyper-connection
    again = {"all_gather": regions, "reduce_scatter": regions - 1} if tokens else {"psum": regions - 1}
    assert counts["full"] - counts["selective"] == again


def test_collective_test_sees_one_that_jax_puts_in_a_branch(monkeypatch):
    """Parameters that do not vary by rank: JAX sums their gradient over ranks where it is taken."""
    vary = executor.vary

    def vary_all_but_parameters(tree, axes):
        if not isinstance(tree, tuple) or not isinstance(tree[0], StagedParameters):
            return vary(tree, axes)
        others = tree[0], *vary(tuple(tree[1:]), axes)
        return Task(*others) if isinstance(tree, Task) else others

    monkeypatch.setattr(executor, "vary", vary_all_but_parameters)
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    assert ("psum_invariant", True) in collectives(traced(config, transform="shard_map"))

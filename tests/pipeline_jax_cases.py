"""The lock-step executor: loss and gradients of the undivided model, whatever the schedule, the cut and the door.

tests/test_pipeline_jax.py runs this file in a process with eight devices, whose number JAX fixes on its first use.
"""

import os
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

import jax_impl.pipeline.executor as executor
from jax_impl import ops
from jax_impl.pipeline import make_pipeline_step
from jax_impl.pipeline.kept import Keeper, Task
from jax_impl.pipeline.stages import Batch, StagedParameters, cut, names_of
from jax_impl.transformer import GPTModel
from parity.compare import relative_difference
from parity.tolerances import GRADIENT, PARAMETERS
from plans.actions import Schedule
from plans.config import TransformerConfig
from plans.generate import generate_schedule
from plans.implementation import callback_threads
from plans.partition import undivided
from plans.placement import SCHEDULES
from plans.schedule import build_schedule, schedule_for
from plans.schedule_file import schedule_to_csv
from plans.simulate import Costs
from tests.pipeline_draws import any_cut
from tests.test_documents import CONFIG, TRAIN, assert_alike, trained
from tests.test_schedule_file import written_by_torch

jax.config.update("jax_num_cpu_devices", 8)
os.environ["NPROC"] = str(callback_threads(8))

ROUNDS = ops.ROUNDS
STEP = 3
"""Training step of every dropout mask."""

PLAIN = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=2,
    ffn_hidden_size=16,
    vocab_size=11,
    seq_length=8,
    init_method_std=0.3,
    params_dtype="float64",
)
DROPPED = replace(
    PLAIN, hidden_dropout=0.2, add_bias_linear=True, layer_pattern="attention,attention+gelu+ffn=24,attention"
)
"""Tied, with biases, layers of two kinds, and dropout."""

FOUR = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|t||tL"}
"""Three layers on four ranks, of which one has none."""

TWICE_TWO = FOUR | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}

HYPER = replace(
    PLAIN,
    num_layers=2,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    hidden_dropout=0.2,
    untie_embeddings_and_output_weights=True,
    layer_pattern="attention,attention+gelu+no-mlp-hc",
    recompute_granularity="selective",
    recompute_modules=("mhc", "mlp"),
)

SEVEN = replace(PLAIN, num_layers=7, untie_embeddings_and_output_weights=True)


@pytest.fixture(autouse=True)
def compiled_fast_rather_than_well(monkeypatch):
    """Three rounds of random numbers, not ten: masks still depend on everything, and take most of the compiling."""
    monkeypatch.setattr(ops, "ROUNDS", 3)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compiled_well(compiled_fast_rather_than_well):
    """Where operations are counted."""
    jax.config.update("jax_disable_most_optimizations", False)


def batch_of(m: int, b: int = 2, length: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m)
    return tuple(random.integers(0, PLAIN.vocab_size, (m, b, length)).astype(np.int32) for _ in range(2))


def model_of(config: TransformerConfig) -> GPTModel:
    return GPTModel(undivided(config))


@cache
def reference(config: TransformerConfig, m: int, b: int = 2, training: bool = True) -> tuple[np.ndarray, list]:
    """Losses [m] of an undivided model and the gradients of their mean, one microbatch after the other."""
    graph, params = nnx.split(GPTModel(config), nnx.Param)

    def loss(params, tokens, targets, samples):
        return nnx.merge(graph, params)(tokens, targets, step=STEP, samples=samples, training=training)

    def add(sums, microbatch):
        value, gradients = jax.value_and_grad(loss)(params, *microbatch)
        return jax.tree.map(lambda a, g: a + g / m, sums, gradients), value

    @jax.jit
    def run(params, *batch):
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)

    gradients, losses = run(params, *batch_of(m, b), np.arange(m * b).reshape(m, b))
    return np.asarray(losses), [np.asarray(g) for g in jax.tree.leaves(gradients)]


def run_step(config: TransformerConfig, m: int, b: int = 2, **options):
    """Loss, and gradients by leaf, of the pipeline."""
    model = model_of(config)
    step = make_pipeline_step(model, config, **options)
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    loss, gradients = step(staged, *batch_of(m, b), STEP)
    joined = step.join_parameters(gradients)
    again = step.stage_parameters(joined)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs, "padding has a gradient")
    return loss, [np.asarray(g) for g in jax.tree.leaves(joined)], step


def check(config: TransformerConfig, m: int, b: int = 2, tolerance: float = GRADIENT["float64"], **options):
    losses, expected = reference(undivided(config), m, b)
    loss, gradients, step = run_step(config, m, b, **options)
    assert loss == pytest.approx(losses.mean(), rel=tolerance)
    for name, ours, theirs in zip(step.names, gradients, expected, strict=True):
        assert np.linalg.norm(theirs) > 0, name
        assert relative_difference(ours, theirs) <= tolerance, name
    if options.get("ticks", "canonical") == "canonical":
        assert step.trace(m) == schedule_for(config, m).actions


def devices(*sizes: int) -> np.ndarray:
    return np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)


CASES = {
    "zero bubble": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="zb-h1"), 5, door="shard_map"),
    "hyper-connections, recompute, data parallel": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=2),
        3,
        mesh=Mesh(devices(2, 2), ("dp", "pp")),
        door="shard_map",
    ),
    "a table made for its costs, some backwards split": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule_file=made_for_uneven_stages()), 4
    ),
    "there and back, some backwards split": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule="dualpipe-v"), 5
    ),
}


def own_schedule(schedule: Schedule | str | None = None) -> str:
    """A file with a schedule; None: of two ranks and four microbatches, in which only some backwards are split."""
    path = Path(tempfile.mkdtemp(prefix="schedule")) / "own.csv"
    schedule = schedule or build_schedule("dualpipe-v", 2, 4, 2)
    path.write_text(schedule if isinstance(schedule, str) else schedule_to_csv(schedule))
    return str(path)


def made_for_uneven_stages() -> str:
    """A file with a schedule made for stages unlike each other, slow messages and little memory."""
    costs = Costs([1.0, 2.0, 1.0, 2.6], [1.2, 2.0, 1.5, 2.0], [0.7, 1.9, 0.8, 2.0], 0.4, 1.0, 0.5)
    return own_schedule(generate_schedule(2, 4, 2, costs, 4.0, effort=0.1).schedule)


HYBRID = replace(DROPPED, layer_pattern="kda,gdn,attention", linear_num_value_heads=4)

SEVEN_OF_EIGHT = replace(
    SEVEN,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=2,
    pipeline_model_parallel_layout="Et|t|t|t|t|t|t|L",
)
ANY_ORDER = "0F2,0F0,0B2,0F1,0B0,0B1\n1F2,1I2,1F0,1B0,1W2,1F1,1B1"

SLOW = {
    "interleaved, fused": lambda: check(
        replace(DROPPED, **TWICE_TWO, microbatch_group_size_per_vp_stage=3), 5, door="shard_map", ticks="fused"
    ),
    "1f1b": lambda: check(replace(DROPPED, **FOUR), 5),
    "gpipe, inputs kept": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="gpipe"), 5, keep="inputs"),
    "seven layers on four stages, zero bubble, inputs kept": lambda: check(
        replace(
            SEVEN,
            pipeline_model_parallel_size=4,
            pipeline_model_parallel_layout="Ett|t|tt|ttL",
            pipeline_schedule="zb-h1",
        ),
        5,
        keep="inputs",
    ),
    "delta rule": lambda: check(replace(HYBRID, **FOUR), 5),
    "delta rule, zero bubble, inputs kept": lambda: check(
        replace(HYBRID, **FOUR, pipeline_schedule="zb-h1"), 5, keep="inputs"
    ),
    "delta rule, zero bubble": lambda: check(replace(HYBRID, **FOUR, pipeline_schedule="zb-h1"), 5, door="shard_map"),
    "one rank": lambda: check(DROPPED, 3),
    "fewer microbatches than ranks": lambda: check(replace(DROPPED, **FOUR), 2, ticks="fused"),
    "interleaved": lambda: check(replace(DROPPED, **TWICE_TWO), 6, keep="inputs"),
    "hyper-connections, zero bubble": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"), 3
    ),
    "hyper-connections, zero bubble, inputs kept": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"), 3, keep="inputs"
    ),
    "hyper-connections, empty ends": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|t|t|L"), 3
    ),
    "full recompute by blocks": lambda: check(
        replace(
            SEVEN,
            hidden_dropout=0.2,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ettt|ttttL",
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=2,
        ),
        3,
    ),
    "some layers recomputed": lambda: check(
        replace(
            SEVEN,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ettt|ttttL",
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=2,
        ),
        3,
        door="shard_map",
    ),
    "zb-h2, inputs kept": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="zb-h2"), 8, keep="inputs"),
    "zb-v": lambda: check(replace(DROPPED, **TWICE_TWO, pipeline_schedule="zb-v"), 4, door="shard_map"),
    "zb-v, hyper-connections": lambda: check(
        replace(
            HYPER,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Et||t|L",
            pipeline_schedule="zb-v",
        ),
        4,
    ),
    **{
        f"{name}, four ranks": lambda name=name, m=m: check(replace(SEVEN_OF_EIGHT, pipeline_schedule=name), m)
        for name, m in (("zb-v", 7), ("v-half", 6), ("v-min", 5), ("dualpipe-v", 8))
    },
    "microbatches in any order": lambda: check(
        replace(
            DROPPED,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ett|tL",
            pipeline_schedule_file=own_schedule(ANY_ORDER),
        ),
        3,
    ),
    "PyTorch's interleaved zero bubble": lambda: check(
        replace(
            DROPPED,
            **TWICE_TWO,
            pipeline_schedule_file=own_schedule(written_by_torch("ScheduleInterleavedZeroBubble", 2, 4, 2)),
        ),
        4,
    ),
    "v-min, data parallel, inputs kept": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule="v-min"),
        4,
        b=4,
        mesh=Mesh(devices(2, 4), ("pp", "dp")),
        door="shard_map",
        keep="inputs",
    ),
    "dualpipe-v, inputs kept": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule="dualpipe-v"), 5, keep="inputs"
    ),
    "in the order of a file": lambda: check(replace(DROPPED, **TWICE_TWO, pipeline_schedule_file=own_schedule()), 4),
    "data parallel, interleaved": lambda: check(
        replace(DROPPED, **TWICE_TWO), 4, b=4, mesh=Mesh(devices(2, 4), ("pp", "dp")), door="shard_map"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_undivided_model(case):
    CASES[case]()


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_equals_the_undivided_model_in_more_ways(case):
    SLOW[case]()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (("dp", 2), ("pp", 3))], ids=["pipeline", "and replicas"])
def test_documents_of_the_corpus_reach_every_stage(mesh):
    config = replace(CONFIG, pipeline_model_parallel_size=3)
    train = replace(TRAIN, micro_batch_size=1 if mesh is None else 2)
    mesh = mesh and Mesh(devices(*dict(mesh).values()), tuple(dict(mesh)))
    assert_alike(trained("jax", config, train, mesh=mesh), trained("jax"), PARAMETERS["float64"])


SMALL_HYPER = {
    "enable_hyper_connections": True,
    "num_residual_streams": 2,
    "sinkhorn_iterations": 3,
    "mhc_init_gating_factor": 0.5,
}


@st.composite
def any_case(draw) -> tuple[TransformerConfig, int, dict[str, str]]:
    """A configuration, a number of microbatches, and options of the step."""
    cut = draw(any_cut())
    config = replace(PLAIN, hidden_dropout=0.1, **cut.settings, **(SMALL_HYPER if draw(st.booleans()) else {}))
    alternates = config.pipeline_schedule in ("1f1b", "interleaved")
    options = {
        "keep": draw(st.sampled_from(["inputs", "residuals"])),
        "door": draw(st.sampled_from(["pmap", "shard_map"])),
        "ticks": draw(st.sampled_from(["canonical", "fused"])) if alternates else "canonical",
    }
    return config, cut.num_microbatches, options


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_any_schedule_over_any_split_computes_what_one_device_does():
    drawn: Counter[str] = Counter()

    @settings(max_examples=14, phases=(Phase.explicit, Phase.generate))
    @given(any_case())
    def compute(case):
        config, m, options = case
        drawn.update([str(config.pipeline_schedule), *options.values()])
        check(config, m, **options)

    compute()
    assert drawn.keys() >= {"inputs", "residuals", "pmap", "shard_map"}
    assert len(drawn.keys() & {*SCHEDULES}) >= 5, drawn


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["inputs", "residuals"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_mixed_precision(schedule, keep):
    """As far from float32 as the undivided model in bfloat16 is, over all gradients together."""
    wide = replace(PLAIN, params_dtype="float32", num_layers=4)
    config = replace(wide, bf16=True, pipeline_model_parallel_size=2, pipeline_schedule=schedule)
    losses, exact = reference(wide, 4)
    theirs = reference(undivided(config), 4)[1]
    loss, ours, _ = run_step(config, 4, keep=keep)
    assert all(gradient.dtype == np.float32 for gradient in ours)
    far, undivided_far = (
        relative_difference(*(np.concatenate([g.ravel() for g in side]) for side in (gradients, exact)))
        for gradients in (ours, theirs)
    )
    assert far <= 1.5 * undivided_far
    assert loss == pytest.approx(losses.mean(), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_kernels_drop_out_and_recompute_in_stages_as_in_the_undivided_model(schedule, monkeypatch):
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


def test_both_doors_run_the_same_function():
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    (loss, gradients, _), (other_loss, others, _) = (run_step(config, 4, door=door) for door in ("pmap", "shard_map"))
    assert loss == other_loss
    for ours, theirs in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_forward_only_gives_losses_without_dropout():
    config = replace(DROPPED, **FOUR)
    model = model_of(config)
    step = make_pipeline_step(model, config, training=False, forward_only=True)
    losses = step(step.stage_parameters(nnx.split(model, nnx.Param)[1]), *batch_of(5), STEP)
    np.testing.assert_allclose(losses, reference(undivided(config), 5, training=False)[0], rtol=1e-13)
    assert step.trace(5) == schedule_for(config, 5, forward_only=True).actions


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_what_runs_is_the_schedule(schedule, monkeypatch):
    """Every rank reports what it runs while it runs it, and on which samples."""
    config = replace(PLAIN, **FOUR, pipeline_schedule=schedule)
    m, ran = 4, defaultdict(list)

    def report(kind: str, rank, stage, microbatch) -> None:
        ran[int(rank)].append(f"{int(stage)}{kind}{int(microbatch)}")

    def reported(kind: str, microbatch_of: str, method):
        def run(self, state, row):
            switch = self._switch

            def reporting_switch(stage, branch, nothing):
                def reporting_branch(program):
                    microbatch = getattr(row, microbatch_of)
                    jax.debug.callback(partial(report, kind), jax.lax.axis_index("pp"), stage, microbatch)
                    return branch(program)

                return switch(stage, reporting_branch, nothing)

            self._switch = reporting_switch
            result = method(self, state, row)
            self._switch = switch
            return result

        return run

    backward = "I" if schedule == "zb-h1" else "B"
    for name, kind in (("forward", "F"), ("backward", backward), ("weights", "W")):
        method = "_weight_gradients" if name == "weights" else f"_{name}"
        wrapped = reported(kind, f"{name}_microbatch", getattr(executor._Run, method))
        monkeypatch.setattr(executor._Run, method, wrapped)
    run_step(config, m)
    jax.effects_barrier()
    expected = schedule_for(config, m).actions
    assert [ran[rank] for rank in range(4)] == [[str(action) for action in actions] for actions in expected]


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


@pytest.mark.parametrize("door", ["pmap", "shard_map"])
def test_no_collective_is_in_a_branch(door):
    config = replace(HYPER, hidden_dropout=0.0, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1")
    found = collectives(traced(config, door=door))
    assert {name.removesuffix("_invariant") for name, _ in found} == {"ppermute", "psum"}
    assert not [name for name, inside in found if inside]


def traced(config: TransformerConfig, **options):
    step = make_pipeline_step(model_of(config), config, **options)
    staged = step.stage_parameters(nnx.split(model_of(config), nnx.Param)[1])
    tokens, targets = batch_of(3)
    return jax.make_jaxpr(lambda staged: step(staged, tokens, targets, STEP))(staged).jaxpr


def test_collective_test_sees_one_that_jax_puts_in_a_branch(monkeypatch):
    """Parameters that do not vary by rank: JAX sums their gradient over ranks where it is taken."""
    vary = executor.vary

    def vary_all_but_parameters(tree, axes):
        is_pair = isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[0], StagedParameters)
        return (tree[0], vary(tree[1], axes)) if is_pair else vary(tree, axes)

    monkeypatch.setattr(executor, "vary", vary_all_but_parameters)
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    assert ("psum_invariant", True) in collectives(traced(config, door="shard_map"))


# Memory and work.

SMALL_HALVES = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)

HIDDEN_BYTES = 2 * 8 * 16 * 8
"""Of one microbatch's hidden states."""


def temporary_bytes(config: TransformerConfig, m: int, **options) -> int:
    step, staged, batch = compilable(config, m, **options)
    return step.lower(staged, *batch).compile().memory_analysis().temp_size_in_bytes


def compilable(config: TransformerConfig, m: int, **options):
    model = model_of(config)
    step = make_pipeline_step(model, config, **options)
    return step, step.stage_parameters(nnx.split(model, nnx.Param)[1]), batch_of(m)


@pytest.mark.parametrize("keep", [pytest.param("inputs", marks=pytest.mark.slow), "residuals"])
def test_memory_does_not_grow_with_the_number_of_microbatches(keep):
    few, many = (temporary_bytes(SMALL_HALVES, m, keep=keep) for m in (8, 64))
    assert many < 1.01 * few + batch_bytes(64)


def batch_bytes(m: int) -> int:
    """Of what a step reads, and of its losses: they grow, but are no activations."""
    return sum(array.nbytes for array in batch_of(m)) + 8 * m


@pytest.mark.slow
def test_memory_of_gpipe_grows():
    """By every microbatch's residuals, which the test above would see."""
    config = replace(SMALL_HALVES, pipeline_schedule="gpipe")
    assert temporary_bytes(config, 64) - temporary_bytes(config, 8) > 5 * 56 * HIDDEN_BYTES


@pytest.mark.slow
def test_memory_of_differentiated_forwards_grows():
    """The peer: JAX's own gradient of a pipeline of forwards, which is GPipe. Its gradients are ours."""

    def differentiated(m: int):
        step, staged, batch = compilable(SMALL_HALVES, m, door="shard_map", forward_only=True)
        return jax.jit(jax.grad(lambda staged: step(staged, *batch, STEP).mean())).lower(staged).compile(), staged

    (few, staged), (many, _) = map(differentiated, (8, 64))
    growth = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert growth > 5 * 56 * HIDDEN_BYTES
    step = make_pipeline_step(model_of(SMALL_HALVES), SMALL_HALVES)
    for ours, theirs in zip(*(map(jax.tree.leaves, (step(staged, *batch_of(8), STEP)[1], few(staged)))), strict=True):
        assert relative_difference(np.asarray(ours), np.asarray(theirs)) <= GRADIENT["float64"]


@pytest.mark.usefixtures("compiled_well")
@pytest.mark.parametrize("keep", [pytest.param("inputs", marks=pytest.mark.slow), "residuals"])
def test_split_backward_does_no_work_twice(keep):
    """I and W together cost B, and W no more than F; B costs two F, and one more where the stage is run again."""
    config = TransformerConfig(
        hidden_size=512,
        num_layers=2,
        num_attention_heads=8,
        vocab_size=64,
        seq_length=32,
        pipeline_model_parallel_size=2,
        pipeline_schedule="zb-h1",
    )
    programs, task, x = stage_of(config)
    program = programs[0]
    whole, split = (Keeper((program,), task, x, keep, splits) for splits in (False, True))
    zeros = partial(jax.tree.map, lambda like: jnp.zeros(like.shape, like.dtype))

    def flops(function, *arguments) -> float:
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    def split_backward(task, x, kept, gradient):
        result = split.backward(program, task, x, kept, gradient)
        return result.gradients, result.input_gradient, result.weights

    forward = flops(partial(whole.forward, program), task, x)
    both = flops(lambda *arguments: whole.backward(program, *arguments)[:2], task, x, zeros(whole.kept), x)
    inputs = flops(split_backward, task, x, zeros(split.kept), x)
    weights = flops(partial(split.weight_gradients, program), zeros(split.weights))
    assert inputs + weights <= 1.05 * both
    assert weights <= forward
    assert both <= (3.1 if keep == "inputs" else 2.1) * forward


def stage_of(config: TransformerConfig):
    """Programs, and a task of rank 0."""
    stages = cut(GPTModel, config, schedule_for(config, 2), training=True)
    params = nnx.split(model_of(config), nnx.Param)[1]
    staged = stages.stack(dict(zip(names_of(params), jax.tree.leaves(params), strict=True)))
    rank = StagedParameters(jax.tree.map(lambda x: jnp.asarray(x[0]), staged.layers), staged.ends)
    tokens = jnp.zeros((2, config.seq_length), jnp.int32)
    task = Task(rank, Batch(tokens, tokens, jnp.zeros(2, jnp.int32), jnp.uint32(0)), jnp.int32(0), jnp.int32(0))
    return stages.programs, task, jnp.zeros((2, config.seq_length, config.hidden_size), config.compute_dtype)


def test_residuals_are_the_named_values_alone():
    """No value twice, nothing made of parameters alone, nothing that lies between named values."""
    config = replace(PLAIN, num_layers=4, pipeline_model_parallel_size=4, params_dtype="float32", bf16=True)
    programs, task, x = stage_of(config)
    (middle,) = (program for program in programs if not program.first and not program.last)
    keeper = Keeper((middle,), task, x, "residuals", split=False)
    width, inner, scores = config.hidden_size, 16, 2 * 8  # a token's: D, inner width, heads x T
    # Input and residual after attention, both norms, q, k, v, weights, what they give; gate and value, activation.
    a_token = 4 * width + 3 * width + scores + width + 3 * inner
    assert keeper.kept["bfloat16"].shape == (2 * 8 * a_token,)
    assert set(keeper.kept) == {"bfloat16"}
    first = Keeper(programs[:1], task, x, "residuals", split=False).kept
    assert first["bfloat16"].shape == keeper.kept["bfloat16"].shape


# Bad input.


def test_step_refuses_what_does_not_fit():
    config = replace(PLAIN, num_layers=2, pipeline_model_parallel_size=2)
    model = model_of(config)
    make = partial(make_pipeline_step, model, config)
    with pytest.raises(ValueError, match=r"door: expected one of \('pmap', 'shard_map'\), got 'pjit'"):
        make(door="pjit")
    with pytest.raises(ValueError, match=r"keep: expected one of \('inputs', 'residuals'\), got 'all'"):
        make(keep="all")
    with pytest.raises(ValueError, match=r"ticks: expected one of \('canonical', 'fused'\), got 'loose'"):
        make(ticks="loose")
    with pytest.raises(ValueError, match=r"fused: expected False with schedule 'gpipe'"):
        make_pipeline_step(model, replace(config, pipeline_schedule="gpipe"), ticks="fused")
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'pp' of size .*=2, .* got \{'pp': 4\}"):
        make(Mesh(devices(4), ("pp",)))
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'pp' of size .*=2, .* got \{'pp': 2, 'tp': 2\}"):
        make(Mesh(devices(2, 2), ("pp", "tp")), door="shard_map")
    with pytest.raises(ValueError, match=r"mesh: expected axis 'pp' alone with door 'pmap', .* take door 'shard_map'"):
        make(Mesh(devices(2, 2), ("dp", "pp")))
    with pytest.raises(ValueError, match=r"model: expected the whole model of config, .*undivided\(config\)"):
        make_pipeline_step(GPTModel(config, post_process=False), config)
    many = replace(PLAIN, num_layers=9, pipeline_model_parallel_size=9)
    with pytest.raises(ValueError, match=r"expected at most the 8 devices JAX has, got 9; on a CPU call .*, 9\)"):
        make_pipeline_step(model_of(many), many)


def test_batches_are_checked():
    config = replace(PLAIN, num_layers=4, **{k: v for k, v in TWICE_TWO.items() if "layout" not in k})
    model = model_of(config)
    mesh = Mesh(devices(2, 2), ("dp", "pp"))
    step = make_pipeline_step(model, config, mesh, "shard_map")
    staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
    tokens, targets = batch_of(4)
    with pytest.raises(ValueError, match=r"tokens: expected \[microbatches, .*\], none of them 0, got shape \(2, 8\)"):
        step(staged, tokens[0], targets[0])
    with pytest.raises(ValueError, match=r"targets: expected the shape of tokens, \(4, 2, 8\), got \(3, 2, 8\)"):
        step(staged, tokens, targets[1:])
    with pytest.raises(ValueError, match=r"samples: expected one number a sequence, shape \(4, 2\), got \(2,\)"):
        step(staged, tokens, targets, 0, np.arange(2))
    with pytest.raises(ValueError, match=r"'dp' of size 2 divides, got 1 a microbatch; change either"):
        step(staged, tokens[:, :1], targets[:, :1])
    with pytest.raises(ValueError, match=r"num_microbatches: .* got 3 in groups of 2, which leaves 1"):
        step(staged, tokens[:3], targets[:3])
    with pytest.raises(ValueError, match=r"inputs: expected at most seq_length=8 tokens, got 16"):
        step(staged, *(np.concatenate([x, x], -1) for x in (tokens, targets)))

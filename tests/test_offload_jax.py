"""Offload in JAX: what is compiled is what the plan says, and computes what is computed without it."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from jax_impl import ops
from jax_impl.decoding import Decoder
from jax_impl.offload import layer_numbers, moves_of
from jax_impl.recompute import residual_report
from jax_impl.saving import load_model
from jax_impl.train import Trainer
from parity.compare import relative_difference
from parity.tolerances import LOSS, PARAMETERS
from plans.config import TrainConfig, TransformerConfig
from plans.offload import describe_statistics, layer_storages, step_uses
from plans.recompute import recompute_blocks
from tests.backends import _Unoptimised, room, tiny_corpus
from tests.offload_jobs import activation_events
from tests.test_pipeline_jax import run_cases

PLAIN = TransformerConfig(
    hidden_size=8,
    num_layers=4,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=128,
    seq_length=8,
    init_method_std=0.3,
    params_dtype="float64",
)
DROPPED = replace(PLAIN, num_layers=3, hidden_dropout=0.2)
STREAMS = {"enable_hyper_connections": True, "num_residual_streams": 2, "sinkhorn_iterations": 3}
MIXED = {"layer_pattern": "attention,attention+gelu+no-mlp-hc,attention+no-attention-hc", "add_bias_linear": True}
TRAIN = TrainConfig(train_iters=10, global_batch_size=2, lr=3e-3, min_lr=3e-4, lr_warmup_iters=3, eval_iters=1)
MODULES = ("mhc", "layernorm", "core_attn", "activation", "mlp")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective"}
MODES = {
    "none": {},
    "mhc, blocks of 2": {**SELECTIVE, "recompute_modules": ("mhc",), "mhc_recompute_layer_num": 2},
    "layernorm": {**SELECTIVE, "recompute_modules": ("layernorm",)},
    "all modules": {**SELECTIVE, "recompute_modules": MODULES, "mhc_recompute_layer_num": 3},
    "full, blocks of 2": {**FULL, "recompute_num_layers": 2},
    "full, one by one": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "recompute_activation_function": True,
    },
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Random numbers of fewer rounds, and programs compiled fast rather than well: here it is the order that counts."""
    monkeypatch.setattr(ops, "ROUNDS", 3)
    with _Unoptimised():
        yield


def offloaded(config: TransformerConfig, ahead: int = 1) -> TransformerConfig:
    return replace(config, enable_tensor_offload=True, tensor_offload_num_prefetch_layers=ahead)


def trainer_of(config: TransformerConfig, **train) -> Trainer:
    return Trainer(config, replace(TRAIN, **train), tiny_corpus())


def step_arguments(trainer: Trainer) -> tuple:
    batch = trainer.corpus.batch(0, trainer.train_config.global_batch_size, trainer.config.seq_length)
    return trainer._params, trainer._optimizer_state, batch, np.uint32(0), np.float64(1e-3)


def kinds(params) -> dict[bool, set[str]]:
    """Memory kinds of parameters, by whether they are a layer's."""
    found = {True: set(), False: set()}
    for number, leaf in zip(layer_numbers(params), jax.tree.leaves(params), strict=True):
        found[number is not None].add(leaf.sharding.memory_kind)
    return found


# What moves.


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["none", "full, blocks of 2", pytest.param("layernorm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ahead", "size"), [(0, None), (1, 1), (2, None), (9, 1)])
def test_the_program_moves_what_the_plan_says(mode, ahead, size):
    trainer = trainer_of(offloaded(replace(PLAIN, **MODES[mode]), ahead), global_batch_size=3, micro_batch_size=size)
    trainer.offload.trace = trace = []
    arguments = step_arguments(trainer)
    program, results = jax.make_jaxpr(trainer._update_step, return_shape=True)(*arguments)
    steps = trainer.offload.plan.steps
    assert " ".join(trace) == " ".join(map(str, steps))

    moves = moves_of(program, layer_numbers(arguments), layer_numbers(results))
    copied = [step if step.use.kind == "S" else step._replace(evictions=()) for step in steps]
    assert " ".join(move.event for move in moves) == " ".join(map(str, copied))
    assert {move.arrays for move in moves if move.event[0] in "+-"} == {6}, "a layer has six parameters"
    if size is None:
        assert_copies_follow_the_computation(steps, moves)


def assert_copies_follow_the_computation(steps, moves):
    """A copy waits for all that was computed before its use, and for nothing else of its use."""
    waits = iter([move.waits_for for move in moves if move.event[0] == "+"])
    by_step = [{next(waits) for _ in step.fetches} for step in steps if step.fetches]
    assert all(len(found) == 1 for found in by_step)
    chains = [found.pop() for found in by_step]
    assert chains[0] > 0
    assert all(before < after for before, after in pairwise(chains))


def test_no_copy_is_waited_for_by_the_next_one():
    """A barrier that took the device's copies would let the computation wait for what is fetched ahead."""
    trainer = trainer_of(offloaded(PLAIN, 2))
    program = jax.make_jaxpr(trainer._update_step)(*step_arguments(trainer)).jaxpr
    copies, barriers = set(), 0

    def look(program):
        nonlocal barriers
        for equation in program.eqns:
            if equation.primitive.name == "device_put":
                copies.update(equation.outvars)
            elif equation.primitive.name == "optimization_barrier":
                barriers += 1
                assert not any(v in copies for v in equation.invars if not isinstance(v, Literal))
            for inner in jaxprs_in_params(equation.params):
                look(inner)

    look(program)
    assert barriers >= 4
    assert len(copies) > 6 * 4


def test_forward_alone_moves_forwards():
    trainer = trainer_of(offloaded(PLAIN))
    arguments = trainer._params, trainer.corpus.validation_batch(0, 2, 8)
    program, results = jax.make_jaxpr(partial(trainer._loss, training=False), return_shape=True)(*arguments)
    events = [move.event for move in moves_of(program, layer_numbers(arguments), layer_numbers(results))]
    assert events == ["+0", "+1", "F0", "+2", "F1", "+3", "F2", "F3"]


MOVED = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize(
    ("mode", "ahead", "size"),
    [
        ("none", 0, 1),
        ("mhc, blocks of 2", 1, None),
        *(pytest.param(mode, ahead, None, marks=pytest.mark.slow) for mode in MODES for ahead in (0, 1, 2, 9)),
    ],
)
def test_activations_move_as_the_plan_says(parameters, mode, ahead, size):
    config = replace(PLAIN, num_layers=5, **STREAMS, **MODES[mode])
    config = replace(offloaded(config, ahead), enable_tensor_offload=parameters, **MOVED)
    trainer = trainer_of(config, global_batch_size=3, micro_batch_size=size)
    trainer.offload.trace = trace = []
    arguments = step_arguments(trainer)
    program, results = jax.make_jaxpr(trainer._update_step, return_shape=True)(*arguments)
    blocks = recompute_blocks(config)
    count = 3 if size else 1
    dropped = [layer for block in blocks if block.kind == "full" for layer in block.layers]
    expected = activation_events(step_uses(range(5), count, blocks), ahead, (), dropped)
    assert [event for event in trace if "a" in event] == expected

    moves = moves_of(program, layer_numbers(arguments), layer_numbers(results))
    kept = [move for move in moves if move.event in ("+None", "-None")]
    stats = trainer.offload_statistics
    trainer.offload.steps_run = 1
    out, back = (sum(move.arrays for move in kept if move.event == event) for event in ("-None", "+None"))
    assert out == back == trainer.offload._moved.times(count).arrays
    assert (out > 0) == bool(expected)
    plan = trainer.offload.plan
    stats = trainer.offload_statistics
    assert stats["bytes_in"] - plan.bytes_in == stats["bytes_out"] - plan.bytes_out > 0 or not expected
    if size is None and expected:  # a copy back waits for what was computed before its use, and for no more
        waits = [move.waits_for for move in kept if move.event == "+None"]
        assert waits[0] > max(move.waits_for for move in kept if move.event == "-None")
        assert all(before < after for before, after in pairwise(waits))


@pytest.mark.parametrize(
    ("mode", "ahead", "parameters"),
    [
        pytest.param("mhc, blocks of 2", 0, True, marks=pytest.mark.slow),
        *(pytest.param(mode, 1, parameters, marks=pytest.mark.slow) for mode in MODES for parameters in (False, True)),
    ],
)
def test_gradients_are_those_without_offload_of_activations(mode, ahead, parameters):
    """What comes back is what was kept, of the same layer; the smallest stay on the device."""
    config = replace(DROPPED, **STREAMS, **MODES[mode])
    flags = {"enable_tensor_offload": parameters, "enable_activation_offload": True}
    moved = replace(offloaded(config, ahead), **flags, activation_offload_min_bytes=300)
    assert_same_gradients(trainer_of(moved), trainer_of(config))


def assert_same_gradients(moved: Trainer, plain: Trainer) -> None:
    batch = plain.corpus.batch(0, 2, plain.config.seq_length)
    (expected_loss, expected), (loss, found) = (t.loss_and_gradients(batch, 3) for t in (plain, moved))
    assert abs(loss - expected_loss) <= 1e-13
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_difference(found[name], gradient) <= 1e-13, name


# What is kept from forward to backward.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        ("none", 1),
        ("all modules", 1),
        *(pytest.param(mode, 0, marks=pytest.mark.slow) for mode in ("none", "mhc, blocks of 2", "full, blocks of 2")),
    ],
)
def test_what_recompute_keeps_is_kept_and_no_parameters(mode, ahead):
    """Of parameters, those alone that the plan leaves on the device through the turn."""
    config = replace(PLAIN, num_layers=3, **STREAMS, **MIXED, **MODES[mode])
    plain, moved = trainer_of(config), trainer_of(offloaded(config, ahead))
    batch = plain.corpus.batch(0, 2, config.seq_length)
    reports = [residual_report(partial(t._loss, batch=batch), t._params) for t in (plain, moved)]
    assert reports[0] == reports[1]
    there = set()
    for step in moved.offload.plan.steps[:3]:
        there = (there | set(step.fetches)) - set(step.evictions)
    assert there == {("none", 0): {2}, ("none", 1): {1, 2}, ("all modules", 1): {0}}.get((mode, ahead), there)
    assert kept_of_layers_alone(partial(moved._loss, batch=batch), moved._params) == there


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["all modules", pytest.param("full, blocks of 2", marks=pytest.mark.slow)])
def test_a_replay_waits_for_its_gradient(mode):
    """Else the compiler finds that forward has computed the same, and keeps all of it."""
    config = replace(PLAIN, num_layers=3, untie_embeddings_and_output_weights=True, **STREAMS, **MODES[mode])
    trainer = trainer_of(offloaded(config, 9))  # nothing is fetched after the first use, so no fetch hides it
    arguments = step_arguments(trainer)
    program = jax.make_jaxpr(trainer._update_step)(*arguments).jaxpr
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(arguments[0])[0]]
    made_of = {
        v: {name for name in ("embedding", "output_layer") if f"'{name}'" in path}
        for v, path in zip(program.invars, paths, strict=False)
    }
    seen = 0
    for equation in program.eqns:
        each = [set() if isinstance(v, Literal) else made_of.get(v, set()) for v in equation.invars]
        if re.search(r"\b[RB]\d\b", str(equation.source_info.name_stack)):
            assert {"embedding"} not in each, (
                f"{equation.primitive} reads a value of forward at {equation.source_info.name_stack}"
            )
            seen += {"embedding", "output_layer"} in each
        for place, variable in enumerate(equation.outvars):
            barred = equation.primitive.name == "optimization_barrier" and not each[place]  # a layer's parameter
            made_of[variable] = set() if barred else set().union(*each)
    assert seen > 100


def kept_of_layers_alone(loss, params) -> set[int]:
    """Layers of which something crosses from forward to backward that is made of their parameters and nothing else."""
    program = jax.make_jaxpr(lambda p: jax.vjp(loss, p)[1])(params).jaxpr
    made_of = {v: {-1 if n is None else n} for v, n in zip(program.invars, layer_numbers(params), strict=True)}
    for equation in program.eqns:
        each = [set() if isinstance(v, Literal) else made_of.get(v, set()) for v in equation.invars]
        if equation.primitive.name in ("optimization_barrier", "device_put"):  # value by value
            made_of |= dict(zip(equation.outvars, each, strict=True))
        else:
            made_of |= dict.fromkeys(equation.outvars, set().union(*each))
    crossing = [v for v in program.outvars if not isinstance(v, Literal) and v not in program.invars]
    return {next(iter(made_of[v])) for v in crossing if len(made_of.get(v, ())) == 1} - {-1}


# What comes out.


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        *(pytest.param(mode, ahead, marks=pytest.mark.slow) for mode in MODES for ahead in (0, 1, 9)),
    ],
)
def test_gradients_are_those_without_offload(mode, ahead):
    config = replace(DROPPED, **STREAMS, **MIXED, **MODES[mode])
    assert_same_gradients(trainer_of(offloaded(config, ahead)), trainer_of(config))


VARIANTS = {
    "microbatches": ({}, {"micro_batch_size": 1}, 1),
    "untied, all there": ({"untie_embeddings_and_output_weights": True}, {}, 9),
    "none ahead, recomputed": ({**STREAMS, **MIXED, **MODES["mhc, blocks of 2"]}, {"micro_batch_size": 1}, 0),
    "full": ({**STREAMS, **MODES["full, blocks of 2"]}, {}, 1),
    "clipped": ({"num_layers": 5}, {"clip_grad": 0.05, "micro_batch_size": 1}, 2),
    "activations": ({**STREAMS, **MODES["all modules"], **MOVED, "num_layers": 4}, {"micro_batch_size": 1}, 1),
    "bf16": ({**STREAMS, "params_dtype": "float32", "bf16": True}, {"micro_batch_size": 1}, 1),
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_training_is_that_without_offload(variant, tmp_path):
    """Ten steps; then validation, sampling, and each goes on from the other's checkpoint."""
    flags, train, ahead = VARIANTS[variant]
    config = replace(DROPPED, **flags)
    without = replace(config, enable_activation_offload=False)
    tolerance = {"float64": 1e-13, "float32": 1e-5}[config.params_dtype]
    plain, moved = trainer_of(without, **train), trainer_of(offloaded(config, ahead), **train)
    assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
    for step in range(10):
        a, b = plain.train_step(step), moved.train_step(step)
        assert b.loss == pytest.approx(a.loss, rel=tolerance)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=tolerance)
        assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
        assert {m for of in kinds(moved._optimizer_state).values() for m in of} == {"device"}
    assert_same_parameters(moved, plain, tolerance)
    stats, plan = moved.offload_statistics, moved.offload.plan
    assert plain.offload_statistics is None
    kept = 10 * moved.offload._moved.bytes * (2 // train.get("micro_batch_size", 2))
    assert (kept > 0) == config.enable_activation_offload
    assert (stats["bytes_in"], stats["bytes_out"]) == (10 * plan.bytes_in + kept, 10 * plan.bytes_out + kept)
    assert stats["hits"] + stats["misses"] == 10 * len(plan.steps)
    assert stats["peak_layers"] == min(ahead + 1, config.num_layers)
    assert "MiB" in describe_statistics(stats)
    assert moved.validation_loss() == pytest.approx(plain.validation_loss(), rel=tolerance)
    whole = sum(sum(sizes.values()) for sizes in layer_storages(config).values())
    assert moved.offload_statistics["bytes_in"] == stats["bytes_in"] + whole
    assert moved.offload_statistics["bytes_out"] == stats["bytes_out"]
    text = np.frombuffer(b"the quick", np.uint8)
    logits = Decoder(moved.model).next_logits(text)
    assert relative_difference(logits, Decoder(plain.model).next_logits(text)) <= tolerance

    paths = {one: one.save(tmp_path / name) for one, name in ((plain, "plain"), (moved, "moved"))}
    assert relative_difference(Decoder(load_model(paths[moved])).next_logits(text), logits) <= tolerance
    assert moved.resume(paths[plain]) == plain.resume(paths[moved]) == 10
    assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
    assert moved.train_step(10).loss == pytest.approx(plain.train_step(10).loss, rel=tolerance)
    assert_same_parameters(moved, plain, tolerance)


def assert_same_parameters(moved: Trainer, plain: Trainer, tolerance: float) -> None:
    theirs = plain.parameters()
    for name, ours in moved.parameters().items():
        assert relative_difference(ours, theirs[name]) <= tolerance, name


@pytest.mark.slow
def test_training_agrees_with_pytorch(monkeypatch):
    monkeypatch.undo()
    config = offloaded(replace(DROPPED, **STREAMS))
    torch_side = room("torch", "train").Trainer(config, TRAIN, tiny_corpus(), device="cpu")
    ours = Trainer(config, TRAIN, tiny_corpus())
    for step in range(10):
        assert abs(torch_side.train_step(step).loss - ours.train_step(step).loss) <= LOSS["float64"]
    theirs = torch_side.parameters()
    for name, p in ours.parameters().items():
        assert relative_difference(p, theirs[name]) <= PARAMETERS["float64"], name


@pytest.mark.slow
def test_a_refused_step_changes_nothing_and_leaves_layers_on_the_host():
    trainer = trainer_of(offloaded(PLAIN))
    values = trainer.parameters()
    values["decoder.layers.1.mlp.linear_fc1.weight"][0, 0] = np.nan
    trainer.set_parameters(values)
    assert kinds(trainer._params)[True] == {"pinned_host"}
    with pytest.raises(ArithmeticError, match=r"step 0: expected a finite loss"):
        trainer.train_step(0)
    for name, p in trainer.parameters().items():
        np.testing.assert_array_equal(p, values[name], err_msg=name)
    assert kinds(trainer._params)[True] == {"pinned_host"}


# Where it runs.


def test_lowered_for_a_gpu_it_copies_from_pinned_memory():
    trainer = trainer_of(offloaded(PLAIN))
    traced = jax.jit(trainer._update_step).trace(*step_arguments(trainer))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    copies = [line for line in text.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in copies if "pinned_host" in line]
    assert len(to_host) == 6 * 4
    moved = sum(len(step.fetches) for step in trainer.offload.plan.steps)
    assert len(copies) == 6 * (4 + moved)
    main = next(line for line in text.splitlines() if "@main" in line)
    assert main.count('mhlo.memory_kind = "pinned_host"') >= 6 * 4


# Pipelines and replicas: tests/offload_jax_cases.py, in a process that has a device for every rank.


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_pipelines_of_several_devices():
    run_cases("tests/offload_jax_cases.py", "not slow", 580)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1500)
def test_more_pipelines_of_several_devices():
    run_cases("tests/offload_jax_cases.py", "slow", 1480)

"""Offload in JAX: what is compiled is what the plan says, and keeps what it should."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal, jaxprs_in_params

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import step_uses
from diptych.plans.recompute import recompute_blocks
from jax_impl.offload import OffloadedStep, layer_numbers, moves_of
from jax_impl.recompute import layer_scope, residual_report, varying_leaves
from jax_impl.transformer import GPTModel
from tests.offload.jax_support import (
    DROPPED,
    MIXED,
    MODES,
    MOVED,
    PLAIN,
    STREAMS,
    assert_same_gradients,
    offloaded,
    step_arguments,
    trainer_of,
)
from tests.offload.jobs import activation_events

pytestmark = pytest.mark.usefixtures("quick")

# What moves.


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["none", "full, blocks of 2", pytest.param("layernorm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ahead", "size"), [(0, None), (1, 1), (2, None), (9, 1)])
def test_the_program_moves_what_the_plan_says(mode, ahead, size):
    trainer = trainer_of(offloaded(replace(PLAIN, **MODES[mode]), ahead), global_batch_size=3, micro_batch_size=size)
    trainer.offload.trace = trace = []
    arguments = step_arguments(trainer)
    program, results = jax.make_jaxpr(trainer._update_step, return_shape=True)(*arguments)
    steps = trainer.offload.plan.moves
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
    activation_moves = [move for move in moves if move.event in ("+None", "-None")]
    stats = trainer.offload_statistics
    trainer.offload.steps_run = 1
    out, back = (sum(move.arrays for move in activation_moves if move.event == event) for event in ("-None", "+None"))
    assert out == back == trainer.offload._moved.times(count).arrays
    assert (out > 0) == bool(expected)
    plan = trainer.offload.plan
    stats = trainer.offload_statistics
    assert stats["bytes_in"] - plan.bytes_in == stats["bytes_out"] - plan.bytes_out > 0 or not expected
    if size is None and expected:  # a copy back waits for what was computed before its use, and for no more
        waits = [move.waits_for for move in activation_moves if move.event == "+None"]
        assert waits[0] > max(move.waits_for for move in activation_moves if move.event == "-None")
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


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("none", "fc1"),
        ("layernorm", "fc1"),
        ("all modules", "residual_streams"),
        *(pytest.param(mode, name, marks=pytest.mark.slow) for mode in MODES for name in ("q", "h_res", "core_attn")),
    ],
)
def test_values_of_a_name_move(mode, name):
    """Of two of four layers; the last two stay. Gradients are those without offload."""
    config = replace(PLAIN, **STREAMS, **MODES[mode])
    plain = trainer_of(config)
    batch = plain.corpus.batch(0, 2, config.seq_length)
    saved = residual_report(partial(plain._loss, batch=batch), plain._params).get(name)
    moved = trainer_of(replace(config, **MOVED, activation_offload_layers=f"0-3:{name}"))
    jax.make_jaxpr(moved._update_step)(*step_arguments(moved))
    whole = "full" in mode or saved is None  # whole layers do not move
    assert moved.offload._moved.bytes == (0 if whole else saved.bytes // 2)
    assert_same_gradients(moved, plain)


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
    for step in moved.offload.plan.moves[:3]:
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


# What is refused.


class TheirModel(nnx.Module):
    """A model of somebody else, which names its layers otherwise and runs them itself."""

    def __init__(self, path: tuple[str, ...], count: int) -> None:
        layers = nnx.Dict({str(k): nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(count)})
        for name in reversed(path[1:]):
            layers = nnx.Dict({name: layers})
        setattr(self, path[0], layers)

    def __call__(self, x):
        for layer in self.decoder.layers.values():
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("moved", [{"enable_tensor_offload": True}, MOVED])
@pytest.mark.parametrize(("path", "count"), [(("layers",), 4), (("decoder", "layers"), 3)])
def test_a_model_whose_layers_are_not_found_is_refused(path, count, moved):
    """It would run, and nothing of it would be offloaded."""
    params = nnx.split(TheirModel(path, count), nnx.Param)[1]
    message = (
        r"params: expected layers 0 to 3 at decoder\.layers\.<number>, as GPTModel has them, got layers \[.*\] there"
    )
    with pytest.raises(ValueError, match=message):
        OffloadedStep(replace(PLAIN, num_layers=4, **moved), params)
    OffloadedStep(replace(PLAIN, num_layers=4), params)


@pytest.mark.parametrize("moved", [{"enable_tensor_offload": True}, MOVED])
@pytest.mark.parametrize("reads", [False, True])
def test_a_model_that_runs_its_layers_itself_is_refused(reads, moved):
    structure, params = nnx.split(TheirModel(("decoder", "layers"), 4), nnx.Param)
    step = OffloadedStep(replace(PLAIN, num_layers=4, **moved), params)
    params, x = step.place(params), jax.numpy.ones((2, 4))

    def loss(params, x):
        return nnx.merge(structure, params)(x) if reads else x.sum()

    with pytest.raises(ValueError, match=r"loss_fn: expected a model that runs .* by .*run_offloaded, .* got one"):
        step.value_and_grad(loss, params, step.begin(params), x)


def test_saved_values_belong_to_the_last_layer_that_reads_them():
    """Also those inside of jitted functions; a layer's input is its own, not that of the layer before it."""

    @jax.jit
    def layer(weight, x):
        return x + jnp.sin(jnp.cos(x @ weight))

    def run(weight, x):
        for number in range(3):
            with layer_scope(number):
                x = layer(weight, x)
        return (x**3).sum()

    def leaves(weight, x):
        return jax.tree.leaves(jax.vjp(run, weight, x)[1])

    arguments = jnp.ones((4, 4)), jnp.ones((2, 4))
    found = [leaf.layer for leaf in varying_leaves(leaves, arguments, (False, True))]
    # The input of each layer and two factors of its derivative; and a factor of the cube's.
    assert Counter(found) == {0: 3, 1: 3, 2: 3, None: 1}


@pytest.mark.parametrize("offload", ["enable_tensor_offload", "enable_activation_offload"])
def test_gradients_outside_of_jit(offload):
    """Pull-backs of eager calls have other leaves than traced ones, which once gave wrong gradients of delta rules."""
    config = TransformerConfig(
        hidden_size=8,
        num_layers=1,
        num_attention_heads=2,
        layer_pattern="gdn",
        vocab_size=11,
        seq_length=6,
        params_dtype="float64",
        activation_offload_min_bytes=0,
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 6)))

    def gradients(config):
        found = nnx.grad(lambda model: model(tokens, tokens))(GPTModel(config))
        return jax.tree.leaves(found)

    for expected, found in zip(gradients(config), gradients(replace(config, **{offload: True})), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)

"""Microbatches that follow one another over ranks, in JAX.

tests/context/test_wavefront.py runs this file in a process with eight devices.
"""

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diptych.plans.amax_history import BIAS, SHAPE
from diptych.plans.context.exchange import exchange_options
from diptych.plans.mesh import unsharded as unsharded_config
from diptych.plans.model.implementation import callback_threads
from diptych.plans.model.parameters import mlp_specs
from jax_impl.carry import carried_through, relay
from jax_impl.context_parallel import build_cp_context, cp_attention, cp_short_convolution, over_microbatches
from jax_impl.modules import Linear
from jax_impl.pipeline import make_pipeline_step
from jax_impl.saving import export_parameters
from jax_impl.transformer import GPTModel
from parity.compare import relative_difference
from tests.context.jobs import OFFSETS, TOKENS, Case, arrays_of, cotangents_of, exchange_of, held, run_rule, unsharded
from tests.context.layer_jobs import (
    MODEL,
    PIPELINED_LAYERS,
    PIPELINED_MODELS,
    layer_arrays,
    layer_unsharded,
    model_batch,
    model_offsets,
    model_unsharded,
)

os.environ["NPROC"] = str(callback_threads(8))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

from tests.context.jax_cases import LONGEST, RULES_OF_JAX, by_rank, padded, together  # noqa: E402 (devices first)

TOLERANCE = 1e-12
SHARES = np.array([1.0, -0.5, 0.25])
"""Of three microbatches in the loss; number n has n + 1 times the values and initial states, and so the outputs."""


def ranks(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("cp",))


@pytest.mark.parametrize(
    ("size", "impl"),
    [
        (3, "reference"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "reference"), (8, "reference"), (3, "triton"))),
    ],
)
def test_ranks_compute_every_microbatch_as_one_process_does(size, impl):
    like = Case("gate" if size == 8 else "gdn", (0, TOKENS), "pipelined", size == 8, impl=impl)
    whole, states = ("A_log", "dt_bias"), P("cp")
    divisions = [[*OFFSETS.values()][1]] if impl == "triton" else [*OFFSETS.values()]

    def loss(arrays, offsets, d_o, d_finals):
        by = {name: P() if name in whole else states if name == "initial_state" else P(None, "cp") for name in arrays}
        out = P(None, None, "cp"), P(None, "cp")

        @partial(jax.shard_map, mesh=ranks(size), in_specs=(by, P()), out_specs=out)
        def run(arrays, offsets):
            context = build_cp_context(offsets, "cp", **exchange_of(like))

            def one(number):
                own = arrays | {"initial_state": arrays["initial_state"][0] * (number + 1)}
                own["v"] = own["v"] * (number + 1)
                return run_rule(like, own, RULES_OF_JAX, cp_context=context)

            o, finals = over_microbatches(one, len(SHARES), "cp")
            return o, finals[:, None]

        o, finals = run(arrays, offsets)
        each = (o * d_o).sum((1, 2, 3, 4)) + (finals * d_finals).sum((1, 2, 3, 4, 5))
        return (each * SHARES).sum(), (o, finals)

    run, count = jax.jit(jax.grad(loss, has_aux=True)), max(map(len, divisions))
    for offsets in divisions:
        case = like._replace(offsets=tuple(offsets), impl="reference")
        o, finals, gradients = unsharded(case)
        d_o, d_finals = cotangents_of(case)
        arrays = arrays_of(case)
        arrays["initial_state"] = by_rank(arrays["initial_state"], case, size, count)
        found, (ours, states) = run(arrays, padded(case.offsets, count), d_o, by_rank(d_finals, case, size, count))
        there = held(case, size)
        for number in range(len(SHARES)):
            assert relative_difference(np.asarray(ours[number]), o * (number + 1)) <= TOLERANCE
            own = together(np.asarray(states[number]), case, size)[there]
            assert relative_difference(own, finals[there] * (number + 1)) <= TOLERANCE
        share = SHARES @ (1 + np.arange(len(SHARES)))
        for name, gradient in gradients.items():
            other = np.asarray(found[name])
            if name == "initial_state":
                other, gradient = together(other, case, size)[there], gradient[there]
            assert relative_difference(other, gradient * share) <= TOLERANCE, name


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel_size", [None, 1, 4, 30])
def test_convolutions_and_attention_see_the_ranks_before(size, kernel_size):
    def loss(arrays, cotangent, offsets):
        by = tuple(P() if x.ndim == 2 else P(None, "cp") for x in arrays)

        @partial(jax.shard_map, mesh=ranks(size), in_specs=(by, P()), out_specs=P(None, None, "cp"))
        def run(arrays, offsets):
            context = build_cp_context(offsets, "cp", kernel_size, cp_exchange="pipelined")
            layer = cp_attention if kernel_size is None else cp_short_convolution
            return over_microbatches(lambda _: layer(*arrays, context), 2, "cp")

        first, second = run(arrays, offsets)
        return (second * cotangent).sum(), first

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    for layer in PIPELINED_LAYERS:
        if layer.kernel_size == kernel_size:
            cotangent, *arrays = layer_arrays(layer)
            found, output = gradient(tuple(arrays), cotangent, padded(layer.offsets, LONGEST))
            for ours, theirs in zip((output, *found), layer_unsharded(layer), strict=True):
                assert relative_difference(np.asarray(ours), theirs) <= TOLERANCE, layer


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, 4 if "hybrid" in name else 3, marks=() if "hybrid" in name else pytest.mark.slow)
        for name in PIPELINED_MODELS
    ],
)
def test_a_hybrid_model_over_ranks(name, size):
    """With documents, dropout and recomputation."""
    graph, params = nnx.split(GPTModel(PIPELINED_MODELS[name]), nnx.Param)
    by = (P(), P(None, "cp"), P(None, "cp"), P(None, "cp"), P("cp"), P())

    @partial(jax.shard_map, mesh=ranks(size), in_specs=by, out_specs=P())
    def loss(params, tokens, targets, samples, positions, offsets):
        how = exchange_options(PIPELINED_MODELS[name])
        context = build_cp_context(offsets, "cp", MODEL.linear_conv_kernel_dim, **how)
        arguments = {"step": 3, "samples": samples, "positions": positions, "cp_context": context}

        def one(number):
            return nnx.merge(graph, params)(tokens, (targets + 1 - number) % 32, **arguments)

        return jax.lax.pmean(over_microbatches(one, 2, "cp")[1], "cp")

    place = np.arange(48)
    tokens, targets = (x.reshape(1, -1) for x in model_batch())
    batch = tokens, targets, (place // 24)[None], place % 24, model_offsets()
    value, found = jax.jit(jax.value_and_grad(loss))(params, *batch)
    expected, gradients = model_unsharded(name)
    assert float(value) == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in export_parameters(found).items():
        assert relative_difference(gradient, gradients[parameter]) <= 1e-11, parameter


@pytest.mark.slow
def test_a_step_that_keeps_its_inputs_alone_has_the_same_gradients():
    config = replace(MODEL, context_parallel_size=3, cp_exchange="pipelined")
    model = GPTModel(unsharded_config(config))
    tokens, targets = np.random.default_rng(5).integers(0, 32, (2, 4, 2, 24)).astype(np.int32)
    found = []
    for saves in ("residuals", "inputs"):
        step = make_pipeline_step(model, config, transform="shard_map", saves=saves)
        staged = step.stage_parameters(nnx.split(model, nnx.Param)[1])
        loss, gradients = step(staged, tokens, targets, 3)
        found.append((float(loss), export_parameters(step.join_parameters(gradients))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-13)
    for name, gradient in found[0][1].items():
        assert relative_difference(found[1][1][name], gradient) <= TOLERANCE, name


@pytest.mark.parametrize("recompute", [False, True])
def test_a_slot_without_a_microbatch_is_not_observed(recompute):
    """Ranks after the first begin with such slots, whose messages are 0, and here have inputs 1000 times as large."""
    config = replace(MODEL, params_dtype="float32", fp8="hybrid", fp8_recipe="delayed")
    linear = Linear(config, "decoder.layers.0.mlp.linear_fc1", mlp_specs(config, 0)["linear_fc1"])
    graph, params = nnx.split(linear, nnx.Param)

    @partial(jax.shard_map, mesh=ranks(3), in_specs=P(), out_specs=P())
    def loss(params):
        def layer(number):
            is_after = jax.lax.axis_index("cp") > 0
            ones = jnp.ones((1, 1, MODEL.hidden_size), jnp.float32)
            x = relay((), jnp.float32, lambda received: (1 + 0 * received, jnp.where(received < is_after, 1e3, ones)))
            return nnx.merge(graph, params)(x + 0 * number)[0].sum()

        one = carried_through(layer, jax.checkpoint) if recompute else layer
        return jax.lax.pmean(over_microbatches(one, 2, "cp").sum(), "cp")

    observed = np.asarray(jax.jit(jax.grad(loss))(params)["amax_history"][...]).reshape(SHAPE[0], -1)
    assert np.flatnonzero(observed[0]).tolist() == [BIAS]
    np.testing.assert_array_equal(observed.sum(1), 3 * 2)  # of three ranks and two microbatches


def test_states_may_travel_in_bfloat16():
    case = Case("kda", (0, 48), "pipelined", states=False)
    arrays, (d_o, _) = arrays_of(case), cotangents_of(case)

    @partial(jax.shard_map, mesh=ranks(3), in_specs=P(None, "cp"), out_specs=P(None, None, "cp"))
    def run(arrays):
        offsets = np.array(case.offsets, np.int32)
        context = build_cp_context(offsets, "cp", cp_exchange="pipelined", cp_wire_dtype="bfloat16")
        return over_microbatches(lambda _: run_rule(case, arrays, RULES_OF_JAX, cp_context=context)[0], 1, "cp")

    found, pull_back = jax.vjp(jax.jit(run), arrays)
    o, _, gradients = unsharded(case)
    assert 1e-5 < relative_difference(np.asarray(found[0]), o) < 2**-8
    for name, gradient in pull_back(jnp.asarray(d_o)[None])[0].items():
        assert 1e-5 < relative_difference(np.asarray(gradient), gradients[name]) < 2**-6, name


def test_a_layer_whose_state_nobody_hands_on_is_refused():
    case = Case("kda", (0, 48), "pipelined", states=False)

    def run(arrays):
        context = build_cp_context(np.array([0, 48], np.int32), "cp", cp_exchange="pipelined")
        return run_rule(case, arrays, RULES_OF_JAX, cp_context=context)[0]

    by = P(None, "cp")
    with pytest.raises(ValueError, match=r"cp_exchange: expected another than 'pipelined' outside of .*over_microbatc"):
        jax.eval_shape(jax.shard_map(run, mesh=ranks(3), in_specs=by, out_specs=by), arrays_of(case))

"""Context parallelism in JAX; tests/context/test_context_parallel.py runs this file in a process with eight devices."""

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diptych.plans.context.exchange import EXCHANGES, exchange_options
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.implementation import callback_threads
from jax_impl.context_parallel import build_cp_context, compress_h0, cp_attention, cp_short_convolution, expand_h0
from jax_impl.context_parallel.exchange import permute, static_context
from jax_impl.delta_rule import chunk_gated_delta_rule, chunk_kda, chunked
from jax_impl.saving import export_parameters
from jax_impl.transformer import GPTModel
from parity.compare import relative_difference
from tests.context.approximate_jobs import APPROXIMATIONS, approximated
from tests.context.jobs import (
    OFFSETS,
    TOKENS,
    Case,
    arrays_of,
    cotangents_of,
    exchange_of,
    held,
    own_slices,
    run_rule,
    unsharded,
)
from tests.context.layer_jobs import (
    LAYERS,
    MODEL,
    MODELS,
    layer_arrays,
    layer_unsharded,
    model_batch,
    model_offsets,
    model_unsharded,
)

os.environ["NPROC"] = str(callback_threads(8))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
TOLERANCE = 1e-12
RULES_OF_JAX = chunk_kda, chunk_gated_delta_rule
LONGEST = max(map(len, OFFSETS.values()))


def padded(offsets: tuple[int, ...], count: int = LONGEST) -> np.ndarray:
    """As many for every case, so that one program serves all: the last sequences are empty."""
    return np.array([*offsets, *[TOKENS] * (count - len(offsets))], np.int32)


@cache
def program(case: Case, size: int):
    """Outputs, final states by rank, and gradients, of any division."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("cp",))
    whole = ("A_log", "dt_bias")

    def loss(arrays, offsets, d_o, d_finals):
        by = {name: P() if name in whole else P("cp") if name == "initial_state" else P(None, "cp") for name in arrays}

        @partial(jax.shard_map, mesh=mesh, in_specs=(by, P()), out_specs=(P(None, "cp"), P("cp")))
        def run(arrays, offsets):
            context = build_cp_context(offsets, "cp", **exchange_of(case))
            arrays = arrays | {"initial_state": arrays["initial_state"][0]}
            o, finals = run_rule(case, arrays, RULES_OF_JAX, cp_context=context)
            return o, finals[None]

        o, finals = run(arrays, offsets)
        return (o * d_o).sum() + (finals * d_finals).sum(), (o, finals)

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_c8_states_may_travel_in_bfloat16(exchange):
    case = Case("kda", (0, 48), exchange, states=False)
    size, by = 3, P(None, "cp")
    arrays, (d_o, _) = arrays_of(case), cotangents_of(case)

    @partial(jax.shard_map, mesh=Mesh(np.array(jax.devices()[:size]), ("cp",)), in_specs=by, out_specs=by)
    def run(arrays):
        offsets = np.array(case.offsets, np.int32)
        context = build_cp_context(offsets, "cp", cp_exchange=exchange, cp_wire_dtype="bfloat16")
        return run_rule(case, arrays, RULES_OF_JAX, cp_context=context)[0]

    found, pull_back = jax.vjp(jax.jit(run), arrays)
    o, _, gradients = unsharded(case)
    assert 1e-5 < relative_difference(np.asarray(found), o) < 2**-8
    for name, gradient in pull_back(jnp.asarray(d_o))[0].items():
        assert 1e-5 < relative_difference(np.asarray(gradient), gradients[name]) < 2**-6, name


@pytest.mark.parametrize("distance", [1, 2, -1])
def test_c4_what_is_gathered_by_groups_is_what_a_permutation_brings(distance):
    size = 4
    pairs = [(rank, rank + distance) for rank in range(size) if 0 <= rank + distance < size]

    @partial(jax.shard_map, mesh=Mesh(np.array(jax.devices()[:size]), ("cp",)), in_specs=P("cp"), out_specs=P("cp"))
    def run(x):
        static = static_context(build_cp_context(np.array([0, size], np.int32), "cp"))
        return jnp.stack([permute(x, static._replace(by_groups=by), pairs) for by in (False, True)], axis=-1)

    found = np.asarray(jax.jit(run)(jnp.arange(1.0, size + 1)))
    expected = [rank - distance + 1 if 0 <= rank - distance < size else 0 for rank in range(size)]
    np.testing.assert_array_equal(found, np.transpose([expected, expected]))


INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*)$")


def independent_products(program: str) -> list[int]:
    """Of every all-gather of a compiled program: matrix products that neither it nor they wait for.

    Those of loops and fusions count where they are called.
    """
    computations, current = {}, {}
    for line in program.splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            current = computations.setdefault("ENTRY" if line.startswith("ENTRY") else name, {})
        elif match := INSTRUCTION.match(line):
            name, operation, rest = match.groups()
            current[name] = operation, re.findall(r"%?([\w.-]+)", rest), "dot" in operation or "matmul" in rest

    def holds_product(called: list[str]) -> bool:
        return any(
            product or holds_product(operands)
            for name in called
            for _, operands, product in computations.get(name, {}).values()
        )

    entry = computations["ENTRY"]
    needs = {name: {x for x in operands if x in entry} for name, (_, operands, _) in entry.items()}
    products = {name for name, (_, operands, product) in entry.items() if product or holds_product(operands)}

    def reached(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            for other in needs[left.pop()] - found:
                found.add(other)
                left.append(other)
        return found

    before = {name: reached(name) for name in entry}
    gathers = [name for name, (operation, _, _) in entry.items() if operation.startswith("all-gather")]
    return [sum(name not in before[gather] and gather not in before[name] for name in products) for gather in gathers]


@pytest.mark.usefixtures("compiled_well")
@pytest.mark.parametrize("disable_recompute", [False, True])
def test_c5_products_need_not_wait_for_states(disable_recompute, monkeypatch):
    """In the compiled program: forward outputs, and backward what was not kept, wait for no other rank."""
    monkeypatch.setattr(chunked, "SEGMENT_SIZE", 4)  # three in a part
    case = Case("gdn", (0, 48), "all_gather", disable_recompute, states=False)
    size, by = 4, P(None, "cp")

    @partial(jax.shard_map, mesh=Mesh(np.array(jax.devices()[:size]), ("cp",)), in_specs=by, out_specs=by)
    def run(arrays):
        context = build_cp_context(np.array(case.offsets, np.int32), "cp")
        return run_rule(case, arrays, RULES_OF_JAX, cp_context=context)[0]

    def both(arrays, cotangent):
        o, pull_back = jax.vjp(run, arrays)
        return o, pull_back(cotangent)

    arrays = arrays_of(case)
    (forward,) = independent_products(jax.jit(run).lower(arrays).compile().as_text())
    found = independent_products(jax.jit(both).lower(arrays, arrays["v"]).compile().as_text())
    assert forward >= 2, "queries with states, and with errors"
    assert len(found) == 2
    assert min(found) >= (1 if disable_recompute else 3)


def by_rank(states: np.ndarray, case: Case, size: int, count: int) -> np.ndarray:
    """[N, ...] as every rank's own, from its first, filled up with 0: [size, count - 1, ...]."""
    found = np.zeros((size, count - 1, *states.shape[1:]))
    for rank in range(size):
        own = states[own_slices(case, rank, size)[1]]
        found[rank, : len(own)] = own
    return found


def together(states: np.ndarray, case: Case, size: int) -> np.ndarray:
    """The inverse, of states that are 0 on all ranks but one."""
    found = np.zeros((len(case.offsets) - 1, *states.shape[2:]))
    for rank in range(size):
        own = own_slices(case, rank, size)[1]
        found[own] += states[rank, : own.stop - own.start]
    return found


RULES = ("kda", "gdn", "gate")
DAILY = (("all_gather", 2), ("ring", 3), ("scan", 4))
DAILY_WAYS = ("the nearest two", "rank 3")
"""What make test takes: each rule, each exchange, each way of keeping."""


@pytest.mark.parametrize(
    ("exchange", "size"),
    [
        pytest.param(exchange, size, marks=() if (exchange, size) in DAILY else pytest.mark.slow)
        for exchange in EXCHANGES
        for size in (1, 2, 3, 4, 8)
    ],
)
def test_c2_c3_c4_ranks_compute_what_pytorch_does_alone(size, exchange):
    rule = RULES[(size + EXCHANGES.index(exchange)) % 3]
    assert_ranks_equal(Case(rule, (0, TOKENS), exchange, disable_recompute=size == 3), size, [*OFFSETS.values()])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in DAILY_WAYS else pytest.mark.slow) for way in APPROXIMATIONS]
)
def test_c8_ranks_compute_what_one_process_hands_on(way):
    case = Case(RULES[len(way) % 3], (0, TOKENS), **APPROXIMATIONS[way])
    assert_ranks_equal(case, 4, [*OFFSETS.values()], approximated)


@pytest.mark.parametrize(
    ("rule", "exchange"), [("gdn", "scan"), *(pytest.param("gate", x, marks=pytest.mark.slow) for x in EXCHANGES)]
)
def test_c2_c3_kernels_over_ranks_are_the_reference_on_one(rule, exchange):
    case = Case(rule, (0, TOKENS), exchange, exchange == "ring", impl="triton")
    assert_ranks_equal(case, 3, [OFFSETS["at the ends of parts"]])


def assert_ranks_equal(like: Case, size: int, divisions: list, wanted: Callable | None = None) -> None:
    """A case, divided otherwise, is what one process computes, or what is wanted of a case and its ranks."""
    run, count = program(like, size), max(map(len, divisions))
    for offsets in divisions:
        case = like._replace(offsets=tuple(offsets), impl="reference")
        o, finals, gradients = unsharded(case) if wanted is None else wanted(case, size)
        d_o, d_finals = cotangents_of(case)
        arrays = arrays_of(case)
        arrays["initial_state"] = by_rank(arrays["initial_state"], case, size, count)
        found, (ours, states) = run(arrays, padded(case.offsets, count), d_o, by_rank(d_finals, case, size, count))
        assert relative_difference(np.asarray(ours), o) <= TOLERANCE
        there = held(case, size)
        assert relative_difference(together(np.asarray(states), case, size)[there], finals[there]) <= TOLERANCE
        for name, gradient in gradients.items():
            other = np.asarray(found[name])
            if name == "initial_state":
                other, gradient = together(other, case, size)[there], gradient[there]
            assert relative_difference(other, gradient) <= TOLERANCE, name


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4, 8))])
@pytest.mark.parametrize("kernel_size", [None, 1, 4, 9, 30])
def test_c6_c10_convolutions_and_attention_see_the_ranks_before(size, kernel_size):
    mesh = Mesh(np.array(jax.devices()[:size]), ("cp",))

    def loss(arrays, cotangent, offsets):
        by = tuple(P() if x.ndim == 2 else P(None, "cp") for x in arrays)

        @partial(jax.shard_map, mesh=mesh, in_specs=(by, P()), out_specs=P(None, "cp"))
        def run(arrays, offsets):
            context = build_cp_context(offsets, "cp", kernel_size)
            return (cp_attention if kernel_size is None else cp_short_convolution)(*arrays, context)

        output = run(arrays, offsets)
        return (output * cotangent).sum(), output

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    for layer in LAYERS:
        if layer.kernel_size == kernel_size:
            cotangent, *arrays = layer_arrays(layer)
            found, output = gradient(tuple(arrays), cotangent, padded(layer.offsets))
            for ours, theirs in zip((output, *found), layer_unsharded(layer), strict=True):
                assert relative_difference(np.asarray(ours), theirs) <= TOLERANCE, layer


@pytest.mark.parametrize(
    ("name", "size"), [("hybrid", 4), *(pytest.param(name, 3, marks=pytest.mark.slow) for name in MODELS)]
)
def test_c11_c12_a_hybrid_model_over_ranks(name, size):
    """With documents, dropout and recomputation; gradients of parameters, which all ranks hold, are sums."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("cp",))
    graph, params = nnx.split(GPTModel(MODELS[name]), nnx.Param)
    by = (P(), P(None, "cp"), P(None, "cp"), P(None, "cp"), P("cp"), P())

    @partial(jax.shard_map, mesh=mesh, in_specs=by, out_specs=P())
    def loss(params, tokens, targets, samples, positions, offsets):
        context = build_cp_context(offsets, "cp", MODEL.linear_conv_kernel_dim, **exchange_options(MODELS[name]))
        arguments = {"step": 3, "samples": samples, "positions": positions, "cp_context": context}
        return jax.lax.pmean(nnx.merge(graph, params)(tokens, targets, **arguments), "cp")

    place = np.arange(48)
    tokens, targets = (x.reshape(1, -1) for x in model_batch())
    batch = tokens, targets, (place // 24)[None], place % 24, model_offsets()
    value, found = jax.jit(jax.value_and_grad(loss))(params, *batch)
    expected, gradients = model_unsharded(name)
    assert float(value) == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in export_parameters(found).items():
        assert relative_difference(gradient, gradients[parameter]) <= 1e-11, parameter


def test_c7_of_the_first_states_one_is_kept():
    nothing = dict.fromkeys(field.name for field in fields(FLACPContext))
    context = FLACPContext(**nothing | {"cu_seqlens": jnp.arange(4)})
    states = jnp.zeros((3, 2, 4, 5)).at[0].set(1.0)
    assert compress_h0(states, context).shape == (1, 2, 4, 5)
    assert jnp.array_equal(expand_h0(compress_h0(states, context), context), states)


def test_c9_bad_sequences_are_refused_before_anything_is_sent():
    mesh = Mesh(np.array(jax.devices()[:4]), ("cp",))

    def build(offsets, **options):
        def run(x):
            build_cp_context(np.array(offsets, np.int32), "cp", **options)
            return x

        return jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")), jnp.zeros(4))

    with pytest.raises(ValueError, match="cu_seqlens: expected to end at a multiple of the number of ranks, 4, got 10"):
        build([0, 10])
    with pytest.raises(ValueError, match="conv1d_kernel_size: expected an integer of at least 1, or None, got 0"):
        build([0, 8], conv1d_kernel_size=0)
    with pytest.raises(ValueError, match="group: expected an axis of the shard_map or pmap around, got 'ranks'"):
        build_cp_context(np.array([0, 8], np.int32), "ranks")


def test_c9_what_is_not_the_rank_s_part_is_refused():
    def call(function, *shapes, cu_seqlens=None):
        def run(*arrays):
            context = build_cp_context(np.array([0, 8], np.int32), "cp", 4)
            options = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            if function is chunk_gated_delta_rule:
                return function(*arrays, cp_context=context, **options)[0]
            return inspect.unwrap(function)(*arrays, context)

        specs = tuple(P() for _ in shapes)
        mapped = jax.shard_map(run, mesh=Mesh(np.array(jax.devices()[:4]), ("cp",)), in_specs=specs, out_specs=P("cp"))
        return jax.eval_shape(mapped, *(jnp.zeros(shape) for shape in shapes))

    heads, scalars = (1, 2, 1, 3), (1, 2, 1)
    with pytest.raises(ValueError, match="q: expected T = 2, this rank's part of 8 tokens over 4 ranks, got 7"):
        call(chunk_gated_delta_rule, *[(1, 7, 1, 3)] * 3, (1, 7, 1), (1, 7, 1))
    with pytest.raises(ValueError, match=r"cu_seqlens: expected None or cp_context.cu_seqlens, got another array"):
        call(chunk_gated_delta_rule, *[heads] * 3, scalars, scalars, cu_seqlens=np.array([0, 8], np.int32))
    with pytest.raises(ValueError, match=r"x: expected T = 2, .* got 3"):
        call(cp_short_convolution, (1, 3, 5), (5, 4))
    with pytest.raises(ValueError, match="weight: expected 4 taps, the context's conv1d_kernel_size, got 3"):
        call(cp_short_convolution, (1, 2, 5), (5, 3))
    with pytest.raises(ValueError, match=r"k: expected T = 2, .* got 1"):
        call(cp_attention, heads, (1, 1, 1, 3), heads)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_c2_a_token_a_rank(rule):
    """Chunks of one token, whose system is 1."""
    arrays = {name: x[:, :4] for name, x in arrays_of(Case(rule, (0, 4), "ring", states=False)).items()}
    names, by = [*arrays], P(None, "cp")

    @partial(jax.shard_map, mesh=Mesh(np.array(jax.devices()[:4]), ("cp",)), in_specs=by, out_specs=by)
    def run(arrays):
        context = build_cp_context(np.array([0, 4], np.int32), "cp")
        return run_rule(Case(rule, (0, 4), "ring", states=False), arrays, RULES_OF_JAX, cp_context=context)[0]

    o, pull_back = jax.vjp(jax.jit(run), arrays)
    leaves = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in arrays.items()}
    expected, _ = run_rule(Case(rule, (0, 4), "", states=False), leaves)
    gradients = torch.autograd.grad(expected.sum(), list(leaves.values()))
    assert relative_difference(np.asarray(o), expected.detach().numpy()) <= TOLERANCE
    (found,) = pull_back(jnp.ones_like(o))
    for name, gradient in zip(names, gradients, strict=True):
        assert relative_difference(np.asarray(found[name]), gradient.numpy()) <= TOLERANCE, name

"""Zigzag attention in JAX; tests/context/test_zigzag.py runs this file in a process with eight devices."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_impl.context_parallel import build_cp_context, cp_attention
from tests.context.test_zigzag import NARROW, assert_equal
from tests.context.zigzag_jobs import GROUPS, HEADS, WIDTH, Case, arrays_of, cases_of

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)


@cache
def program(size: int, layout: str = "zigzag", by_groups: bool = False):
    """Outputs and gradients of q, k and v, of any sequences."""
    mesh, by = Mesh(np.array(jax.devices()[:size]), ("cp",)), P(None, "cp")

    def loss(arrays, cotangent, offsets):
        @partial(jax.shard_map, mesh=mesh, in_specs=(by, P()), out_specs=by)
        def run(arrays, offsets):
            context = build_cp_context(offsets, "cp", cp_attention_layout=layout)
            return cp_attention(*arrays, replace(context, by_groups=by_groups))

        output = run(arrays, offsets)
        return (output * cotangent).sum(), output

    return jax.jit(jax.grad(loss, has_aux=True))


def found_of(case: Case, size: int, by_groups: bool = False) -> list[np.ndarray]:
    """Of all ranks together; offsets as long for every case of so many tokens."""
    offsets = np.array([*case.offsets, *[case.tokens] * (case.tokens + 4 - len(case.offsets))], np.int32)
    cotangent, *arrays = [x.astype(jax.dtypes.canonicalize_dtype(case.dtype)) for x in arrays_of(case)]
    gradients, output = program(size, case.layout, by_groups)(tuple(arrays), cotangent, offsets)
    return [np.asarray(x, np.float64) for x in (output, *gradients)]


@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 8))])
def test_ranks_compute_what_pytorch_does_alone(size, by_groups):
    for case in cases_of(size):
        if not by_groups or case.tokens == 5 * size:
            assert_equal(case, [found_of(case, size, by_groups)])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bfloat16_is_as_near_as_the_contiguous_layout(layout):
    case = Case((0, 33, 48), dtype="bfloat16", layout=layout)
    assert_equal(Case(case.offsets), [found_of(case, 3)], NARROW)


def products(program, times: int = 1) -> list[tuple[int, int]]:
    """How often a jaxpr runs each product, and the size of its result."""
    found = []
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            found.append((times, int(np.prod(equation.outvars[0].aval.shape))))
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in jaxprs_in_params(equation.params):
            found += products(inner, inside)
    return found


def test_scores_are_those_of_as_many_blocks_on_every_rank():
    """2 R + 1 of half by half, forward, and with what backward computes again; no branch, no loop of unknown length."""
    size, part = 3, 10
    case = Case((0, size * part))
    arguments = tuple(arrays_of(case)[1:]), arrays_of(case)[0], np.array(case.offsets, np.int32)
    jaxpr = jax.make_jaxpr(program(size))(*arguments).jaxpr
    block, others = HEADS * (part // 2) ** 2, [heads * (part // 2) * WIDTH for heads in (HEADS, GROUPS)]
    assert block not in others
    scores = [times for times, result in products(jaxpr) if result == block]
    assert scores == [2 * size + 1] * 3  # forward, again in backward, and the gradients of weights
    assert not [e for e in equations(jaxpr) if e.primitive.name == "cond"]


def equations(program) -> list:
    """Of a jaxpr and all within."""
    found = [*program.eqns]
    for equation in program.eqns:
        for inner in jaxprs_in_params(equation.params):
            found += equations(inner)
    return found

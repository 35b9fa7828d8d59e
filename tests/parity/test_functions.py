"""Functions of a user in both frameworks: what is equal, what differs, and what is refused by name."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx

from parity import DifferenceError, compare_functions
from parity.implementations import JaxImplementation, Values, make_inputs
from parity.rounding import DIFFERENT, EQUAL, ROUNDING
from tests.parity.generated_programs import draw

X = np.random.default_rng(0).standard_normal((4, 6, 8))
EXACT = {"dtypes": ["float64"]}


class Pair(NamedTuple):
    first: object
    second: object


def torch_rope(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def jax_rope(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def jax_rope_interleaved(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-jnp.arange(half) / half)
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


ROPE = {"inputs": {"x": X, "positions": np.arange(6)}, "static": {"theta": 100.0}}


def test_equal_functions_in_three_dtypes():
    report = compare_functions(torch_rope, jax_rope, **ROPE)
    report.check()
    assert {(row.kind, row.name) for row in report.rows} == {("output", "output"), ("input gradient", "x")}
    assert {row.dtype for row in report.rows} == {"float64", "float32", "bfloat16"}
    assert {row.difference.verdict for row in report.rows} <= {EQUAL, ROUNDING}
    low = {row.dtype: row for row in report.rows if row.kind == "input gradient"}  # outputs are float32
    assert 1e-8 < low["float32"].torch_error < 1e-6 < 1e-4 < low["bfloat16"].jax_error < 1e-1
    assert "equal: all 6 comparisons" in str(report)


def test_a_report_is_plain_text_in_a_notebook(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    assert "\x1b" not in str(compare_functions(torch_rope, jax_rope, **ROPE, dtypes=["float64"]))


WRONG = {
    "rope interleaved": (torch_rope, jax_rope_interleaved, ROPE),
    "gelu variant": (F.gelu, jax.nn.gelu, {"inputs": [X]}),
    "misplaced epsilon": (
        lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
        lambda x: x / (jnp.sqrt((x**2).mean(-1, keepdims=True)) + 1e-6),
        {"inputs": [X]},
    ),
    "a gradient stopped": (
        lambda x: x * torch.sigmoid(x),
        lambda x: x * jax.nn.sigmoid(jax.lax.stop_gradient(x)),
        {"inputs": [X]},
    ),
    "one ulp of float32": (torch.tanh, lambda x: jnp.tanh(x) * (1 + 1e-7), {"inputs": [X]}),
    "one element": (torch.tanh, lambda x: jnp.tanh(x).at[0, 0, 0].add(1e-10), {"inputs": [X]}),
    "integers": (lambda x: (x.argmax(-1), x), lambda x: (jnp.argmin(x, -1), x), {"inputs": [X]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bug_is_found_in_float64(name):
    first, second, call = WRONG[name]
    report = compare_functions(first, second, **call, **EXACT)
    assert not report.is_equal
    with pytest.raises(DifferenceError, match=r"the worst: .* in float64: expected a relative difference of at most"):
        report.check()


def test_only_the_gradient_differs():
    first, second, call = WRONG["a gradient stopped"]
    verdicts = {row.kind: row.difference.verdict for row in compare_functions(first, second, **call, **EXACT).rows}
    assert verdicts == {"output": ROUNDING, "input gradient": DIFFERENT}


def test_accumulation_in_bfloat16_is_found_in_bfloat16():
    long = np.random.default_rng(1).random((2, 4096))

    def in_bfloat16(x):
        return jax.lax.scan(lambda total, column: (total + column, None), jnp.zeros(2, x.dtype), x.T)[0]

    report = compare_functions(lambda x: x.sum(-1), in_bfloat16, [long], gradients=False)
    assert [row.dtype for row in report.different] == ["bfloat16"]
    assert report.different[0].jax_error > 10 * report.different[0].torch_error


def narrow_in_torch(x):
    wide = x.float()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


def narrow_in_jax(x):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def wide_in_jax(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def test_casts_to_float32_inside():
    both = compare_functions(narrow_in_torch, narrow_in_jax, [X])
    both.check()
    assert "Both compute in a narrower dtype inside (PyTorch: float32 at test_functions.py:" in both.notes[0]
    one = compare_functions(narrow_in_torch, wide_in_jax, [X])
    assert {row.dtype for row in one.different} == {"float64"}
    with pytest.raises(DifferenceError, match=r"PyTorch computes in a narrower dtype inside \(float32 at test_func"):
        one.check()
    compare_functions(narrow_in_torch, wide_in_jax, [X], dtypes=["float32"]).check()


def test_masks_in_float32_round_nothing():
    report = compare_functions(
        lambda x: x * (x > 0).to(torch.float32), lambda x: x * (x > 0).astype(jnp.float32), [X], **EXACT
    )
    report.check()
    assert not report.notes


def contained(tree, index):
    first, second = tree["pair"]
    return {"a": (tree["x"][index] ** 2, index + 1), "b": second[0] * first[0, 0]}


def test_containers_complex_numbers_and_integers():
    pair = Pair(X[:, :6, :6], [X[..., 0] + 1j * X[..., 1]])
    inputs = {"tree": {"x": X, "pair": pair}, "index": np.array([2, 0])}
    report = compare_functions(contained, contained, inputs, **EXACT)
    report.check()
    names = [row.name for row in report.rows]
    assert names == ["a.0", "a.1", "b", "tree.x", "tree.pair.first", "tree.pair.second.0"]


def test_modules_linen_and_parameters_as_functions():
    compare_functions(torch.nn.LayerNorm(8), nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0)), [X], **EXACT).check()
    norm = linen.LayerNorm(epsilon=1e-5)
    compare_functions(torch.nn.LayerNorm(8), (norm, norm.init(jax.random.key(0), X)), [X], **EXACT).check()
    compare_functions(
        torch.nn.LayerNorm(8), (lambda p, x: jax.nn.standardize(x, epsilon=1e-5) * p["w"], {"w": jnp.ones(8)}), [X]
    ).check()


def test_compiled_on_either_side():
    compiled = torch.compile(torch.nn.functional.silu, backend="aot_eager")
    compare_functions(compiled, jax.jit(jax.nn.silu), [X], **EXACT).check()


def random_in_torch(x):
    return F.dropout(x, 0.5)


REFUSED = {
    "shapes": (torch.tanh, lambda x: jnp.tanh(x).T, {}, r"output 'output': expected equal shapes, got \(4, 6, 8\)"),
    "names": (
        lambda x: (x, x),
        lambda x: {"first": x, "second": x},
        {},
        "outputs: expected equal names, got 0, 1 in PyTorch and first, second in JAX; return equal structures",
    ),
    "no arrays": (lambda x: "text", jnp.tanh, {}, "PyTorch output 'output': expected an array, got str"),
    "nothing": (lambda x: None, jnp.tanh, {}, "PyTorch outputs: expected at least one array, got none"),
    "random": (random_in_torch, jnp.tanh, {}, "PyTorch: expected equal results of two runs on equal inputs"),
    "arguments": (
        lambda a: a,
        lambda b: b,
        {"inputs": {"a": X}},
        r"JAX function <lambda>: expected to accept inputs a, got: .*pass inputs as a list",
    ),
    "kinds": (torch.tanh, lambda x: x > 0, {}, "output 'output': expected equal kinds of dtype, got float64 and bool"),
    "dtypes": (torch.tanh, jnp.tanh, {"dtypes": ["float8"]}, "dtypes: expected some of float64, float32, bfloat16"),
    "no input": (torch.tanh, jnp.tanh, {"inputs": []}, "inputs: expected at least one array"),
    "linen alone": (torch.tanh, linen.Dense(3), {}, r"expected a linen module with its variables"),
    "no function": (torch.tanh, 3, {}, "expected a function, an nnx.Module"),
    "both": (
        torch.tanh,
        jnp.tanh,
        {"inputs": {"x": X}, "static": {"x": 1}},
        "static: expected names that are not inpu",
    ),
    "wide integers": (
        lambda i: i * 1.0,
        lambda i: i * 1.0,
        {"inputs": [np.array([2**40])], "dtypes": ["float32"]},
        "inputs: expected integers of 32 bits in float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_name(name):
    first, second, call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compare_functions(first, second, **{"inputs": [X], **call})


def test_nan_and_infinity_must_be_at_equal_places():
    x = np.array([0.0, 1.0, 2.0])
    compare_functions(torch.log, jnp.log, [x], gradients=False, **EXACT).check()
    report = compare_functions(torch.log, lambda x: jnp.log(jnp.maximum(x, 1e-30)), [x], gradients=False, **EXACT)
    assert report.different[0].difference.norm == float("inf")


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 1000, marks=pytest.mark.slow)], ids=["daily", "all"]
)
@pytest.mark.timeout(1200)
def test_correct_programs_raise_no_alarm(first, count):
    excess = []
    for seed in range(first, first + count):
        program = draw(seed)
        report = compare_functions(program.torch(), program.jax(), program.inputs(), **EXACT)
        assert report.is_equal, f"{program}: {report.different[0]}"
        excess.append(max(row.difference.excess for row in report.rows))
    assert 0.05 < np.median(excess) < 0.5  # neither blind nor close to an alarm


@pytest.mark.parametrize(
    ("first", "count"), [(0, 12), pytest.param(2000, 200, marks=pytest.mark.slow)], ids=["daily", "all"]
)
@pytest.mark.timeout(1200)
def test_a_hundred_ulps_in_any_operation_are_detected(first, count):
    missed = []
    for seed in range(first, first + count):
        program = draw(seed)
        for wrong in range(len(program.steps)):
            report = compare_functions(program.torch(), program.jax(wrong), program.inputs(), **EXACT)
            if report.is_equal and changes_a_result(program, wrong):
                missed.append((seed, wrong))
    assert not missed


def changes_a_result(program, wrong: int) -> bool:
    """Whether a wrong operation changes any bit: a mask may hide its whole result."""
    call = make_inputs(program.inputs())
    values = Values(call.arrays, {})

    def cotangent(name, output):
        return np.random.default_rng(0).standard_normal(output.shape)

    runs = [JaxImplementation(f, call).run(values, "float64", cotangent) for f in (program.jax(), program.jax(wrong))]
    first, second = ((*run.outputs.values(), *run.input_gradients.values()) for run in runs)
    return not all(map(np.array_equal, first, second))

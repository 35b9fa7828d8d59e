"""Kernels without a GPU: compiled for two of them, lowered through jax-triton, and how they are launched and tuned."""

import json
import math
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import ahead, functions, jax_ops, launch, operations, torch_ops, tuning
from kernels.delta_rule import launches
from kernels.launch import CANDIDATES, Block, Launch
from kernels.operations import Sinkhorn
from plans.delta_rule import chunk_tables
from plans.implementation import kernel_chunk_size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")

PRODUCTION = ahead.production()


@pytest.fixture(scope="module")
def used():
    from benchmarks.kernels_report import resources

    return resources()


@pytest.mark.thorough
def test_nothing_spills_at_production_shapes(used):
    spilled = {(name, target): use for name in used for target, use in used[name].items() if use.spilled}
    assert not spilled


@pytest.mark.thorough
def test_programs_fit_a_multiprocessor(used):
    """Shared memory of one program: 163 KiB on sm_80, 227 KiB on sm_90."""
    for targets in used.values():
        assert targets[80].shared <= 163 * 1024
        assert targets[90].shared <= 227 * 1024


@pytest.mark.thorough
def test_report_in_the_docs_is_what_this_triton_says(used):
    import triton

    from benchmarks.kernels_report import BEGIN, PAGE, printed, table

    found = printed(PAGE.read_text(), BEGIN)
    if f"Triton {triton.__version__}," not in found:
        pytest.skip("the table was made by another version of Triton")
    assert found == table(used)


@pytest.mark.slow
def test_report_of_the_delta_rule_is_what_this_triton_says():
    """On sm_90 nothing spills; docs/kernels.md says what does on sm_80, and why."""
    import triton

    from benchmarks.kernels_report import BEGIN_DELTA, PAGE, delta_rule_table, printed, resources

    used = resources(delta_rule=True)
    assert not {name for name in used if used[name][90].spilled}
    assert max(targets[90].shared for targets in used.values()) <= 227 * 1024
    assert max(targets[80].shared for targets in used.values()) <= 163 * 1024
    found = printed(PAGE.read_text(), BEGIN_DELTA)
    if f"Triton {triton.__version__}," in found:
        assert found == delta_rule_table(used)


def test_every_kernel_is_compiled_and_has_candidates():
    import importlib

    from triton.runtime.jit import JITFunction

    found = set()
    for module in ("streams", "coefficients", "activations", "common"):
        for name, value in vars(importlib.import_module(f"kernels.{module}")).items():
            if isinstance(value, JITFunction) and value.arg_names[0].endswith("_ptr") and "out_ptr" not in name:
                found |= {name} if value.fn.__module__ == f"kernels.{module}" else set()
    launched = {name.split(".")[1].split(" ")[0] for name in PRODUCTION}
    assert launched == set(CANDIDATES)
    assert launched <= found
    assert found - launched == {"load_streams"}, "a kernel that nothing launches"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "width"), [("float32", 128), ("float64", 64), ("bfloat16", 256), ("float16", 64)])
def test_kernels_of_the_delta_rule_compile_for_every_type_and_width(dtype, width):
    """The interpreter takes what a compiler does not: a sum that begins in float32 and goes on in float64."""
    for name, recorded in ahead.delta_rule_production(dtype=dtype, key=width, value=width).items():
        assert ahead.resources(recorded, 90).shared <= 227 * 1024, name


@pytest.mark.parametrize("per_channel", [True, False])
def test_every_kernel_of_the_delta_rule_is_launched_and_has_candidates(per_channel):
    import importlib

    from triton.runtime.jit import JITFunction

    from kernels.delta_rule.launches import CANDIDATES

    found = set()
    for module in ("products", "scan", "gradients", "channel_gradients"):
        for name, value in vars(importlib.import_module(f"kernels.delta_rule.{module}")).items():
            ours = isinstance(value, JITFunction) and value.fn.__module__ == f"kernels.delta_rule.{module}"
            if ours and name in CANDIDATES:
                found.add(name)
    launched = {r.launch.kernel.rsplit(".", 1)[1] for both in (True, False) for r in ahead.delta_rule(both)}
    assert launched == set(CANDIDATES) == found
    alone = {r.launch.kernel.rsplit(".", 1)[1] for r in ahead.delta_rule(per_channel)}
    assert ("decayed" in alone, "products_by_head" in alone) == (per_channel, not per_channel)


@given(
    per_channel=st.booleans(),
    tokens=st.integers(1, 10**6),
    others=st.integers(1, 10**6),
    parts=st.tuples(*[st.integers(2, 9)] * 2),
    key=st.integers(1, 256),
    value=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
)
def test_no_compiled_kernel_of_the_delta_rule_depends_on_the_number_of_tokens(
    per_channel, tokens, others, parts, key, value, dtype
):
    compiled = []
    for count, cut in zip((tokens, others), parts, strict=True):
        recorded = ahead.delta_rule(per_channel, count, 4, key, value, dtype, cut)
        compiled.append({(r.launch.compiled_as, tuple(x.dtype for x in r.inputs)) for r in recorded})
    assert compiled[0] == compiled[1]


def test_flops_and_bytes_of_the_delta_rule_are_those_of_the_design():
    """182 kFLOP and 1284 bytes a token and head are the least for KDA's forward at K = V = 128, C = 64."""
    forward = [r for r in ahead.delta_rule(True, parts=1) if "gradients" not in r.launch.kernel][:4]
    assert [r.launch.kernel.rsplit(".", 1)[1] for r in forward] == [
        "decayed",
        "products_by_channel",
        "solve",
        "scan_forward",
    ]
    count = 8192 * 32
    assert 0.7 * 182_000 < sum(r.flops() for r in forward) / count < 1.1 * 182_000
    assert 1284 < sum(r.all_bytes() for r in forward) / count < 9_900 / 2
    scans = {r.launch.kernel: r.flops() // count for r in ahead.delta_rule(True, parts=1) if "scan" in r.launch.kernel}
    of_states, of_pairs = 2 * 128 * 128, 2 * 64 * 128
    assert scans["delta_rule.scan.scan_backward"] == 3 * of_states + 2 * of_pairs


def test_ideal_bytes_are_those_of_the_design():
    s, d = 4, 4096
    expected = {
        "coefficients.project_forward": 2 * s * d + 100,
        "streams.aggregate_forward": 2 * (s + 1) * d + 16,
        "streams.aggregate_backward": 2 * (2 * s + 1) * d + 32,
        "streams.write_forward": 2 * (2 * s + 1) * d + 80,
        "streams.write_backward": 2 * (3 * s + 2) * d + 160,
        "coefficients.project_backward": 4 * s * d + 100,
    }
    assert {name: PRODUCTION[name].ideal_bytes(8192) for name in expected} == expected


# Offsets.

TOKEN_SIZED = {
    "x_ptr",
    "y_ptr",
    "out_ptr",
    "dx_ptr",
    "dy_ptr",
    "grad_ptr",
    "h_res_ptr",
    "dh_res_ptr",
    "projected_ptr",
    "dprojected_ptr",
    "logits_ptr",
    "dlogits_ptr",
}


def offset_types(ttir: str) -> dict[str, set[str]]:
    """Types of the offsets added to each pointer argument itself; columns are added to those of rows later."""
    argument, found = {}, {}
    for line in ttir.splitlines():
        splat = re.match(r"\s*(%\w+) = tt\.splat (%\w+) : !tt\.ptr", line)
        if splat:
            argument[splat[1]] = splat[2]
        added = re.match(r"\s*%\w+ = tt\.addptr (%\w+), %\w+ : .*, (?:tensor<\w*x)?(i32|i64)>?(?: loc.*)?$", line)
        if added:
            name = argument.get(added[1], added[1])
            found.setdefault(name.lstrip("%"), set()).add(added[2])
    return found


@pytest.mark.parametrize("name", PRODUCTION)
def test_offsets_that_grow_with_tokens_are_64_bit(name):
    found = offset_types(ahead.compile_ahead(PRODUCTION[name], 90).asm["ttir"])
    assert found.keys() & TOKEN_SIZED
    for pointer in found.keys() & TOKEN_SIZED:
        assert found[pointer] == {"i64"}, pointer


def test_offset_test_sees_32_bits():
    pointers = "tensor<4x!tt.ptr<f32>>"
    ttir = f"%0 = tt.splat %x_ptr : !tt.ptr<f32> -> {pointers}\n%1 = tt.addptr %0, %o : {pointers}, tensor<4xi32>"
    assert offset_types(ttir) == {"x_ptr": {"i32"}}
    assert offset_types(ttir.replace("i32", "i64")) == {"x_ptr": {"i64"}}


# The number of tokens.


@given(
    tokens=st.integers(1, 10**7),
    others=st.integers(1, 10**7),
    streams=st.integers(1, 8),
    width=st.integers(1, 5000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
)
def test_no_compiled_kernel_depends_on_the_number_of_tokens(tokens, others, streams, width, dtype):
    compiled = []
    for count in (tokens, others):
        recorded = ahead.everything(count, streams, width, dtype)
        compiled.append({(r.launch.compiled_as, tuple(x.dtype for x in r.inputs)) for r in recorded})
    assert compiled[0] == compiled[1]


@given(
    tokens=st.integers(1, 10**6),
    streams=st.integers(1, 8),
    width=st.integers(1, 5000),
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
    block=st.integers(0, 3),
)
def test_programs_cover_every_row_and_column(tokens, streams, width, dtype, block):
    blocks = {name: candidates[block % len(candidates)] for name, candidates in CANDIDATES.items()}
    for entry in ahead.everything(tokens, streams, width, dtype, blocks=blocks):
        name, made, constants = entry.launch.kernel, entry.launch, dict(entry.launch.constants)
        columns = next((constants[c] for c in ("D", "K", "F", "W") if c in constants), None)
        tile = next((constants[c] for c in ("BD", "BK", "BF", "BW") if c in constants), None)
        for size in ("BN", "BR", "BD", "BK", "BF", "BW", "SP", "CP"):
            assert constants.get(size, 1) & (constants.get(size, 1) - 1) == 0, f"{name}: {size} is no power of two"
        if "column_sum" in name or "project_backward" in name:
            rows, per_group = made.scalars
            assert made.grid[1] * per_group >= rows
            assert made.grid[0] * tile >= columns
        else:
            assert made.grid[0] * constants["BN"] >= tokens
            assert made.grid[0] <= max(2, tokens / constants["BN"] + 1), name
            if len(made.grid) == 2:
                assert made.grid[1] * tile >= columns
        assert all(axis <= 65535 for axis in made.grid[1:]), name


# Through jax-triton.


@pytest.fixture
def hopper(monkeypatch):
    """A machine whose GPU is asked for nothing but its compute capability."""
    if jax_ops.jax_triton() is None:
        pytest.skip("needs jax-triton and the library of JAX's CUDA plugin")
    from jax._src.lib import gpu_triton

    monkeypatch.setattr(gpu_triton, "get_compute_capability", lambda device: 90)
    return sys.modules["jax_triton.triton_lib"]._COMPILED_KERNEL_CACHE


def everything(x, phi, alpha, bias, y, width_bias, low, high, step):
    """The gradient of a function of all operations."""
    from jax_impl.ops import DropoutState

    def loss(x, phi, alpha, bias, y, width_bias):
        h_pre, h_post, h_res = jax_ops.compute_mappings(x, phi, alpha, bias)
        both = jnp.concatenate([jax_ops.aggregate(x, h_pre), y], -1)
        out = jax_ops.swiglu(both) + jax_ops.gelu(y)
        state = DropoutState(7, step, low, high)
        mixed = jax_ops.write_streams(x, jax_ops.sinkhorn(h_res), out, width_bias, h_post, 0.1, state, 3)
        return jnp.sum(jax_ops.write_streams(mixed, None, out, None, h_post).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=range(6))(x, phi, alpha, bias, y, width_bias)


def exported(tokens: int, dtype: str) -> str:
    streams, width = 4, 64
    narrow, wide = (jnp.dtype(t) for t in (dtype, "float64" if dtype == "float64" else "float32"))
    shapes = [
        ((1, tokens, streams, width), narrow),
        ((streams * width, 24), wide),
        ((3,), wide),
        ((24,), wide),
        ((1, tokens, width), narrow),
        ((width,), wide),
        ((1, tokens), jnp.uint32),
        ((1, tokens), jnp.uint32),
        ((), jnp.uint32),
    ]
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    function = jax.export.export(jax.jit(everything), platforms=["cuda"], disabled_checks=[check])
    return function(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).mlir_module()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_operation_lowers_for_cuda_and_new_token_counts_compile_nothing(hopper, dtype):
    hopper.clear()
    module = exported(300, dtype)
    assert module.count("triton_kernel_call") >= 15
    assert "callback" not in module
    compiled = len(hopper)
    kernels = {key[0].fn.__name__ for key in hopper}
    assert kernels == set(CANDIDATES)
    for tokens in (17, 64, 5000):
        exported(tokens, dtype)
    assert len(hopper) == compiled


def exported_delta_rule(tokens: int, per_channel: bool) -> str:
    """The gradient of the rule over one sequence of bfloat16, two heads of values a head of q."""
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    decay = (1, tokens, 2, 16) if per_channel else (1, tokens, 2)
    shapes = [
        *[((1, tokens, 1, 16), narrow)] * 2,
        ((1, tokens, 2, 16), narrow),
        (decay, wide),
        ((1, tokens, 2), narrow),
    ]
    shapes += [((1, 2, 16, 16), wide)]

    def loss(*arrays):
        size = kernel_chunk_size(64)
        tables = chunk_tables(np.array([0, tokens], np.int32), size)
        o, final = jax_ops.delta_rule(*arrays, tables, size, 0.25)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final**2)

    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    function = jax.export.export(jax.jit(jax.grad(loss, range(6))), platforms=["cuda"], disabled_checks=[check])
    return function(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).mlir_module()


@pytest.mark.slow
def test_the_delta_rule_lowers_for_cuda_and_new_token_counts_compile_nothing(hopper, monkeypatch):
    hopper.clear()
    for parts in (1, 3):
        monkeypatch.setattr(functions, "parts_of", lambda *sizes, parts=parts: parts)
        for per_channel in (True, False):
            module = exported_delta_rule(300, per_channel)
            assert module.count("triton_kernel_call") >= 8
            assert "callback" not in module
    compiled = len(hopper)
    assert {key[0].fn.__name__ for key in hopper} == set(launches.CANDIDATES)
    for tokens in (17, 64, 5000):
        for per_channel in (True, False):
            exported_delta_rule(tokens, per_channel)
    assert len(hopper) == compiled


def test_lowering_for_cuda_without_jax_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(jax_ops, "jax_triton", lambda: None)
    with pytest.raises(Exception, match="cuda"):
        jax.export.export(jax.jit(jax_ops.gelu), platforms=["cuda"])(jax.ShapeDtypeStruct((3, 71), jnp.float32))


def test_jax_triton_leaves_the_environment_alone(monkeypatch):
    import os

    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    jax_ops.jax_triton.cache_clear()
    for name in [name for name in sys.modules if name.startswith("jax_triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert jax_ops.jax_triton() is None
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"
    jax_ops.jax_triton.cache_clear()


# Tuning.


SIZES = {"lead": (4096,), "width": 64, "dtype": "float32"}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DIPTYCH_TUNE", raising=False)
    tuning._table.cache_clear()
    yield tmp_path / "blocks.json"
    tuning._table.cache_clear()


def choose(times: dict[Block, float], device: str = "card", **sizes) -> tuple[Block, list[Launch]]:
    measured = []

    def measure(made: Launch) -> float:
        measured.append(made)
        rows = dict(made.constants)["BN"]
        time = next(time for block, time in times.items() if block.rows == rows and block.num_warps == made.num_warps)
        if math.isnan(time):
            raise RuntimeError("out of resource: shared memory")
        return time

    return tuning.choose(launch.gelu_forward, SIZES | sizes, device, measure), measured


FIRST, SECOND, THIRD = CANDIDATES["gelu_forward"]


def test_fastest_block_is_measured_once_and_kept_for_every_process(cache):
    times = {FIRST: 3.0, SECOND: 1.0, THIRD: 2.0}
    assert choose(times)[0] == SECOND
    assert choose(times, lead=(7,)) == (SECOND, []), "another number of tokens measures nothing"
    tuning._table.cache_clear()  # as in another process
    block, measured = choose({FIRST: 1.0, SECOND: 2.0, THIRD: 3.0})
    assert (block, measured) == (SECOND, [])
    assert len(choose(times, device="another card")[1]) == 3
    assert len(choose(times, width=65)[1]) == 3
    assert len(json.loads(cache.read_text())) == 3


def test_small_launches_measure_nothing_and_take_what_is_known(cache):
    assert choose({}, lead=(7,)) == (FIRST, [])
    assert not cache.exists()
    choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})
    assert choose({}, lead=(7,)) == (SECOND, [])


def test_the_first_process_to_measure_decides_for_all(cache):
    """Another process writes its choice while this one measures."""
    key = tuning._key(launch.gelu_forward(FIRST, **SIZES), "card")

    def measure(made: Launch) -> float:
        cache.write_text(json.dumps({key: THIRD}))
        return float(made.num_warps)

    assert tuning.choose(launch.gelu_forward, SIZES, "card", measure) == THIRD
    tuning._table.cache_clear()
    assert choose({})[0] == THIRD


def test_a_block_that_is_no_candidate_is_measured_again(cache):
    key = tuning._key(launch.gelu_forward(FIRST, **SIZES), "card")
    cache.write_text(json.dumps({key: [7, 100, 3, 1]}))
    assert choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})[0] == SECOND


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/below"])
def test_a_folder_that_cannot_be_written_costs_only_time(folder, monkeypatch, caplog):
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", folder)
    monkeypatch.setenv("DIPTYCH_TUNE", "1")
    tuning._table.cache_clear()
    assert choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})[0] == SECOND
    assert "cannot be written" in caplog.text
    assert choose({}) == (SECOND, []), "this process remembers"
    tuning._table.cache_clear()


def test_no_memory_to_measure_in_decides_nothing(cache):
    class OutOfMemoryError(RuntimeError):
        pass

    def measure(made: Launch) -> float:
        raise OutOfMemoryError("tried to allocate")

    assert tuning.choose(launch.gelu_forward, SIZES, "card", measure) == FIRST
    assert not cache.exists()


def test_what_is_not_installed_is_said_while_measuring_too(cache):
    def measure(made: Launch) -> float:
        raise ImportError("expected jax-triton")

    with pytest.raises(ImportError, match="expected jax-triton"):
        tuning.choose(launch.gelu_forward, SIZES, "card", measure)


def test_a_block_that_does_not_run_is_passed_over(cache):
    assert choose({FIRST: math.nan, SECOND: 5.0, THIRD: math.nan})[0] == SECOND
    with pytest.raises(RuntimeError, match=r"gelu_forward: none of its blocks runs .* out of resource"):
        choose({FIRST: math.nan, SECOND: math.nan, THIRD: math.nan}, width=3)


def test_a_broken_file_is_measured_again(cache, caplog):
    cache.write_text('{"truncated": [1, 2')
    assert choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})[0] == SECOND
    assert "no table of blocks" in caplog.text
    assert list(json.loads(cache.read_text()).values()) == [list(SECOND)]


def test_tuning_can_be_turned_off_and_the_interpreter_never_tunes(cache, monkeypatch):
    import torch

    torch_ops.gelu(torch.zeros(2, 3))
    jax_ops.gelu(jnp.zeros((2, 3)))
    assert not cache.exists()
    monkeypatch.setenv("DIPTYCH_TUNE", "0")
    assert choose({})[0] == FIRST


@pytest.mark.slow
def test_every_candidate_computes_the_same():
    """Blocks decide speed alone; reductions may round differently."""
    import torch

    from tests.backends import normal

    x, phi = torch.from_numpy(normal(0, 3, 40, 2, 9)), torch.from_numpy(normal(1, 18, 8)) / 4
    arguments = [x, phi, torch.ones(3).double(), torch.zeros(8).double()]
    results = []
    for place in range(4):
        with pytest.MonkeyPatch.context() as patch:
            blocks = {name: candidates[place % len(candidates)] for name, candidates in CANDIDATES.items()}
            patch.setattr(tuning, "first", lambda build, blocks=blocks: blocks[build.__name__])
            leaves = [a.clone().requires_grad_() for a in arguments]
            outputs = torch_ops.compute_mappings(*leaves)
            read = torch_ops.aggregate(leaves[0], outputs[0])
            out = torch_ops.write_streams(leaves[0], outputs[2], read, None, outputs[1])
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_benchmark_has_a_row_a_kernel_and_door(capsys):
    """What make bench-gpu does, interpreted: its times mean nothing, its rows must be there."""
    from rich.console import Console

    from benchmarks import kernels

    content = kernels.measure(4, 16, "cpu")
    doors = ("torch", "jax") if jax_ops.jax_triton() is not None else ("torch",)
    assert {(row["kernel"], row["door"]) for row in content["kernels"]} >= {
        (name, door) for name in PRODUCTION for door in doors
    }
    assert all(row["ideal_bytes"] > 0 and row["microseconds"] > 0 for row in content["kernels"])
    assert {row["operation"] for row in content["operations"]} == {
        "compute_mappings",
        "aggregate",
        "write_streams",
        "swiglu",
    }
    assert content["liger_kernel"] == "absent"
    json.dumps(content)
    kernels.show(Console(), content)
    assert "liger-kernel: absent" in capsys.readouterr().out


@pytest.mark.slow
def test_benchmark_of_the_delta_rule_has_a_row_a_kernel(capsys):
    from rich.console import Console

    from benchmarks import delta_rule_kernels

    content = delta_rule_kernels.measure(20, 2, 16, "cpu")
    assert {row["kernel"] for row in content["kernels"]} == {*ahead.delta_rule_production()}
    assert all(row["bytes"] > 0 and row["microseconds"] > 0 for row in content["kernels"])
    assert {(row["operation"], row["direction"]) for row in content["operations"]} == {
        (name, direction) for name in ("kda", "gdn") for direction in ("forward", "forward and backward")
    }
    assert content["fla_core"] == "absent"
    assert {*content["maps_relative_to_forward"]} == {"kda", "gdn"}
    json.dumps(content)
    delta_rule_kernels.show(Console(), content)
    assert "products.solve" in capsys.readouterr().out


def test_recorded_operations_know_every_launch():
    recorded = ahead.launches_of(
        operations.COMPUTE_MAPPINGS,
        Sinkhorn(20, "row", 1e-5),
        [ahead.Shape(shape, "float32") for shape in ((8192, 4, 64), (256, 24), (3,), (24,))],
    )
    names = [entry.launch.kernel.split(".")[1] for entry in recorded]
    assert names[:4] == ["project_forward", "mappings_forward", "mappings_backward", "project_backward"]
    assert set(names[4:]) == {"column_sum"}
    assert replace(recorded[0].launch, scalars=(7,)).compiled_as == recorded[0].launch.compiled_as

"""Kernels without a GPU: compiled for two of them, their registers, bytes and offsets, for any number of tokens."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_kernels import aot as ahead
from diptych_kernels import autodiff_rules
from diptych_kernels.launch_configs import CANDIDATES, MappingOptions, Write

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


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "capability"), [(4, 100), (8, 90)])
def test_nothing_spills_on_b200_or_with_eight_streams(streams, capability):
    recorded = ahead.production(8192, streams)
    if streams == 4:
        recorded |= ahead.delta_rule_production()
    used = {name: ahead.resources(entry, capability) for name, entry in recorded.items()}
    assert not {name: use.spilled for name, use in used.items() if use.spilled}


@pytest.mark.thorough
def test_programs_fit_a_multiprocessor(used):
    """Shared memory of one program: 163 KiB on sm_80, 227 KiB on sm_90."""
    for targets in used.values():
        assert targets[80].shared <= 163 * 1024
        assert targets[90].shared <= 227 * 1024


@pytest.mark.thorough
def test_report_in_the_docs_is_what_this_triton_says(used):
    import triton

    from benchmarks.kernels_report import BEGIN, PAGE, codes, printed, table

    found = printed(PAGE.read_text(), BEGIN)
    if f"Triton {triton.__version__}," not in found:
        pytest.skip("the table was made by another version of Triton")
    assert found == table(used, codes())


@pytest.mark.slow
def test_report_of_the_delta_rule_is_what_this_triton_says():
    """On sm_90 nothing spills; docs/kernels.md says what does on sm_80, and why."""
    import triton

    from benchmarks.kernels_report import BEGIN_DELTA, PAGE, codes, delta_rule_table, printed, resources

    used = resources(delta_rule=True)
    assert not {name for name in used if any(on_target.spilled for on_target in used[name].values())}
    assert max(targets[90].shared for targets in used.values()) <= 227 * 1024
    assert max(targets[80].shared for targets in used.values()) <= 163 * 1024
    found = printed(PAGE.read_text(), BEGIN_DELTA)
    if f"Triton {triton.__version__}," in found:
        assert found == delta_rule_table(used, codes(delta_rule=True))


@pytest.mark.parametrize(
    ("name", "copies"), [("scan.scan_forward (outputs)", 54), ("scan.scan_backward (one decay, states)", 32)]
)
def test_scans_load_matrices_in_wide_pieces(name, copies):
    """A mask of single elements made 64 loads of two bytes of each matrix."""
    ptx = ahead.compile_ahead(ahead.delta_rule_production(dtype="bfloat16")[name], 90).asm["ptx"]
    assert not re.findall(r"ld\.global[.\w:]*\.b16", ptx)
    assert len(re.findall(r"cp\.async\.\w+\.shared", ptx)) >= copies


def test_every_kernel_is_compiled_and_has_candidates():
    import importlib

    from triton.runtime.jit import JITFunction

    found = set()
    for module in ("streams", "coefficients", "activations", "common"):
        for name, value in vars(importlib.import_module(f"diptych_kernels.{module}")).items():
            if isinstance(value, JITFunction) and value.arg_names[0].endswith("_ptr") and "out_ptr" not in name:
                found |= {name} if value.fn.__module__ == f"diptych_kernels.{module}" else set()
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

    from diptych_kernels.delta_rule.launch_configs import CANDIDATES

    found = set()
    for module in ("products", "scan", "gradients", "channel_gradients"):
        for name, value in vars(importlib.import_module(f"diptych_kernels.delta_rule.{module}")).items():
            ours = isinstance(value, JITFunction) and value.fn.__module__ == f"diptych_kernels.delta_rule.{module}"
            if ours and name in CANDIDATES:
                found.add(name)
    launched = {r.launch.kernel.rsplit(".", 1)[1] for both in (True, False) for r in ahead.delta_rule(both)}
    assert launched == set(CANDIDATES) == found
    alone = {r.launch.kernel.rsplit(".", 1)[1] for r in ahead.delta_rule(per_channel)}
    assert ("decay_queries_and_keys" in alone, "terms_by_head" in alone) == (per_channel, not per_channel)


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
    forward = [r for r in ahead.delta_rule(True, parts=1) if "gradients" not in r.launch.kernel][:3]
    assert [r.launch.kernel.rsplit(".", 1)[1] for r in forward] == ["terms_by_channel", "invert", "scan_forward"]
    count = 8192 * 32
    assert 0.7 * 182_000 < sum(r.flops() for r in forward) / count < 1.1 * 182_000
    assert 1284 < sum(r.all_bytes() for r in forward) / count < 4_200
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
        "streams.aggregate_backward (read)": 2 * (s + 1) * d + 32,
        "coefficients.project_backward (read)": 2 * (3 * s + 1) * d + 116,
    }
    assert {name: PRODUCTION[name].ideal_bytes(8192) for name in expected} == expected


def test_bytes_of_a_connection_are_those_in_the_docs():
    """Forward and backward; an addition of two gradients of the streams reads two and writes one."""
    s, d = 4, 4096
    x, y = ahead.Shape((8192, s, d), "bfloat16"), ahead.Shape((8192, d), "bfloat16")
    h, h_res = ahead.Shape((8192, s), "float32"), ahead.Shape((8192, s, s), "float32")
    phi, alpha, bias = (ahead.Shape(shape, "float32") for shape in ((s * d, 24), (3,), (24,)))

    def moved(operation, static, *inputs):
        return sum(entry.ideal_bytes(8192) for entry in ahead.launches_of(operation, static, inputs))

    options = MappingOptions(20, "row", rms_epsilon=1e-5)
    write = moved(autodiff_rules.WRITE, Write("mix", True, False), x, h_res, y, None, h, None, None, None)
    mappings = moved(autodiff_rules.COMPUTE_MAPPINGS, options, x, phi, alpha, bias)
    aggregate = moved(autodiff_rules.AGGREGATE, None, x, h)
    addition = 3 * 2 * s * d
    totals = (
        write + moved(autodiff_rules.READ_WITH_RESIDUAL, options, x, phi, alpha, bias),
        write + moved(autodiff_rules.READ, options, x, phi, alpha, bias) + addition,
        write + mappings + aggregate + 2 * addition,
    )
    assert [round(total / 1000) for total in totals] == [411, 476, 599]


@pytest.mark.parametrize(("operation", "width"), [("READ", 4096), ("READ_WITH_RESIDUAL", 100)])
def test_the_sum_of_gradients_compiles_with_and_without_that_of_the_write(operation, width):
    """Widths that are no multiple of a tile have another branch."""
    shapes = [((8192, 4, width), "bfloat16"), ((4 * width, 24), "float32"), ((3,), "float32"), ((24,), "float32")]
    inputs = [ahead.Shape(*shape) for shape in shapes]
    options = MappingOptions(20, "row", rms_epsilon=1e-5)
    launches = ahead.launches_of(getattr(autodiff_rules, operation), options, inputs)
    (entry,) = (entry for entry in launches if entry.launch.kernel == "coefficients.project_backward")
    assert ahead.resources(entry, 90).spilled == 0


# Offsets.

TOKEN_SIZED = {
    "x_ptr",
    "residual_ptr",
    "output_ptr",
    "out_ptr",
    "next_ptr",
    "dx_ptr",
    "dresidual_ptr",
    "doutput_ptr",
    "grad_ptr",
    "h_res_ptr",
    "dh_res_ptr",
    "residual_grad_ptr",
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
        if "project_backward" in name:
            columns *= constants["S"]
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

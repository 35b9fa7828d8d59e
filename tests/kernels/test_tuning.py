"""How kernels are tuned: what is measured, kept, passed over, and written by benchmarks."""

import gc
import json
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych_kernels import aot as ahead
from diptych_kernels import autodiff_rules as operations
from diptych_kernels import device_tables, tuning
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import launch_configs as launch
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels.autodiff_rules import MappingOptions
from diptych_kernels.launch_configs import CANDIDATES, Block, Launch

PRODUCTION = ahead.production()
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


def test_small_launches_read_the_file_once(cache, monkeypatch):
    read = []
    monkeypatch.setattr(tuning, "_read", lambda path: read.append(path) or {})
    for _ in range(3):
        assert choose({}, lead=(7,)) == (FIRST, [])
    assert read == [cache]


def test_nothing_is_measured_while_a_graph_is_captured(cache):
    assert tuning.choose(launch.gelu_forward, SIZES, "card", None) == FIRST
    choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})
    assert tuning.choose(launch.gelu_forward, SIZES, "card", None) == SECOND


def test_scans_of_more_sequences_are_measured_again(cache):
    """Their number, unlike that of tokens, is that of a scan's programs."""
    recorded = ahead.delta_rule_production(tokens=4096, heads=2, key=16, value=16, parts=1)[
        "scan.scan_backward (states)"
    ]
    measured = []
    for sequences in (1, 1, 9, 9):
        sizes = recorded.sizes | {"call": recorded.sizes["call"]._replace(sequences=sequences)}
        tuning.choose(recorded.build, sizes, "card", lambda made: float(len(measured.append(made) or measured)))
    blocks = len(tuning.candidates_of(recorded.build))
    assert len(measured) == 2 * blocks
    assert {made.grid for made in measured[:blocks]} != {made.grid for made in measured[blocks:]}


def test_every_block_that_benchmarks_measure_is_compiled_before():
    from benchmarks.compile_blocks import jobs, recorded_launches

    named = recorded_launches()
    found = {}
    for group, name, block in jobs(named):
        found.setdefault((group, name), set()).add(block)
    assert {name for group, name in found if group == "streams"} == {*PRODUCTION}
    assert {name for group, name in found if group == "delta rule"} == {*ahead.delta_rule_production()}
    for (group, name), blocks in found.items():
        assert blocks == {*tuning.candidates_of(named[group][name].build)}


def content_of(rows) -> tuple[torch.device, bytes, str, tuple[int, ...]]:
    x = np.array(rows, np.int32)
    return torch.device("cpu"), x.tobytes(), x.dtype.str, x.shape


def test_tables_are_copied_once_per_layout_and_stream():
    def table(rows, stream=0):
        return device_tables.copied_table(stream, *content_of(rows))

    first = table([[0, 5], [5, 9]])
    assert torch.equal(first, torch.tensor([[0, 5], [5, 9]], dtype=torch.int32))
    assert table([[0, 5], [5, 9]]) is first
    assert table([[0, 5], [5, 9]], stream=1) is not first
    assert not torch.equal(table([[0, 4], [4, 9]]), first)
    with torch.inference_mode():
        assert not table([[0, 1]]).is_inference()


def test_a_graph_reads_tables_of_earlier_calls_and_keeps_them():
    copied = device_tables.copied_table(3, *content_of([[0, 7]]))
    address = copied.data_ptr()
    assert device_tables.table_of_graph(*content_of([[0, 7]])) is copied
    del copied
    device_tables.copied_table.cache_clear()
    gc.collect()
    assert device_tables.table_of_graph(*content_of([[0, 7]])).data_ptr() == address
    with pytest.raises(RuntimeError, match=r"cu_seqlens: expected the sequence offsets of an earlier call .*, got new"):
        device_tables.table_of_graph(*content_of([[0, 8]]))


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
    with pytest.raises(RuntimeError, match=r"gelu_forward: expected a block that runs .* out of resource.*; give impl"):
        choose({FIRST: math.nan, SECOND: math.nan, THIRD: math.nan}, width=3)


@pytest.mark.parametrize("numbers", [[1.0, *FIRST[1:]], [True, *FIRST[1:]], [*FIRST, 2], [1], None])
def test_entries_that_are_no_blocks_are_measured_again_and_others_kept(cache, numbers):
    """Such as those of a later version with another parameter of blocks."""
    key = tuning._key(launch.gelu_forward(FIRST, **SIZES), "card")
    cache.write_text(json.dumps({key: numbers, "other": list(THIRD), "later": [*THIRD, 7]}))
    block, measured = choose({FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})
    assert (block, len(measured)) == (SECOND, 3)
    assert json.loads(cache.read_text()) == {key: list(SECOND), "other": list(THIRD), "later": [*THIRD, 7]}


def test_the_folder_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", "~/blocks")
    assert tuning._path() == tmp_path / "blocks" / "blocks.json"
    monkeypatch.delenv("DIPTYCH_CACHE_DIR")
    assert tuning._path() == tmp_path / ".cache" / "diptych" / "blocks.json"


@pytest.mark.parametrize("text", ['{"truncated": [1, 2', "[" * 100_000])
def test_a_broken_file_is_measured_again(cache, caplog, text):
    cache.write_text(text)
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
            aggregated, h_post, h_res, residual = torch_ops.read_streams(*leaves)
            out = torch_ops.write_streams(leaves[0], outputs[2], read, None, outputs[1])
            out = out + torch_ops.write_streams(residual, h_res, aggregated, None, h_post)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_jax_runs_every_launch_that_it_measures(monkeypatch):
    """XLA runs equal launches once; on an H100, two of twenty were run and measured."""
    interpreted = []
    interpret = jax_ops._interpret
    monkeypatch.setattr(jax_ops, "_interpret", lambda *a: interpreted.append(1) or interpret(*a))
    recorded = ahead.production(2, 2, 16, "float32")["streams.aggregate_forward"]
    inputs = [jnp.ones(x.shape, x.dtype) for x in recorded.inputs]
    assert jax_ops.measure(recorded.launch, inputs, repeats=5, rounds=3) > 0
    assert len(interpreted) == 5 * 3


@pytest.mark.slow
def test_benchmark_has_a_row_a_kernel_and_backend(capsys):
    """What make bench-gpu does, interpreted: its times mean nothing, its rows must be there."""
    from rich.console import Console

    from benchmarks import kernels

    content = kernels.measure(4, 16, "cpu")
    backends = ("torch", "jax") if jax_ops.jax_triton() is not None else ("torch",)
    assert {(row["kernel"], row["backend"]) for row in content["kernels"]} >= {
        (name, backend) for name in PRODUCTION for backend in backends
    }
    assert all(row["ideal_bytes"] > 0 and row["microseconds"] > 0 for row in content["kernels"])
    assert {row["operation"] for row in content["operations"]} == {
        "compute_mappings",
        "aggregate",
        "write_streams",
        "read_streams and write_streams",
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
    assert "products.invert" in capsys.readouterr().out


def test_recorded_operations_know_every_launch():
    recorded = ahead.launches_of(
        operations.COMPUTE_MAPPINGS,
        MappingOptions(20, "row", 1e-5),
        [ahead.Shape(shape, "float32") for shape in ((8192, 4, 64), (256, 24), (3,), (24,))],
    )
    names = [entry.launch.kernel.split(".")[1] for entry in recorded]
    assert names[:4] == ["project_forward", "mappings_forward", "mappings_backward", "project_backward"]
    assert set(names[4:]) == {"column_sum"}
    assert replace(recorded[0].launch, scalars=(7,)).compiled_as == recorded[0].launch.compiled_as

"""Estimated times of launches, and the work by which the plan prices kernels."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diptych.planner.memory import kernel_work
from diptych.planner.memory.kernel_work import KernelWork, Work
from diptych.planner.memory.rule import RuleShape
from diptych.planner.step_time import Machine, StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import DeltaRuleOptions
from diptych_kernels import aot as ahead
from diptych_kernels.launch_times import GPUS, Counted, Gpu, count, loop_values
from reference_torch.delta_rule.gates import apply_norm_and_gate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")

GPU = Gpu(multiprocessors=10, clock=1e9, bandwidth=1e12)
TOKENS = 8192
HEADS = 32


@pytest.mark.parametrize(
    ("counted", "limit", "seconds"),
    [
        (Counted(4_000_000, 100, 4, 20, 2, 8.0), "bytes", 4e-6),
        (Counted(0, 100, 64, 20, 1, 1.0), "issue", 20 * 64 * 100 / 40e9),
        (Counted(0, 100, 4, 21, 2, 8.0), "chain", 2 * 800e-9),  # 21 programs are two waves of 20
    ],
)
def test_a_launch_takes_as_long_as_its_longest_part(counted, limit, seconds):
    time = counted.on(GPU)
    assert time.limit == limit
    assert time.seconds == pytest.approx(seconds)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_estimates_are_near_measurements():
    """Of kernels that took 50 us or more."""
    from benchmarks.kernels_report import measured_launches

    ratios = {
        name: counted.on(GPUS["H100"]).seconds / measured
        for name, (counted, measured) in measured_launches().items()
        if measured > 50e-6
    }
    assert len(ratios) > 10
    assert not {name: ratio for name, ratio in ratios.items() if not 0.6 < ratio < 1.4}


# Work of the plan.


def of_kernels(shape: RuleShape) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The work of the launches, without that of the framework before and after them."""
    work = kernel_work.delta_rule(shape)
    return work.forward[1:], work.backward[:-1]


@given(
    per_channel=st.booleans(),
    length=st.sampled_from([16, 32, 64, 128, 640, 4096]),
    heads=st.sampled_from([2, 4, 32]),
    key=st.sampled_from([32, 64, 128, 256]),
    value=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
)
def test_the_plan_knows_bytes_and_products_of_the_delta_rule(per_channel, length, heads, key, value, dtype):
    chunk = min(64, length)
    sizes = dict(tokens=length, heads=heads, key=key, value=value, dtype=dtype, parts=1, chunk_size=chunk)
    item = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    key_heads = heads if per_channel else heads // 2
    kind = "kda" if per_channel else "gdn"
    shape = RuleShape(kind, 1, length, key_heads, heads, key, value, item, max(4, item))
    tables = 20 * length // chunk + 64
    for launches, works in zip(ahead.delta_rule_by_pass(per_channel, **sizes), of_kernels(shape), strict=True):
        for launch, work in zip(launches, works, strict=True):
            name = launch.launch.kernel
            slices = dict(launch.launch.constants).get("SLICES", 0)
            if "channel_gradients" in name:
                assert slices == -(-key // 16)
            assert 0 <= launch.all_bytes() - work.moved <= tables, name
            assert work.flops == pytest.approx(launch.flops(), rel=0.01), name


class BytesOfOperations(TorchDispatchMode):
    """Count the bytes of the tensors that each operation reads and writes; views do neither."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = (
            {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_leaves(tree) if torch.is_tensor(x)}
            for tree in ((args, kwargs), result)
        )
        if not read.keys() & written.keys():
            self.bytes += sum((read | written).values())
        return result


@given(kind=st.sampled_from(["kda", "gdn"]), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_the_plan_knows_bytes_of_norms_and_gates(kind, dtype):
    tokens, key_heads, heads, key = 32, 2, 4, 64
    options = DeltaRuleOptions(True, None, 64, True, kind == "kda")
    q, k = (torch.randn(1, tokens, key_heads, key, dtype=dtype, requires_grad=True) for _ in range(2))
    g = torch.randn(1, tokens, heads, key, dtype=dtype, requires_grad=True)
    parameters = torch.randn(heads, requires_grad=True), torch.randn(heads * key, requires_grad=True)
    with BytesOfOperations() as forward:
        results = apply_norm_and_gate(q, k, g, *parameters, options)
    gradients = [torch.randn_like(x) for x in results]
    with BytesOfOperations() as backward:
        torch.autograd.backward(results[: 3 if kind == "kda" else 2], gradients[: 3 if kind == "kda" else 2])
    wide = max(4, dtype.itemsize)
    work = kernel_work.delta_rule(RuleShape(kind, 1, tokens, key_heads, heads, key, key, dtype.itemsize, wide))
    assert work.forward[0].moved == pytest.approx(forward.bytes, rel=0.03)
    assert work.backward[-1].moved == pytest.approx(backward.bytes, rel=0.03)


def test_kernels_compute_whole_chunks():
    part, whole = (of_kernels(RuleShape("kda", 1, length, 2, 2, 64, 64, 2, 4)) for length in (65, 128))
    for passes in zip(part, whole, strict=True):
        for one, other in zip(*passes, strict=True):
            assert (one.instructions, one.flops) == (other.instructions, other.flops)
            assert one.moved < other.moved


@given(
    streams=st.integers(2, 8),
    width=st.sampled_from([256, 1024, 4096]),
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
)
def test_the_plan_knows_bytes_of_streams_and_activations(streams, width, dtype):
    tokens = 8000  # no other axis is as long
    launches = ahead.everything(tokens, streams, width, dtype)
    item = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    sizes = tokens, streams, width, item, max(4, item)

    def moved(names: str, backward_of_read: bool = False) -> list[int]:
        found = {}
        for entry in launches:
            constants = dict(entry.launch.constants)
            of_read = constants.get("AGGREGATE") is True or constants.get("DX") is False
            name = entry.launch.kernel.split(".")[1]
            if not constants.get("THRESHOLD") and of_read == (backward_of_read and "backward" in name):
                found.setdefault(name, tokens * entry.ideal_bytes(tokens))
        return [found[name] for name in names.split()]

    def compared(work: KernelWork) -> list[float]:
        return [each.moved for way in work for each in way]

    mappings = compared(kernel_work.mappings(*sizes))
    assert mappings[:3] == moved("project_forward mappings_forward mappings_backward")
    assert mappings[3:] == moved("project_backward", backward_of_read=True)
    aggregate = compared(kernel_work.aggregate(*sizes))
    assert aggregate == [*moved("aggregate_forward"), *moved("aggregate_backward", backward_of_read=True)]
    assert compared(kernel_work.write(*sizes)) == moved("write_forward write_backward")
    elements = tokens * 4 * width
    assert compared(kernel_work.activation(elements, True, item)) == moved("swiglu_forward swiglu_backward")
    assert compared(kernel_work.activation(elements, False, item)) == moved("gelu_forward gelu_backward")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("per_channel", [True, False])
def test_no_kernel_of_the_delta_rule_executes_more_than_the_plan_knows(per_channel):
    """A longer kernel fails here, and one that is shorter by more than a twentieth until the plan knows it."""
    from benchmarks.kernels_report import BEGIN_DELTA, PAGE, printed

    if f"Triton {version_of_triton()}," not in printed(PAGE.read_text(), BEGIN_DELTA):
        pytest.skip("the counts are of another version of Triton")
    kind = "kda" if per_channel else "gdn"
    for key, value in ((128, 128), (64, 128)):
        shape = RuleShape(kind, 1, TOKENS, HEADS if per_channel else HEADS // 2, HEADS, key, value, 2, 4)
        passes = ahead.delta_rule_by_pass(per_channel, heads=HEADS, key=key, value=value, parts=1)
        for launches, works in zip(passes, of_kernels(shape), strict=True):
            for launch, work in zip(launches, works, strict=True):
                ratio = count(launch).instructions / work.instructions
                assert 0.95 <= ratio <= 1, (launch.launch.kernel, key, value, ratio)


def version_of_triton() -> str:
    import triton

    return triton.__version__


def test_every_loop_has_bounds_that_are_known():
    """Names in the bounds of loops of all kernels are constants, values of loop_values, or variables of outer loops."""
    import importlib
    from pathlib import Path

    variables = {"row", "tile", "done", "column", "tl"}
    for recorded in [*ahead.everything(), *ahead.delta_rule(True), *ahead.delta_rule(False)]:
        module, name = recorded.launch.kernel.rsplit(".", 1)
        text = Path(importlib.import_module(f"diptych_kernels.{module}").__file__ or "").read_text()
        body = text[text.index(f"def {name}(") :]
        body = body[: body.find("\n@triton.jit")]
        for bounds in re.findall(r"for \w+ in (?:tl\.)?range\((.*?)\):", body):
            names = set(re.findall(r"\b(?<!\.)[A-Za-z_]\w*", bounds)) - {"disable_licm", "True"} - variables
            assert names <= set(loop_values(recorded)), (name, bounds)


# Times of the plan.


def times(**settings):
    """A machine that waits for memory alone, and a model in bfloat16."""
    config = TransformerConfig(64, 2, 4, seq_length=128, vocab_size=64, bf16=True, **settings)
    return StageTimes(Machine(1e30, 1e9, 1e30, 0.0, instruction_rate=1e30)), config


def test_a_kernel_of_an_activation_takes_the_time_of_its_bytes():
    """Eager SwiGLU moves five halves of its input in forward, the kernel three."""
    known, config = times(activation="swiglu")
    (eager,) = known.of(config, 1)
    (fused,) = known.of(replace(config, impl="triton"), 1)
    (again,) = known.of(config, 1)
    assert again == eager
    halves = 2 * 2 * 128 * config.layer(0).ffn_hidden_size / 1e9 * config.num_layers
    assert (eager.forward - fused.forward) / halves == pytest.approx(1.0)
    assert fused.input_gradient < eager.input_gradient
    assert fused.weight_gradient == eager.weight_gradient


def test_kernels_make_hyper_connections_and_the_delta_rule_faster():
    for settings in ({"enable_hyper_connections": True, "num_residual_streams": 4}, {"layer_pattern": "kda"}):
        known, config = times(**settings)
        (eager,) = known.of(config, 1)
        (fused,) = known.of(replace(config, impl="triton"), 1)
        assert fused.forward < 0.95 * eager.forward
        assert fused.input_gradient < 0.95 * eager.input_gradient


def test_instructions_limit_the_delta_rule():
    _, config = times(layer_pattern="kda")
    config = replace(config, impl="triton")
    fast, slow = (StageTimes(Machine(instruction_rate=rate)).of(config, 1)[0] for rate in (1e30, 1e3))
    _, heads, key, _ = config.linear_heads
    shape = RuleShape("kda", 1, 128, heads, heads, key, key, 2, 4)
    forward = sum(work.instructions for work in kernel_work.delta_rule(shape).forward) * config.num_layers
    assert slow.forward * 1e3 == pytest.approx(forward, rel=1e-6)
    (cut,) = StageTimes(Machine(instruction_rate=1e3)).of(replace(config, context_parallel_size=2), 1)
    assert cut.forward > 0.52 * slow.forward  # half of the tokens, and a scan for the next rank
    late = Machine(instruction_rate=1e3, operation_latency=1.0)
    launches = sum(map(len, kernel_work.delta_rule(shape)))
    (delayed,) = StageTimes(late).of(config, 1)
    assert delayed.forward + delayed.input_gradient >= slow.forward + slow.input_gradient + launches
    assert slow.forward > fast.forward
    assert slow.weight_gradient == fast.weight_gradient

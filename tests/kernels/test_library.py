"""Kernels in torch.library: compiled models and fake tensors have them as nodes of the graph, with the same results."""

from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode

from diptych_kernels import library
from diptych_kernels import torch_backend as kernels
from reference_torch.delta_rule import chunk_gated_delta_rule, chunk_kda
from reference_torch.ops import DropoutState


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def write(**changes) -> torch.Tensor:
    arguments = dict(
        residual=random(2, 3, 4, 8), h_res=random(2, 3, 4, 4), output=random(2, 3, 8), bias=None, h_post=random(2, 3, 4)
    )
    return kernels.write_streams(**arguments | changes)


def delta(rule, heads: int = 2, **settings) -> torch.Tensor:
    per_channel = rule is chunk_kda
    q, k, v = random(1, 20, 2, 8), random(1, 20, 2, 8), random(1, 20, heads, 8)
    g = -torch.rand((1, 20, heads, 8) if per_channel else (1, 20, heads))
    beta = torch.rand(1, 20, heads)
    o, final = rule(
        q, k, v, g.requires_grad_(), beta.requires_grad_(), output_final_state=True, impl="triton", **settings
    )
    return o.sum() + final.square().sum()


CALLS = {
    "sinkhorn": lambda: kernels.sinkhorn(random(3, 4, 4), 3, "column", 1e-6),
    "mappings": lambda: sum(
        x.square().sum() for x in kernels.compute_mappings(random(2, 3, 4, 8), random(32, 24), random(3), random(24))
    ),
    "mappings of bfloat16": lambda: sum(
        x.square().sum()
        for x in kernels.compute_mappings(
            random(2, 3, 4, 8, dtype=torch.bfloat16), random(32, 24), random(3), random(24)
        )
    ),
    "aggregate": lambda: kernels.aggregate(random(2, 3, 4, 8), random(2, 3, 4)),
    "read": lambda: sum(
        x.square().sum() for x in kernels.read_streams(random(2, 3, 4, 8), random(32, 24), random(3), random(24))
    ),
    "write": write,
    "write with bias": lambda: write(bias=random(8)),
    "write without mixing": lambda: write(h_res=None),
    "write without a residual": lambda: write(h_res=None, residual=None),
    "mix alone": lambda: write(output=None, h_post=None),
    "write with dropout": lambda: write(
        state=DropoutState(1, 2, torch.arange(6).reshape(2, 3), torch.zeros(2, 3, dtype=torch.int64)), rate=0.3, site=4
    ),
    "swiglu": lambda: kernels.swiglu(random(3, 10)),
    "gelu of float64": lambda: kernels.gelu(random(3, 10, dtype=torch.float64)),
    "delta rule": lambda: delta(chunk_gated_delta_rule),
    "delta rule with more value heads": lambda: delta(chunk_gated_delta_rule, heads=4),
    "KDA": lambda: delta(chunk_kda),
}


SLOW = {"delta rule with more value heads", "KDA"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CALLS])
def test_an_operation_of_the_library(name):
    """The library's operation passes PyTorch's own checks, and has the results and gradients of the eager function."""
    torch.manual_seed(0)
    calls = []
    apply = kernels.TorchBackend.apply

    def recorded(self, operation, static, *inputs):
        calls.append((operation, static, inputs))
        return apply(self, operation, static, *inputs)

    with (
        patch.object(kernels.TorchBackend, "apply", recorded),
        patch.object(kernels.TorchBackend, "returns_inputs", return_value=False),  # as in compiled code
    ):
        CALLS[name]()
    for operation, static, inputs in calls:
        own = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
        results = [function(operation, static, *own) for function in (kernels._KernelFunction.apply, library.apply)]
        for eager, registered in zip(*results, strict=True):
            assert torch.equal(eager, registered)
        wanted = [x for x in own if x is not None and x.requires_grad]
        weights = [torch.randn_like(output) for output in results[0]]
        gradients = [torch.autograd.grad(outputs, wanted, weights, allow_unused=True) for outputs in results]
        for eager, registered in zip(*gradients, strict=True):
            assert (eager is None and registered is None) or torch.equal(eager, registered)
        registered = getattr(torch.ops.diptych, operation.name)
        given = [x is not None for x in own]
        value = 0.0 if operation.name == "delta_rule" else kernels.UNWRITTEN
        with patch.object(kernels, "UNWRITTEN", value):  # the check compares tiles above the diagonal, which are unread
            torch.library.opcheck(registered, ([x for x in own if x is not None], given, library.text_of(static)))


STREAMS = ("read_streams", "write_streams")


def block(x, phi, alpha, bias, up):
    h_pre, _, _ = kernels.compute_mappings(x, phi, alpha, bias, iterations=3)
    aggregated, h_post, h_res, residual = kernels.read_streams(x, phi, alpha, bias, iterations=3)
    y = kernels.swiglu((aggregated + kernels.aggregate(x, h_pre)) @ up)
    return kernels.gelu(kernels.write_streams(residual, h_res, y, None, h_post))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_has_one_graph_with_its_kernels(backend):
    arguments = [random(2, 3, 4, 8), random(32, 24), random(3), random(24), random(8, 16)]
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    results = [function(*arguments) for function in (block, compiled)]
    assert torch.allclose(*results, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(result.square().sum(), arguments) for result in results]
    for ours, plain in zip(*gradients, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-5)
    graphs = []
    torch.compile(block, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*arguments)
    called = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    names = {f"diptych.{name}" for name in ("compute_mappings", "swiglu", "aggregate", "gelu", *STREAMS)}
    assert {name for name in called if name.startswith("diptych.")} == names


def test_fake_tensors_find_shapes_without_a_launch():
    with FakeTensorMode(), patch.object(kernels, "run", side_effect=AssertionError("a launch")):
        y = block(random(2, 3, 4, 8), random(32, 24), random(3), random(24), random(8, 16))
    assert y.shape == (2, 3, 4, 8)
    assert y.requires_grad

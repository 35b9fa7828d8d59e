"""What kernels do not take is named; what compilers and autocast do around them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch

from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels import tuning
from reference_torch import hyper_connections, ops
from tests.backends import backend_module
from tests.kernels.support import MODEL, R, rows

X, H = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
REFUSED = {
    "integers": (lambda: torch_ops.gelu(torch.zeros(3, dtype=torch.int32)), r"x: expected a type among .*, got int32"),
    "complex": (lambda: jax_ops.gelu(jnp.zeros(3, jnp.complex64)), r"x: expected a type among .*, got complex64"),
    "nine streams": (
        lambda: torch_ops.aggregate(torch.zeros(2, 9, 4), torch.zeros(2, 9)),
        r"x: expected at most 8 residual streams, got 9; impl='reference' supports any number",
    ),
    "h_pre": (
        lambda: torch_ops.aggregate(X, torch.zeros(2, 3, 5)),
        r"h_pre: expected shape \(2, 3, 4\), got \(2, 3, 5\)",
    ),
    "phi": (
        lambda: torch_ops.compute_mappings(X, torch.zeros(32, 23), torch.zeros(3), torch.zeros(24)),
        r"phi: expected shape \(32, 24\), got \(32, 23\)",
    ),
    "alpha of a read": (
        lambda: torch_ops.read_streams(X, torch.zeros(32, 24), torch.zeros(2), torch.zeros(24)),
        r"alpha: expected shape \(3,\), got \(2,\)",
    ),
    "square": (
        lambda: torch_ops.sinkhorn(torch.zeros(2, 3, 4)),
        r"logits: expected shape \(2, 3, 3\), got \(2, 3, 4\)",
    ),
    "iterations": (lambda: torch_ops.sinkhorn(torch.zeros(3, 3), 0), r"iterations: expected at least 1, got 0"),
    "last": (lambda: torch_ops.sinkhorn(torch.zeros(3, 3), 1, "both"), r"last: expected 'row' or 'column', got 'both'"),
    "two types": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8).half(), None, H),
        r"output: expected the type of residual, float32, got float16; cast one of them",
    ),
    "output without h_post": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8), None, None),
        r"write_streams: expected .*; got residual, output$",
    ),
    "nothing to write": (
        lambda: torch_ops.write_streams(X, None, None, None, None),
        r"write_streams: .* got residual$",
    ),
    "nothing to mix": (
        lambda: torch_ops.write_streams(None, torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 8), None, H),
        r"h_res: expected a residual to mix, got residual=None",
    ),
    "rate": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8), None, H, rate=1.0),
        r"rate: expected a number in \[0, 1\), got 1.0",
    ),
    "row_high": (
        lambda: torch_ops.write_streams(
            X, None, torch.zeros(2, 3, 8), None, H, 0.1, rows("torch", (2, 3))._replace(row_high=torch.zeros(1)), 0
        ),
        r"state.row_high: expected shape \(2, 3\), got \(1,\)",
    ),
    "no axes": (lambda: torch_ops.gelu(torch.tensor(1.0)), r"x: expected at least 1 axes, got shape \(\)"),
    "one axis": (lambda: torch_ops.sinkhorn(torch.zeros(3)), r"logits: expected at least 2 axes, got shape \(3,\)"),
    "odd gate": (lambda: torch_ops.swiglu(torch.zeros(3, 5)), r"x: expected gate and value side by side.* got 5"),
    "two devices": (
        lambda: torch_ops.aggregate(X, H.to("meta")),
        r"h_pre: expected the device of x, cpu, got meta; move one of them",
    ),
    "no kernels there": (
        lambda: torch_ops.gelu(X.to("meta")),
        r"x: expected a CUDA tensor, or a CPU tensor for the interpreter, got one on meta; impl='reference' runs",
    ),
    "transformed": (lambda: torch.func.vmap(torch_ops.gelu)(X), r"x: expected a dense .*torch\.func.*impl='reference'"),
    "differentiated": (
        lambda: torch.func.grad(lambda x: torch_ops.swiglu(x).sum())(X),
        r"x: expected a dense .*torch\.func.*impl='reference'",
    ),
    "impl": (lambda: ops.gelu(X, impl="cuda"), r"impl: expected one of \('auto', 'reference', 'triton'\), got 'cuda'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about both
def test_tangents_and_nested_tensors_are_refused():
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"x: .* has a tangent; impl='reference'"),
    ):
        torch_ops.aggregate(torch.autograd.forward_ad.make_dual(X, X), H)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="x: expected a dense array of the backend's framework, got a nested tensor"):
        torch_ops.gelu(nested)


def test_jax_triton_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(jax_ops, "jax_triton", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tuning, "choose", lambda build, *_: tuning.first(build))
    with pytest.raises(ImportError, match=r"expected jax-triton .* pip install 'jax-triton>=0\.3\.1' 'jax\[cuda13\]'"):
        backend_module("jax", "ops").gelu(jnp.zeros((3, 77)), impl="triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch without CUDA")
def test_cuda_asked_of_a_cpu_only_torch():
    from diptych.plans.config import TrainConfig
    from reference_torch.train import Trainer
    from tests.backends import tiny_corpus

    config = replace(MODEL, vocab_size=256)
    with pytest.raises(ValueError, match=r"device: expected one this PyTorch .* got 'cuda', and it sees no GPU; make"):
        Trainer(config, TrainConfig(), tiny_corpus(), device="cuda")


def test_autocast_hands_narrow_outputs_to_wide_streams():
    x, y, h_post = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 8), torch.rand(1, 3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_ops.write_streams(x, None, torch.nn.functional.linear(y, torch.eye(8)), None, h_post)
    torch.testing.assert_close(out, x + h_post[..., None] * y[:, :, None], rtol=1e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
def test_compiled_functions_call_kernels():
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: torch_ops.swiglu(x) * 2, backend="eager")
    out = compiled(x)
    torch.testing.assert_close(out, ops.swiglu(x, **R) * 2)
    cotangent = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, cotangent)
    (expected,) = torch.autograd.grad(ops.swiglu(x, **R) * 2, x, cotangent)
    torch.testing.assert_close(grad, expected)


def test_infinite_logits_are_not_hidden():
    logits = torch.zeros(2, 3, 3)
    logits[0, :, 1] = -torch.inf
    ours, reference = torch_ops.sinkhorn(logits), hyper_connections.sinkhorn(logits, **R)
    assert reference[0].isnan().all()
    torch.testing.assert_close(ours, reference, equal_nan=True)


def test_auto_in_jax_goes_by_where_an_array_lies(monkeypatch):
    """A machine with a GPU, an array on its CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    from jax_impl.ops import kernel_backend

    assert kernel_backend("auto", jnp.ones(3)) is None
    assert kernel_backend("triton", jnp.ones(3)) is jax_ops


def test_second_derivatives_are_refused():
    x = torch.randn(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(torch_ops.gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice: kernels have first derivatives only"):
        grad.sum().backward()

"""Every operation that has a kernel, its inputs, and the budget of rounding it is held to."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from diptych.plans.config import TransformerConfig
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from parity.compare import relative_difference
from reference_torch import hyper_connections, ops
from tests.backends import backend_module, normal

KERNEL_BACKENDS = {"torch": torch_ops, "jax": jax_ops}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
FEW = 32
DROPOUT = {"rate": 0.3, "site": 5}


class Case(NamedTuple):
    """An operation: the kernels', the reference's, and its inputs by shape; the first ``narrow`` have x's type."""

    kernel: Callable
    reference: Callable
    shapes: Callable[[tuple[int, int], int, int], list[tuple[int, ...]]]
    narrow: int


def rows(backend: str, lead: tuple[int, int], seed: int = 7, step: int = 3, device=None):
    array = jnp.arange if backend == "jax" else partial(torch.arange, device=device)
    return backend_module(backend, "ops").dropout_state(seed, step, array(lead[0]), array(lead[1]), lead[1])


def written(module, backend: str, x, h_res, y, bias, h_post, **impl):
    state = rows(backend, y.shape[:2], device=y.device if backend == "torch" else None)
    return module.write_streams(x, h_res, y, bias, h_post, state=state, **DROPOUT, **impl)


R = {"impl": "reference"}
DEEPSEEK = {"iterations": 7, "rms_epsilon": 0.1, "mhc_epsilon": 1e-2, "transposed": True}
CASES = {
    "sinkhorn": Case(
        lambda k, b: k.sinkhorn,
        lambda r, o, b: partial(r.sinkhorn, **R),
        lambda lead, s, d: [(*lead, s, s)],
        1,
    ),
    "sinkhorn, columns last": Case(
        lambda k, b: partial(k.sinkhorn, iterations=3, last="column"),
        lambda r, o, b: partial(r.sinkhorn, iterations=3, last="column", **R),
        lambda lead, s, d: [(*lead, s, s)],
        1,
    ),
    "compute_mappings": Case(
        lambda k, b: k.compute_mappings,
        lambda r, o, b: partial(r.compute_mappings, **R),
        lambda lead, s, d: [(*lead, s, d), (s * d, s * (s + 2)), (3,), (s * (s + 2),)],
        1,
    ),
    "compute_mappings, with epsilon, transposed": Case(
        lambda k, b: partial(k.compute_mappings, **DEEPSEEK),
        lambda r, o, b: partial(r.compute_mappings, **DEEPSEEK, **R),
        lambda lead, s, d: [(*lead, s, d), (s * d, s * (s + 2)), (3,), (s * (s + 2),)],
        1,
    ),
    "aggregate": Case(
        lambda k, b: k.aggregate,
        lambda r, o, b: partial(r.aggregate, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, s)],
        1,
    ),
    "read_streams": Case(
        lambda k, b: k.read_streams,
        lambda r, o, b: partial(r.read_streams, **R),
        lambda lead, s, d: [(*lead, s, d), (s * d, s * (s + 2)), (3,), (s * (s + 2),)],
        2,
    ),
    "apply_h_res": Case(
        lambda k, b: lambda x, h: k.apply_h_res(h, x),
        lambda r, o, b: lambda x, h: r.apply_h_res(h, x, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, s, s)],
        1,
    ),
    "apply_h_post": Case(
        lambda k, b: k.apply_h_post,
        lambda r, o, b: partial(r.apply_h_post, **R),
        lambda lead, s, d: [(*lead, d), (d,), (*lead, s)],
        1,
    ),
    "write_streams, plain": Case(
        lambda k, b: lambda x, y, h: k.write_streams(x, None, y, None, h),
        lambda r, o, b: lambda x, y, h: r.write_streams(x, None, y, None, h, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, d), (*lead, s)],
        2,
    ),
    "write_streams": Case(
        lambda k, b: lambda x, y, *hs: written(k, b, x, hs[0], y, *hs[1:]),
        lambda r, o, b: lambda x, y, *hs: written(r, b, x, hs[0], y, *hs[1:], **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, d), (*lead, s, s), (d,), (*lead, s)],
        2,
    ),
    "swiglu": Case(
        lambda k, b: k.swiglu,
        lambda r, o, b: partial(o.swiglu, **R),
        lambda lead, s, d: [(*lead, 2 * d)],
        1,
    ),
    "gelu": Case(
        lambda k, b: k.gelu,
        lambda r, o, b: partial(o.gelu, **R),
        lambda lead, s, d: [(*lead, d)],
        1,
    ),
}


def inputs_of(case: Case, lead: tuple[int, int], streams: int, width: int, seed: int) -> list[np.ndarray]:
    shapes = case.shapes(lead, streams, width)
    arrays = [normal(seed + place, *shape) for place, shape in enumerate(shapes)]
    if len(shapes) == 4:  # phi: logits of order 1
        arrays[1] /= np.sqrt(streams * width)
    return arrays


def torch_gradients(function: Callable, arrays: list[torch.Tensor], cotangents: list[torch.Tensor]):
    arrays = [a.clone().requires_grad_() for a in arrays]
    outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, arrays, cotangents)]


def error(a: torch.Tensor, exact: torch.Tensor) -> float:
    return relative_difference(a.double().cpu().numpy(), exact.cpu().numpy())


def assert_within_budget(
    case: Case, arrays: list[np.ndarray], dtype: str, device: str = "cpu", backend: Callable | None = None
) -> None:
    """Outputs and all gradients of the PyTorch backend against float64, by the eager reference's own error.

    backend: takes the same arguments as torch_gradients after the function; None: PyTorch's.
    """
    narrow = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    given = [torch.from_numpy(a).to(device, narrow if i < case.narrow else wide) for i, a in enumerate(arrays)]
    reference = case.reference(hyper_connections, ops, "torch")
    shapes = [o.shape for o in torch_gradients_shapes(reference, given)]
    # Cotangents that the narrow type holds exactly: their rounding is nobody's error.
    cotangents = [torch.from_numpy(normal(99 + i, *shape)).to(device, narrow) for i, shape in enumerate(shapes)]
    exact = torch_gradients(reference, [a.double() for a in given], cotangents)
    eager = torch_gradients(reference, given, cotangents)
    ours = (backend or partial(torch_gradients, case.kernel(torch_ops, "torch")))(given, cotangents)
    for place, (kernel, plain, true) in enumerate(zip(ours, eager, exact, strict=True)):
        assert kernel.dtype == plain.dtype, f"array {place}"
        assert kernel.shape == plain.shape, f"array {place}"
        band = ROUNDING[str(kernel.dtype).removeprefix("torch.")] * (8 if kernel.dtype == wide else 1)
        if kernel.numel() < FEW:  # of few numbers the reference's own error may be small by luck
            band = max(band, 2 * ROUNDING[dtype])
        budget = 1e-13 if dtype == "float64" else 2 * (error(plain, true) + band)
        assert error(kernel, true) <= budget, f"array {place}: {error(kernel, true):.1e} > {budget:.1e}"


def torch_gradients_shapes(function: Callable, arrays: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        outputs = function(*arrays)
    return outputs if isinstance(outputs, tuple) else (outputs,)


MODEL = TransformerConfig(
    hidden_size=12,
    num_layers=2,
    num_attention_heads=2,
    layer_pattern="attention+gelu,attention",
    vocab_size=13,
    seq_length=5,
    enable_hyper_connections=True,
    num_residual_streams=3,
    sinkhorn_iterations=4,
    hidden_dropout=0.25,
    params_dtype="float64",
)

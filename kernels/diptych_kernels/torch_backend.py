"""The PyTorch backend: kernels as differentiable functions of tensors.

CUDA tensors run compiled kernels, CPU tensors run the interpreter. Second derivatives raise an error.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from diptych_kernels import assembler, library, tuning
from diptych_kernels.api import DIFFERENTIATED_TWICE, Functions
from diptych_kernels.autodiff_rules import Operation
from diptych_kernels.device_tables import device_table
from diptych_kernels.launch_configs import Launch

UNWRITTEN = float("nan")
"""Value of the interpreter's outputs before a launch: elements that a kernel fails to write must be visible."""
REMEMBERED_LAUNCHES = 4096
"""Launches whose compiled kernels are remembered, because Triton takes longer to find one than to launch it."""
_COMPILED: dict[tuple[Launch, tuple[Any, ...]], tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {}
"""Compiled kernel, grid and constants, by launch and inputs."""


class _KernelFunction(torch.autograd.Function):
    """An Operation as a differentiable function of tensors."""

    @staticmethod
    def forward(ctx, operation, static, *inputs):
        outputs, saved = operation.forward(_BACKEND, static, *inputs)
        ctx.operation = operation
        ctx.static = static
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = ctx.operation.backward(_BACKEND, ctx.static, saved, *grads)
        if torch.is_grad_enabled():  # create_graph: the gradients may be differentiated
            gradients = _FirstDerivativeOnly.apply(len(gradients), *gradients, *saved, *grads)
        return None, None, *gradients


class _FirstDerivativeOnly(torch.autograd.Function):
    """The identity of gradients, connected to the arrays they depend on, whose derivative raises an error."""

    @staticmethod
    def forward(ctx, count, *gradients_and_sources):
        return tuple(None if x is None else x.view_as(x) for x in gradients_and_sources[:count])

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(DIFFERENTIATED_TWICE)


class TorchBackend(Functions):
    """The kernel functions for tensors; CUDA tensors run compiled kernels, CPU tensors the interpreter."""

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Launch the kernel that ``build(block, **sizes)`` describes on the device of the inputs."""
        inputs = tuple(x.detach().contiguous() for x in inputs)
        device = inputs[0].device
        if device.type == "cpu":
            return run(tuning.built_launch(build, tuning.first(build), sizes), inputs)
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            measured = None if torch.cuda.is_current_stream_capturing() else partial(measure, inputs=inputs)
            block = tuning.choose(build, sizes, _device(device.index)[0], measured)
            return run(tuning.built_launch(build, block, sizes), inputs)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Cast x to another type, differentiably."""
        return x.to(getattr(torch, dtype))

    def apply(self, operation: Operation, static: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of an operation, differentiable once by its backward rule."""
        is_traced = torch.compiler.is_compiling() or any(isinstance(x, FakeTensor) for x in inputs)
        if is_traced and library.is_registered(operation, static):
            return library.apply(operation, static, *inputs)
        applied: Any = _KernelFunction.apply
        if torch.compiler.is_compiling():  # the compiler calls the launches without tracing them
            applied = torch.compiler.disable(applied)
        return applied(operation, static, *inputs)

    def cast_like(self, x: Tensor, residual: Tensor) -> Tensor:
        """Cast x to the type of residual under autocast, which returns a sublayer's output in its own type."""
        return x.to(residual.dtype) if torch.is_autocast_enabled(residual.device.type) else x

    def returns_inputs(self, x: Tensor) -> bool:
        """Return whether x needs a gradient and is not traced: operations of torch.library may not return inputs."""
        return x.requires_grad and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)

    def counter(self, step: int, like: Tensor) -> Tensor:
        """Return the training step as an int64 tensor [1], by a fill on the device instead of a copy from the host."""
        return torch.full((1,), step, dtype=torch.int64, device=like.device)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """Return zeros on the device of ``like``."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)

    def integers(self, x: Any, like: Tensor) -> Tensor:
        """Move an array of integers, possibly of numpy, to the device of ``like``.

        Tables of numpy that were moved before are remembered (``device_tables``).
        """
        is_traced = torch.compiler.is_compiling() or isinstance(like, FakeTensor)
        if like.device.type == "cuda" and not is_traced and isinstance(x, np.ndarray):
            return device_table(x, like.device)
        return torch.as_tensor(np.array(x) if isinstance(x, np.ndarray) else x, device=like.device)

    def array_kind(self, x: Any) -> str | None:
        """Return None for a dense tensor, else the name of the given type or layout, or what transforms it."""
        if not isinstance(x, Tensor):
            return type(x).__name__
        if x.is_nested:
            return "a nested tensor"
        if not torch.compiler.is_compiling() and _is_transformed(x):
            return "one that torch.func transforms or that has a tangent; impl='reference' accepts it"
        return None if x.layout is torch.strided else str(x.layout).removeprefix("torch.")

    def is_traced(self, x: Any) -> bool:
        """Return False: PyTorch's numbers are known when a kernel is launched."""
        del x
        return False

    def check_devices(self, **arrays: Tensor | None) -> None:
        """Reject tensors on different devices, and on devices other than the CPU and CUDA."""
        devices = {name: x.device for name, x in arrays.items() if x is not None}
        (first, device), *others = devices.items()
        for name, other in others:
            if other != device:
                raise ValueError(f"{name}: expected the device of {first}, {device}, got {other}; move one of them")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{first}: expected a CUDA tensor, or a CPU tensor for the interpreter, got one on {device}; "
                "impl='reference' runs anywhere"
            )


def _is_transformed(x: Tensor) -> bool:
    """Return True if torch.func (vmap, grad, jvp, ...) has wrapped a tensor or it has a forward-mode tangent."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore[reportAttributeAccessIssue]
        return True
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def run(launch: Launch, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a launch on contiguous inputs, compiled on CUDA and interpreted on the CPU, and return its outputs.

    An empty grid gives outputs of 0.
    """
    device = inputs[0].device
    outputs = tuple(torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in launch.outputs)
    if 0 in launch.grid:
        return tuple(output.zero_() for output in outputs)
    arguments = (*inputs, *launch.scalars, *outputs)
    if device.type == "cuda":
        _launch(launch, arguments, (device.index, *((x.dtype, x.data_ptr() % 16) for x in inputs)))
        return outputs
    from diptych_kernels.interpreter import interpret

    for output in outputs:
        output.fill_(UNWRITTEN)
    interpret(tuning.kernel_function(launch.kernel), launch.grid, arguments, dict(launch.constants))
    return outputs


def _launch(launch: Launch, arguments: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
    """Launch a kernel on a GPU.

    Args:
        launch: the launch.
        arguments: inputs, scalars and outputs.
        inputs: device, and type and alignment of every input, on which the compiled kernel depends besides the launch.
    """
    remembered = _COMPILED.get((launch, inputs))
    if remembered is not None:
        compiled, grid, constants = remembered
        compiled[grid](*arguments, *constants)
        return
    kernel = tuning.kernel_function(launch.kernel)
    named = dict(launch.constants)
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True)
    with assembler.for_launch(launch, _device(inputs[0])[1]):
        compiled = kernel[launch.grid](*arguments, **named, **options)
    if len(_COMPILED) >= REMEMBERED_LAUNCHES:
        _COMPILED.clear()
    constants = tuple(named[name] for name in kernel.arg_names[len(arguments) :])
    _COMPILED[launch, inputs] = compiled, (*launch.grid, 1, 1)[:3], constants


@cache
def _device(index: int) -> tuple[str, tuple[int, int]]:
    """Return the name and compute capability of a CUDA device."""
    return torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)


def measure(launch: Launch, inputs: tuple[Tensor, ...]) -> float:
    """Return the median time of a launch on a GPU, in seconds."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(lambda: run(launch, inputs), warmup=10, rep=40, return_mode="median")
    return milliseconds / 1e3


_BACKEND = TorchBackend()
for _operation in library.OPERATIONS:
    library.register(_operation, _BACKEND)
sinkhorn = _BACKEND.sinkhorn
compute_mappings = _BACKEND.compute_mappings
aggregate = _BACKEND.aggregate
apply_h_res = _BACKEND.apply_h_res
apply_h_post = _BACKEND.apply_h_post
read_streams = _BACKEND.read_streams
write_streams = _BACKEND.write_streams
swiglu = _BACKEND.swiglu
gelu = _BACKEND.gelu
delta_rule = _BACKEND.delta_rule

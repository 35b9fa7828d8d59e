"""The JAX backend: kernels as differentiable functions of arrays, under jit, scan, checkpoint, shard_map and pmap.

A launch is lowered to a jax-triton call for CUDA and to a callback of the interpreter for the CPU; a traced function
contains both. Callbacks support float64 if jax_enable_x64 is set. If a program with collectives runs on many forced CPU
devices, set NPROC=32 in the environment before JAX is used. Otherwise callbacks of more devices than JAX has threads
wait for each other.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diptych_kernels import assembler, tuning
from diptych_kernels.api import DIFFERENTIATED_TWICE, Functions
from diptych_kernels.autodiff_rules import Operation, dtype_name
from diptych_kernels.delta_rule.launch_configs import even_table
from diptych_kernels.launch_configs import Launch
from diptych_kernels.mesh_axes import match_varying_axes


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(operation: Operation, static: Any, *inputs: Array | None) -> tuple[Array, ...]:
    """Return the outputs of an operation; its derivative is the operation's backward rule."""
    return operation.forward(_BACKEND, static, *inputs)[0]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _apply_forward(operation: Operation, static: Any, *inputs: Array | None) -> tuple[tuple, tuple]:
    """Run forward with the values saved for backward; its derivative rule is used by second derivatives only."""
    return operation.forward(_BACKEND, static, *inputs)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(operation: Operation, static: Any, saved: tuple, grads: tuple) -> tuple:
    """Run the operation's backward, whose derivative raises an error."""
    return tuple(operation.backward(_BACKEND, static, saved, *grads))


@_apply_forward.defjvp
@_gradients.defjvp
def _no_second_derivative(operation: Operation, static: Any, primals: tuple, tangents: tuple) -> tuple:
    """Raise the error of second derivatives."""
    raise RuntimeError(DIFFERENTIATED_TWICE)


def _apply_backward(operation: Operation, static: Any, saved: tuple, grads: tuple) -> tuple:
    """Return the gradients of an operation's inputs."""
    return _gradients(operation, static, saved, grads)


_apply.defvjp(_apply_forward, _apply_backward)


class JaxBackend(Functions):
    """The kernel functions for arrays; XLA selects the compiled kernel on CUDA and the interpreter on the CPU."""

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Array) -> tuple[Array, ...]:
        """Launch the kernel that ``build(block, **sizes)`` describes, on the platform that XLA lowers for."""
        if jax.default_backend() == "cpu":
            block = tuning.first(build)
        else:
            block = tuning.choose(build, sizes, jax.local_devices()[0].device_kind, partial(measure, inputs=inputs))
        return run(build(block, **sizes), *inputs)

    def cast(self, x: Array, dtype: str) -> Array:
        """Cast x to another type, differentiably."""
        return x.astype(dtype)

    def apply(self, operation: Operation, static: Any, *inputs: Array | None) -> tuple[Array, ...]:
        """Return the outputs of an operation, differentiable once by its backward rule."""
        return _apply(operation, static, *match_varying_axes(inputs))

    def cast_like(self, x: Array, residual: Array) -> Array:
        """Return x unchanged, because JAX has no autocast."""
        del residual
        return x

    def returns_inputs(self, x: Array) -> bool:
        """Return True: outputs are values."""
        del x
        return True

    def counter(self, step: int | Array, like: Array) -> Array:
        """Return the training step as a uint32 array [1]."""
        del like
        return jnp.asarray(step).astype(jnp.uint32).reshape(1)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        """Return zeros on JAX's default device."""
        del like
        return jnp.zeros(shape, dtype)

    def integers(self, x: Any, like: Array) -> Array:
        """Convert an array of integers, possibly of numpy."""
        del like
        return jnp.asarray(x)

    def array_kind(self, x: Any) -> str | None:
        """Return None for a JAX array, else the name of the given type."""
        return None if isinstance(x, Array) else type(x).__name__

    def is_traced(self, x: Any) -> bool:
        """Return True for every array, traced or on a device, because reading one would block."""
        return isinstance(x, Array)

    def check_devices(self, **arrays: Array | None) -> None:
        """Return without a check, because JAX rejects arrays on different devices."""


@partial(jax.jit, static_argnums=0)
def run(launch: Launch, *inputs: Array) -> tuple[Array, ...]:
    """Run a launch, compiled on CUDA and interpreted on the CPU, and return its outputs.

    An empty grid gives outputs of 0.
    """
    if 0 in launch.grid:
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in launch.outputs)
    outputs = jax.custom_batching.sequential_vmap(partial(_dispatch, launch))(*inputs)
    return tuple(match_varying_axes((*outputs, *inputs))[: len(outputs)])


def _dispatch(launch: Launch, *inputs: Array) -> tuple[Array, ...]:
    """Run a launch by the branch of XLA's platform; a CPU without jax-triton has only the branch of the CPU."""
    if jax.default_backend() == "cpu" and jax_triton() is None:
        return jax.lax.platform_dependent(*inputs, cpu=partial(_interpreted, launch))
    return jax.lax.platform_dependent(*inputs, cpu=partial(_interpreted, launch), cuda=partial(_compiled, launch))


def _outputs(launch: Launch) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes and types of the outputs of a launch."""
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in launch.outputs)


def _compiled(launch: Launch, *inputs: Array) -> tuple[Array, ...]:
    """Run a launch on CUDA by jax-triton.

    Raises:
        ImportError: jax-triton or JAX's CUDA plugin is not installed.
        RuntimeError: the launch has matrix products, and the CUDA version of JAX's plugin miscompiles them.
    """
    module = jax_triton()
    if module is None:
        raise ImportError(
            "impl: expected jax-triton and JAX's CUDA plugin, which launch Triton kernels on a GPU, got an "
            "installation without; pip install 'jax-triton>=0.3.1' 'jax[cuda13]', or choose impl='reference'"
        )
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", None))  # a CPU, which can lower for a GPU, has none
    assembler.check_plugin(launch, device.client.platform_version, capability)
    return module.triton_call(
        *inputs,
        *launch.scalars,
        kernel=tuning.kernel_function(launch.kernel),
        out_shape=_outputs(launch),
        grid=launch.grid,
        name=launch.kernel,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,
        **dict(launch.constants),
    )


@cache
def jax_triton() -> Any | None:
    """Return the module jax_triton; None if it or JAX's GPU plugin is not installed."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    except ImportError:
        return None
    finally:  # importing jax_triton clears TRITON_CACHE_DIR for the whole process
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


def _interpreted(launch: Launch, *inputs: Array) -> tuple[Array, ...]:
    """Run a launch on the CPU by a callback of the interpreter."""
    return jax.pure_callback(partial(_interpret, launch), _outputs(launch), *inputs, vmap_method="sequential")


def _interpret(launch: Launch, *inputs: Any) -> tuple[np.ndarray, ...]:
    """Interpret a launch on an XLA thread with copies of its buffers, without calls into JAX."""
    import torch

    from diptych_kernels import torch_backend as torch_ops

    with torch.no_grad(), _subnormal_numbers():
        outputs = torch_ops.run(launch, tuple(_tensor(np.array(x)) for x in inputs))
    types = [jnp.dtype(dtype) for _, dtype in launch.outputs]
    return tuple(_bits(x).numpy().view(dtype) for x, dtype in zip(outputs, types, strict=True))


@contextmanager
def _subnormal_numbers() -> Iterator[None]:
    """Enable subnormal numbers, which XLA's threads flush to 0, so that results match those of PyTorch."""
    import torch

    tiny = np.full(1, np.finfo(np.float32).tiny)
    flushes = not (tiny / 2).any()
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _tensor(x: np.ndarray) -> Any:
    """Convert an array to a tensor; bfloat16 is reinterpreted, because PyTorch does not accept numpy's bfloat16."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _bits(x: Any) -> Any:
    """Reinterpret a bfloat16 tensor as int16, because numpy has no bfloat16; return other tensors unchanged."""
    import torch

    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def measure(launch: Launch, inputs: Sequence[Any], repeats: int = 20, rounds: int = 8) -> float:
    """Return the median time of a launch in seconds.

    One program runs several launches on random arrays, which excludes the host's time. Each launch reads an element
    that depends on the one before it; otherwise XLA would run equal launches once.

    Args:
        launch: the launch.
        inputs: arrays with the shapes and types of the inputs; they may be traced.
        repeats: launches per run.
        rounds: number of runs; the first two are warm-up.
    """

    @jax.jit
    def chain(*arrays: Array) -> tuple[Array, ...]:
        return jax.lax.fori_loop(0, repeats, lambda _, now: _after(now, run(launch, *now)), arrays)

    with jax.ensure_compile_time_eval():
        arrays = examples(launch, inputs)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready(chain(*arrays))
            times.append((time.perf_counter() - start) / repeats)
    return float(np.median(times[2:]))


def _after(arrays: tuple[Array, ...], outputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the arrays unchanged, but computed after the outputs: an element of the smallest one depends on them."""
    sizes = {index: x.size for index, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating) and x.size}
    place = min(sizes, key=sizes.__getitem__)
    x = arrays[place]
    first = (0,) * x.ndim
    written = next(output for output in outputs if output.size).ravel()[0].astype(x.dtype)
    is_above = written > jnp.finfo(x.dtype).max  # never, unless it is infinite
    x = x.at[first].set(jnp.where(is_above, written, x[first]))
    return *arrays[:place], x, *arrays[place + 1 :]


def examples(launch: Launch, inputs: Sequence[Any]) -> list[Array]:
    """Return example inputs for a launch: random arrays, and tables that cover all tokens."""
    named = [(index, x.shape, jnp.dtype(dtype_name(x))) for index, x in enumerate(inputs)]
    is_table = [len(shape) == 2 and jnp.issubdtype(dtype, jnp.integer) for _, shape, dtype in named]
    tokens = max((shape[0] for _, shape, _ in named if len(shape) in (2, 3)), default=0)
    size = int(dict(launch.constants).get("C", 1))
    return [
        jnp.asarray(even_table(shape, tokens, size)) if table else _random(index, shape, dtype)
        for table, (index, shape, dtype) in zip(is_table, named, strict=True)
    ]


def _random(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return normal random numbers, or integers that are all ``seed``."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(jax.random.key(seed), shape, dtype)
    return jnp.full(shape, seed, dtype)


_BACKEND = JaxBackend()
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

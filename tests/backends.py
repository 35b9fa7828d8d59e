"""One way to call either backend from numpy: outputs and gradients of all inputs, under given cotangents."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import settings

from diptych.plans.config import DataConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference
from parity.implementations import OUTPUT, JaxImplementation, TorchImplementation, Values, make_inputs

BACKENDS = ("torch", "jax")
TORCH_FIRST = ("torch", pytest.param("jax", marks=pytest.mark.thorough))
"""Where JAX compiles so long that make check leaves it out."""
TORCH_DAILY = ("torch", pytest.param("jax", marks=pytest.mark.slow))
"""Where make test has seen JAX do nearly the same, and leaves it to make test-all."""
PACKAGES = {"torch": "reference_torch", "jax": "jax_impl"}
IMPLEMENTATIONS = {"torch": TorchImplementation, "jax": JaxImplementation}


def draws_are_fixed() -> bool:
    """Whether hypothesis draws what it draws in make test: then it can be asked that hard cases are among it.

    The new draws of make test-all may lack one by chance, the few of make check do.
    """
    return settings.get_current_profile_name() == "test"


def backend_module(backend: str, name: str):
    """A backend's module, e.g. ``backend_module("jax", "ops")``."""
    return importlib.import_module(f"{PACKAGES[backend]}.{name}")


def normal(seed: int, *shape: int, dtype=np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def call(backend: str, function: Callable, *inputs: np.ndarray):
    """The function's value as numpy; a tuple of arrays where it returns a tuple."""
    if backend == "torch":
        out = function(*(torch.from_numpy(np.ascontiguousarray(x)) for x in inputs))
        return tuple(o.numpy() for o in out) if isinstance(out, tuple) else out.numpy()
    return jax.tree.map(np.asarray, jax.jit(function)(*inputs))


def value_and_gradients(
    backend: str, function: Callable, inputs: Sequence[np.ndarray], seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs, and gradients of all floating inputs under normal cotangents drawn from ``seed``."""
    call = make_inputs(list(inputs))

    def cotangent(name, output) -> np.ndarray:
        return normal(seed + (0 if name == OUTPUT else int(name)), *output.shape)

    run = IMPLEMENTATIONS[backend](function, call).run(Values(call.arrays, {}), None, cotangent)
    return [*run.outputs.values()], [run.input_gradients[n] for n in call.arrays if n in run.input_gradients]


def around(backend: str, inner: Any, function: Callable) -> Any:
    """A module that calls a function with a module and the given arrays."""

    class Around(torch.nn.Module if backend == "torch" else nnx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *arrays):
            return function(self.inner, *arrays)

        if backend == "jax":
            __call__ = forward

    return Around()


def assert_close(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> None:
    """Equal count, shapes and types, and every array within the tolerance, norm-wise relative."""
    for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype, f"array {place}: {a.dtype} against {b.dtype}"
        difference = relative_difference(np.asarray(a), np.asarray(b))
        assert difference <= tolerance, f"array {place}: relative difference {difference:.1e} > {tolerance:.1e}"


def model_gradients(
    backend: str, config: TransformerConfig, tokens: np.ndarray, cotangent: np.ndarray, **arguments
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of a new model and every parameter's gradient under a cotangent of the logits."""
    call = make_inputs([tokens], arguments)
    model = IMPLEMENTATIONS[backend](backend_module(backend, "transformer").GPTModel(config), call)
    run = model.run(Values(call.arrays, model.parameters), config.params_dtype, {OUTPUT: cotangent})
    return run.outputs[OUTPUT], run.parameter_gradients


@contextlib.contextmanager
def rounds(count: int) -> Iterator[None]:
    """As many rounds of random numbers in both backends."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in BACKENDS:
            patch.setattr(backend_module(backend, "ops"), "ROUNDS", count)
        yield


def tiny_corpus(length: int = 4096, seed: int = 0) -> Corpus:
    """Repetitive text that a tiny model learns in a few steps."""
    data = np.frombuffer((b"the quick brown fox jumps over the lazy dog. " * (length // 40 + 1))[:length], np.uint8)
    cut = int(length * (1 - DataConfig().validation_fraction))
    return Corpus("foxes", data[:cut], data[cut:], seed)


def trainers(config: TransformerConfig, train, corpus: Corpus | None = None):
    """A new trainer of each backend, for the same run."""
    corpus = corpus or tiny_corpus()
    return backend_module("torch", "train").Trainer(config, train, corpus, device="cpu"), JaxTrainer(
        config, train, corpus
    )

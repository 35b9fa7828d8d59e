"""One way to call either backend from numpy: outputs and gradients of all inputs, under given cotangents."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import settings

from diptych.plans.config import DataConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference

BACKENDS = ("torch", "jax")
TORCH_FIRST = ("torch", pytest.param("jax", marks=pytest.mark.thorough))
"""Where JAX compiles so long that make check leaves it out."""
TORCH_DAILY = ("torch", pytest.param("jax", marks=pytest.mark.slow))
"""Where make test has seen JAX do nearly the same, and leaves it to make test-all."""
PACKAGES = {"torch": "reference_torch", "jax": "jax_impl"}


def draws_are_fixed() -> bool:
    """Whether hypothesis draws what it draws in make test: then it can be asked that hard cases are among it.

    The new draws of make test-all may lack one by chance, the few of make check do.
    """
    return settings.default.derandomize and settings.default.max_examples >= 25


def room(backend: str, name: str):
    """A backend's module, e.g. ``room("jax", "ops")``."""
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
    if backend == "torch":
        arrays = [torch.from_numpy(np.ascontiguousarray(x)) for x in inputs]
        arrays = [a.requires_grad_() if a.is_floating_point() else a for a in arrays]
        outputs = _listed(function(*arrays))
        cotangents = [torch.from_numpy(c) for c in _cotangents([o.detach().numpy() for o in outputs], seed)]
        gradients = torch.autograd.grad(outputs, [a for a in arrays if a.requires_grad], cotangents)
        return [o.detach().numpy() for o in outputs], [g.numpy() for g in gradients]

    floating = [i for i, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)]

    def of_floating(*values):
        arrays = [jnp.asarray(x) for x in inputs]
        for place, value in zip(floating, values, strict=True):
            arrays[place] = value
        return _listed(function(*arrays))

    @jax.jit
    def run(values, cotangents):
        outputs, pull_back = jax.vjp(of_floating, *values)
        return outputs, pull_back(cotangents)

    values = [inputs[i] for i in floating]
    shapes = jax.eval_shape(of_floating, *values)
    outputs, gradients = run(values, _cotangents(shapes, seed))
    return [np.asarray(o) for o in outputs], [np.asarray(g) for g in gradients]


def _listed(outputs) -> list:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _cotangents(outputs, seed: int) -> list[np.ndarray]:
    return [normal(seed + i, *o.shape).astype(o.dtype) for i, o in enumerate(outputs)]


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
    if backend == "torch":
        model = room(backend, "transformer").GPTModel(config)
        logits = model(torch.from_numpy(tokens), **arguments)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(logits, parameters, torch.from_numpy(cotangent))
        return logits.detach().numpy(), {n: g.numpy() for n, g in zip(names, gradients, strict=True)}
    graph, params = nnx.split(room(backend, "transformer").GPTModel(config), nnx.Param)

    @jax.jit
    def run(params):
        logits, pull_back = jax.vjp(lambda p: nnx.merge(graph, p)(jnp.asarray(tokens), **arguments), params)
        return logits, pull_back(jnp.asarray(cotangent))[0]

    logits, gradients = run(params)
    flat = nnx.to_flat_state(gradients)
    return np.asarray(logits), {".".join(path): np.asarray(leaf[...]) for path, leaf in flat}


@contextlib.contextmanager
def rounds(count: int) -> Iterator[None]:
    """As many rounds of random numbers in both backends."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in BACKENDS:
            patch.setattr(room(backend, "ops"), "ROUNDS", count)
        yield


def tiny_corpus(length: int = 4096, seed: int = 0) -> Corpus:
    """Repetitive text that a tiny model learns in a few steps."""
    data = np.frombuffer((b"the quick brown fox jumps over the lazy dog. " * (length // 40 + 1))[:length], np.uint8)
    cut = int(length * (1 - DataConfig().validation_fraction))
    return Corpus("foxes", data[:cut], data[cut:], seed)


def trainers(config: TransformerConfig, train, corpus: Corpus | None = None):
    """A new trainer of each backend, for the same run."""
    corpus = corpus or tiny_corpus()
    return room("torch", "train").Trainer(config, train, corpus, device="cpu"), JaxTrainer(config, train, corpus)

"""Gradients of one small model in both backends, and a failing variant, for notebook 00."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_impl.mlp
import jax_impl.saving
import reference_torch.saving
from diptych.plans.config import DataConfig, TransformerConfig
from diptych.plans.model.data import load_corpus
from jax_impl import GPTModel as JaxModel
from parity.compare import relative_difference
from parity.divergence import computing_in, initial_parameters
from reference_torch import GPTModel as TorchModel

MODEL = TransformerConfig(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    seq_length=32,
    enable_hyper_connections=True,
    activation="gelu",
)
PLAIN = replace(MODEL, hidden_size=16, init_method_std=0.1, enable_hyper_connections=False)
"""A narrower model with one residual stream."""
CORPUS = load_corpus(DataConfig())
BATCH = CORPUS.batch(step=0, batch_size=4, seq_length=MODEL.seq_length)

Gradients = Mapping[str, np.ndarray]
Step = Callable[[Mapping[str, np.ndarray]], tuple[float, Gradients]]
"""Function of the parameters that returns the loss and all gradients, by canonical name."""


def torch_step(config: TransformerConfig) -> Step:
    """Return one forward and backward of PyTorch on BATCH."""

    def step(parameters: Mapping[str, np.ndarray]) -> tuple[float, Gradients]:
        model = TorchModel(config)
        reference_torch.saving.import_parameters(model, parameters)
        loss = model(torch.from_numpy(BATCH.tokens), torch.from_numpy(BATCH.targets))
        loss.backward()
        return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}

    return step


def jax_step(config: TransformerConfig) -> Step:
    """Return one forward and backward of JAX on BATCH, which is compiled once."""
    graph, params = nnx.split(JaxModel(config), nnx.Param)
    batch = jnp.asarray(BATCH.tokens), jnp.asarray(BATCH.targets)
    compiled = jax.jit(jax.value_and_grad(lambda params: nnx.merge(graph, params)(*batch)))

    def step(parameters: Mapping[str, np.ndarray]) -> tuple[float, Gradients]:
        loss, gradients = compiled(jax_impl.saving.import_parameters(params, parameters))
        return loss.item(), jax_impl.saving.export_parameters(gradients)

    return step


def run_both(config: TransformerConfig) -> dict[tuple[str, str], tuple[float, Gradients]]:
    """Return loss and gradients at equal initial parameters, by backend and dtype."""
    return {
        (backend, dtype): step(computing_in(config, dtype))(initial_parameters(config))
        for backend, step in (("PyTorch", torch_step), ("JAX", jax_step))
        for dtype in ("float32", "float64")
    }


PAIRS = {
    "PyTorch, float32, from JAX's float64": (("PyTorch", "float32"), ("JAX", "float64")),
    "JAX, float32, from PyTorch's float64": (("JAX", "float32"), ("PyTorch", "float64")),
    "between backends, float64": (("PyTorch", "float64"), ("JAX", "float64")),
}
"""The two results of each curve, by its label."""


def errors_by_name(config: TransformerConfig) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the relative difference of every gradient by label of PAIRS and name, and the losses by label."""
    found = run_both(config)
    errors = {
        label: {name: relative_difference(found[ours][1][name], found[theirs][1][name]) for name in found[ours][1]}
        for label, (ours, theirs) in PAIRS.items()
    }
    return errors, {f"{backend}, {dtype}": loss for (backend, dtype), (loss, _) in found.items()}


def errors_by_depth(depths: Sequence[int]) -> dict[str, list[float]]:
    """Return the worst relative difference of a gradient of PLAIN with each number of layers, by label of PAIRS."""
    errors = [errors_by_name(replace(PLAIN, num_layers=depth))[0] for depth in depths]
    return {label: [max(entry[label].values()) for entry in errors] for label in PAIRS}


def _tanh_gelu(x: jax.Array, impl: str = "auto") -> jax.Array:
    return jax.nn.gelu(x)  # approximate=True is JAX's default


@contextmanager
def wrong_gelu() -> Iterator[None]:
    """Replace GELU in JAX by its approximation with tanh: the failing variant."""
    with mock.patch.object(jax_impl.mlp, "gelu", _tanh_gelu):
        yield


def errors_by_std(stds: Sequence[float], dtypes: Sequence[str]) -> dict[str, list[float]]:
    """Return the worst difference of a gradient between the backends for standard deviations of initial weights.

    Returns:
        Differences by "between backends, <dtype>" and "failing: tanh in JAX, <dtype>".
    """
    starts = [initial_parameters(replace(PLAIN, init_method_std=std)) for std in stds]
    curves = {}
    for dtype in dtypes:
        config = computing_in(PLAIN, dtype)
        expected = [torch_step(config)(start)[1] for start in starts]

        def worst(step: Step, expected: list[Gradients] = expected) -> list[float]:
            pairs = zip((step(start)[1] for start in starts), expected, strict=True)
            return [max(relative_difference(ours[name], theirs[name]) for name in theirs) for ours, theirs in pairs]

        curves[f"between backends, {dtype}"] = worst(jax_step(config))
        with wrong_gelu():
            curves[f"failing: tanh in JAX, {dtype}"] = worst(jax_step(config))
    return curves

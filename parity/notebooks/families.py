"""Hidden states and gradients of a published architecture, layer by layer, for notebook 09."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

import jax_impl.saving
import reference_torch.saving
from diptych.plans.checkpoint import MODEL, read_checkpoint, recorded_model, split_arrays
from diptych.plans.config import TransformerConfig
from diptych.plans.families.family import Family
from diptych.plans.families.folder import Imported
from diptych.plans.families.layouts import assemble
from jax_impl.transformer import GPTModel as JaxModel
from jax_impl.transformer import TransformerLayer as JaxLayer
from parity.compare import relative_difference
from parity.divergence import computing_in
from reference_torch.transformer import GPTModel as TorchModel

Arrays = Mapping[str, np.ndarray]


class Results(NamedTuple):
    """Results of one forward and backward."""

    states: list[np.ndarray]
    """Output of each layer, [B, T, D], and the logits, [B, T, V]."""
    gradients: Arrays
    """Gradients of the mean loss in nats per token, by the names of the model."""


def read_model(imported: Imported) -> tuple[TransformerConfig, Arrays]:
    """Return configuration and parameters of an imported model, in the dtype of its checkpoint."""
    checkpoint = read_checkpoint(imported.checkpoint)
    return recorded_model(checkpoint.settings), split_arrays(checkpoint.arrays, MODEL)


@contextmanager
def _observed(layers: Sequence[nn.Module]) -> Iterator[list[np.ndarray]]:
    """Collect what layers of PyTorch return."""
    found: list[np.ndarray] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).detach().double().numpy())

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def run_torch(model: nn.Module, layers: Sequence[nn.Module], logits_of: Callable, tokens: np.ndarray) -> Results:
    """Run any model of PyTorch.

    Args:
        model: the model.
        layers: its layers.
        logits_of: function of token ids [B, T - 1] that returns logits.
        tokens: token ids. [B, T]
    """
    inputs = torch.from_numpy(tokens[:, :-1])
    targets = torch.from_numpy(tokens[:, 1:])
    model.zero_grad()
    with _observed(layers) as states:
        logits = logits_of(inputs)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Results([*states, logits.detach().double().numpy()], gradients)


def run_in_torch(config: TransformerConfig, parameters: Arrays, tokens: np.ndarray, dtype: str = "float64") -> Results:
    """Run this project's model in PyTorch."""
    model = TorchModel(computing_in(config, dtype))
    reference_torch.saving.import_parameters(model, parameters)
    return run_torch(model, [*model.decoder.layers.values()], model, tokens)


def run_in_jax(config: TransformerConfig, parameters: Arrays, tokens: np.ndarray, dtype: str = "float64") -> Results:
    """Run this project's model in JAX."""
    graph, params = nnx.split(JaxModel(computing_in(config, dtype)), nnx.Param)
    params = jax_impl.saving.import_parameters(params, parameters)
    inputs = jnp.asarray(tokens[:, :-1])
    targets = jnp.asarray(tokens[:, 1:])
    states: list[jax.Array] = []
    original = JaxLayer.__call__

    def recorded(self: JaxLayer, *args: Any, **kwargs: Any) -> Any:
        states.append(original(self, *args, **kwargs))
        return states[-1]

    def forward(params: Any) -> tuple[list[jax.Array], jax.Array]:
        states.clear()
        with mock.patch.object(JaxLayer, "__call__", recorded):
            logits = nnx.merge(graph, params)(inputs)
        return [*states], logits

    found, logits = jax.jit(forward)(params)
    gradients = jax.jit(jax.grad(lambda params: nnx.merge(graph, params)(inputs, targets)))(params)
    return Results(
        [np.asarray(state, np.float64) for state in (*found, logits)], jax_impl.saving.export_parameters(gradients)
    )


def errors_of_states(found: Results, expected: Results) -> list[float]:
    """Return the relative difference of each layer's output, and of the logits."""
    return [relative_difference(ours, theirs) for ours, theirs in zip(found.states, expected.states, strict=True)]


def errors_of_gradients(family: Family, config: TransformerConfig, found: Results, expected: Results) -> list[float]:
    """Return the largest relative difference of a gradient in each layer, and in embedding, last norm and head.

    Args:
        family: the family, which maps this project's gradients to tensors of transformers.
        config: the model.
        found: results of this project.
        expected: results of transformers.
    """
    worst = [0.0] * (config.num_layers + 1)
    for link in family.links(config):
        for layout in link.theirs:
            ours = assemble(layout, link.ours, found.gradients.__getitem__, np.dtype(np.float64))
            error = relative_difference(ours, expected.gradients[layout.name])
            parts = layout.name.split(".")
            group = int(parts[2]) if parts[1] == "layers" else config.num_layers
            worst[group] = max(worst[group], error)
    return worst


def with_mistakes(config: TransformerConfig, parameters: Arrays) -> dict[str, tuple[TransformerConfig, Arrays]]:
    """Return wrong imports of a Qwen3-Next model of eight layers, by description."""
    convolution = "decoder.layers.5.self_attention.conv1d.weight"
    reversed_taps = {**parameters, convolution: parameters[convolution][:, ::-1].copy()}
    return {
        "failing: rotary embedding of all channels": (replace(config, rotary_percent=1.0), parameters),
        "failing: norms multiply by w, not 1 + w": (replace(config, layernorm_zero_centered_gamma=False), parameters),
        "failing: taps of layer 5's convolution reversed": (config, reversed_taps),
    }

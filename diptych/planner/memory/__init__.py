"""Predicted memory of a training step, term by term."""

from collections import Counter
from typing import NamedTuple

from diptych.planner.memory.graph import GraphBuilder
from diptych.planner.memory.offload import moving_values
from diptych.planner.memory.simulate import Simulation
from diptych.planner.memory.tensor_parallel import activation_recompute_saving
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import recompute_blocks

__all__ = ["MemoryPrediction", "predict_memory", "activation_recompute_saving"]


class MemoryPrediction(NamedTuple):
    """Bytes of one forward and backward pass in PyTorch, above parameters and batch."""

    saved_by_name: dict[str, int]
    """Saved for backward on the device, by name of the value: one of diptych.plans.model.values.VALUES, or intermediate
    values."""
    saved: int
    """Sum of all values saved for backward on the device."""
    peak: int
    """Largest number of bytes allocated at any time, including the parameter gradients that exist by then."""


def predict_memory(config: TransformerConfig, batch: int, length: int | None = None) -> MemoryPrediction:
    """Predict the memory of a training step of the whole model, or of one tensor-parallel rank, by its allocations.

    Args:
        config: the model, with its recompute settings.
        batch: sequences of one microbatch.
        length: tokens of each sequence; None: config.seq_length.
    """
    length = length or config.seq_length
    builder = GraphBuilder(config, batch, length)
    first, x = builder.embedding()
    layers = {}
    for number in range(config.num_layers):
        layers[number], x = builder.layer(number, x)
    blocks = recompute_blocks(config)
    simulation = Simulation(length, moving=moving_values(config, range(config.num_layers), blocks))
    simulation.run(first, layers, blocks, builder.head(x))
    saved: Counter[str] = simulation.saved_by_name
    return MemoryPrediction(dict(saved.most_common()), sum(saved.values()), simulation.peak)

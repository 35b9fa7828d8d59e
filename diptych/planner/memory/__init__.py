"""Predicted memory of a training step, term by term, before a tensor exists."""

from collections import Counter
from typing import NamedTuple

from diptych.planner.memory.graph import build
from diptych.planner.memory.simulate import Simulation
from diptych.planner.memory.tensor_parallel import activation_recompute_saving
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import recompute_blocks

__all__ = ["MemoryPrediction", "predict_memory", "activation_recompute_saving"]


class MemoryPrediction(NamedTuple):
    """Bytes of one forward and backward pass in PyTorch, above parameters and batch."""

    kept: dict[str, int]
    """Kept from forward to backward, by name: diptych.plans.recompute.VALUES, and what stands between them."""
    saved: int
    """All of it together."""
    peak: int
    """The most held at any moment; gradients of parameters, as far as they exist by then, included."""


def predict_memory(config: TransformerConfig, batch: int, length: int | None = None) -> MemoryPrediction:
    """What a training step of the whole model keeps and needs, by simulating its allocations.

    Args:
        config: the model's, recompute settings included.
        batch: sequences computed at a time.
        length: tokens of each; None: config.seq_length.
    """
    length = length or config.seq_length
    first, layers, last = build(config, batch, length)
    simulation = Simulation(length)
    simulation.run(first, layers, recompute_blocks(config), last)
    kept: Counter[str] = simulation.kept
    return MemoryPrediction(dict(kept.most_common()), sum(kept.values()), simulation.peak)

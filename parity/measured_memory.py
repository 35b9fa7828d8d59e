"""Memory of a training step in PyTorch, predicted and measured."""

from typing import NamedTuple

import numpy as np

from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch


class MeasuredMemory(NamedTuple):
    """Bytes of a forward and backward pass in PyTorch, predicted and measured."""

    predicted_saved: int
    saved: int
    predicted_peak: int
    peak: int


def measure_torch(config: TransformerConfig, batch: Batch) -> MeasuredMemory:
    """Run forward and backward of the PyTorch model on a batch, and return their predicted and measured memory.

    The measurement counts every allocation of the second run.
    """
    import torch

    from reference_torch.recompute import measure_memory
    from reference_torch.transformer import GPTModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPTModel(config).to(device)
    parameters = list(model.parameters())
    tokens, targets = (torch.from_numpy(np.asarray(x)).to(device) for x in (batch.tokens, batch.targets))

    def backward(loss: torch.Tensor) -> object:
        return torch.autograd.grad(loss, parameters)

    backward(model(tokens, targets))  # allocate buffers that are made on first use
    saved, peak = measure_memory(lambda: model(tokens, targets), backward)
    prediction = predict_memory(config, *tokens.shape)
    return MeasuredMemory(prediction.saved, saved, prediction.peak, peak)

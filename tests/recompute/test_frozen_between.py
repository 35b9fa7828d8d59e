"""Parameters that are frozen, or not any more, between a forward and its backward."""

import pytest
import torch
from torch import nn

from reference_torch.recompute import recompute_modules
from tests.recompute.support import normal


def blocks() -> nn.Sequential:
    """Two blocks of a norm and a linear layer; each call returns equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))).double()


@pytest.mark.parametrize("freezes", [True, False])
def test_forward_decides_what_backward_computes(freezes):
    """The graph of forward is that of the plain model, so a replay works with the flags of forward."""
    models = blocks(), blocks()
    recompute_modules(models[1], {"*": ["0", "1"]})
    for model in models:
        model[0].requires_grad_(freezes)
        loss = model(normal(1, 3, 4, grad=not freezes)).sum()
        model[0].requires_grad_(not freezes)
        loss.backward()
        assert all(parameter.requires_grad is not freezes for parameter in model[0].parameters())
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None), name
        assert first.grad is None or torch.equal(first.grad, second.grad), name

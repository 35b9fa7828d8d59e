"""What tests of PyTorch's offload share: small models, batches, a step of training, and the plan beside the trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.offload import plan_offload
from parity.compare import relative_difference
from parity.tolerances import PARAMETERS
from reference_torch.offload import TensorOffloadManager
from reference_torch.rank_pool import RankPool
from tests.offload.jobs import events, train_a_step

LAYERS, WIDTH = 5, 8


class Layer(nn.Module):
    """A residual layer that keeps views of its weights for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, scale=1.0):
        return x + scale * self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """Layers between an embedding and a head that stay."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(layers: int = LAYERS, kind=Net) -> Net:
    torch.manual_seed(0)
    return kind(layers).double()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def assert_as_planned(manager: TensorOffloadManager, uses, then=None, peak: bool = True) -> None:
    plan = plan_offload(uses, manager.storages(), manager.num_prefetch_layers, then=then)
    assert manager.trace == events(plan)
    stats = manager.stats
    assert (stats["bytes_in"], stats["bytes_out"]) == (plan.bytes_in, plan.bytes_out)
    assert stats["misses"] == len(plan.misses)
    if peak:
        assert stats["peak_bytes"] == plan.peak_bytes


def assert_equal_state(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(model: nn.Module, steps: int, manager: TensorOffloadManager | None = None, **options) -> list[torch.Tensor]:
    """Gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        if manager is None:
            optimizer.step()
        else:
            manager.step(optimizer)
    return gradients


# With recompute, pipelines and several microbatches.

CONFIG = TransformerConfig(
    hidden_size=8,
    num_layers=5,
    num_attention_heads=2,
    seq_length=8,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    hidden_dropout=0.1,
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=4, global_batch_size=4, micro_batch_size=1, lr=3e-3, min_lr=3e-4, eval_iters=1)
MODES = {
    "none": {},
    "mhc": {"recompute_granularity": "selective", "recompute_modules": ("mhc", "layernorm")},
    "mhc and mlp, long blocks": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mhc", "layernorm", "mlp"),
        "mhc_recompute_layer_num": 3,
    },
    "activation": {"recompute_activation_function": True},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "first layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "full, without streams": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "enable_hyper_connections": False,
    },
}


def check_a_step(config: TransformerConfig, pool: RankPool | None = None) -> None:
    """Numbers of the run without offload and of one process, bit by bit there; moves and bytes as planned."""
    expected, parameters = train_a_step(unsharded(config), TRAIN)
    config, job = replace(config, enable_tensor_offload=True), "tests.offload.jobs:train_a_step"
    results = [train_a_step(config, TRAIN)] if pool is None else pool.run(job, config, TRAIN)
    for found, values in results:
        assert found["trace"] == found["plan"]
        assert found["bytes"] == found["planned bytes"]
        assert found.get("activations") == found.get("planned activations")
        for name in ("loss", "norm", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=0 if pool is None else 1e-12, abs=0)
        for name, value in parameters.items():
            if pool is None:
                np.testing.assert_array_equal(values[name], value, err_msg=name)
            else:
                assert relative_difference(values[name], value) <= PARAMETERS["float64"], name


ACTIVATIONS = {"enable_activation_offload": True, "activation_offload_min_bytes": 256}

"""Tensor offload by itself: the layers of a small network move to the host. Results do not change.

    python examples/tensor_offload/simple_test.py

Uses only reference_torch.offload and PyTorch; takes a few seconds, with or without a GPU.
"""

import torch
from torch import nn

from reference_torch.offload import get_offload_manager, initialize_offload_manager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, LAYERS, STEPS = 256, 8, 10


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [B, D] for inputs [B, D]."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> nn.Sequential:
    """Return a network with fixed initial values."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(DEVICE)


def train(model: nn.Sequential) -> list[float]:
    """Return the losses of a few steps, with the default manager of the process if there is one."""
    manager = get_offload_manager()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        if manager is None:
            optimizer.step()
        else:
            manager.step(optimizer)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice and compare."""
    plain = build()
    expected = train(plain)
    model = build()
    manager = initialize_offload_manager(num_prefetch_layers=1)
    for number, layer in enumerate(model):
        manager.register_layer(number, layer)
    before = manager.device_bytes
    manager.offload_all_layers()
    print(f"{LAYERS} layers on {DEVICE}: {before / 2**20:.1f} MiB, now {manager.device_bytes / 2**20:.1f}")
    losses = train(model)
    manager.print_stats()
    print(f"losses {losses[0]:.6f} to {losses[-1]:.6f}; without offload {expected[0]:.6f} to {expected[-1]:.6f}")
    assert losses == expected, "expected the losses of the model without offload"
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name].cpu()), name
    manager.close()
    print("bitwise equal")


if __name__ == "__main__":
    main()

"""Buffers of recomputed modules: shared memory, memory that cannot be written, sparse layouts, forwards in backward."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference_torch.recompute import modules, recompute_modules
from tests.recompute.support import normal

WIDTH = 4


class Statistics(nn.Module):
    """Batch statistics, a counter that another one replaces, and a decay that changes in place and is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("decay", torch.ones(()))

    def forward(self, x):
        self.count = self.count + 1
        self.decay.mul_(0.5)
        return self.norm(x).tanh() * self.decay.clone()


class Block(nn.Module):
    """A block with a recomputed part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.inner(x))


class Times(nn.Module):
    """A product with a buffer, to which ``change`` does something first."""

    def __init__(self, buffer: Tensor, change=lambda buffer: None) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.change = change

    def forward(self, x):
        self.change(self.buffer)
        factor = self.buffer.clone()
        return torch.sparse.mm(factor, x.sin().t()).t() if factor.layout is not torch.strided else x.sin() * factor


def pair(make) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models of two blocks, the second with recompute."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(Block(make()), Block(make())).double())
    recompute_modules(models[1], {"*": ["inner"]})
    return models[0], models[1]


def assert_alike(plain: nn.Module, ours: nn.Module) -> None:
    """Equal gradients and buffers."""
    for (name, first), second in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad), name
    for (name, first), second in zip(plain.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(first.to_dense(), second.to_dense()), name


def test_a_reentrant_checkpoint_outside_updates_buffers_as_in_the_plain_model():
    """Its replay is the first run of new regions, inside of a backward."""
    models = pair(Statistics)
    for model in models:
        x = normal(1, 6, WIDTH)
        for block in model:
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()
    assert_alike(*models)


def test_a_forward_in_a_hook_updates_buffers_as_in_the_plain_model():
    models = pair(Statistics)
    for model in models:
        x = normal(1, 6, WIDTH)

        def penalty(gradient, model=model, x=x):
            with torch.enable_grad():
                return gradient + torch.autograd.grad(model(x).sum(), x)[0]

        output = model(x)
        output.register_hook(penalty)
        output.sum().backward()
    assert_alike(*models)


BUFFERS = {
    "expanded": lambda: torch.tensor(0.5).double().expand(WIDTH),
    "expanded rows": lambda: normal(2, 6, 1, grad=False).expand(6, WIDTH),
    "every second": lambda: normal(2, 2 * WIDTH, grad=False)[::2],
    "NaN": lambda: torch.full((), torch.nan).double(),
    "COO": lambda: torch.eye(WIDTH).double().to_sparse(),
    "CSR": lambda: torch.eye(WIDTH).double().to_sparse_csr(),
    "CSC": lambda: torch.eye(WIDTH).double().to_sparse_csc(),
}


def shrink(buffer: Tensor) -> None:
    """Change a buffer in place, through what shares its memory."""
    if buffer.layout is not torch.strided:
        buffer._values().mul_(0.5) if buffer.layout is torch.sparse_coo else buffer.values().mul_(0.5)
    else:
        shape = [size if stride else 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)]
        buffer.as_strided(shape, buffer.stride()).mul_(0.5)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_of_any_layout_is_that_of_the_plain_model(kind, changes):
    models = pair(lambda: Times(BUFFERS[kind](), shrink if changes else lambda buffer: None))
    for model in models:
        x = normal(1, 6, WIDTH)
        (model(x) + model(2 * x)).nan_to_num().sum().backward()
    if kind == "NaN":
        assert all(buffer.isnan() for buffer in models[1].buffers())
    else:
        assert_alike(*models)


def test_a_buffer_in_read_only_memory_is_not_written(tmp_path, monkeypatch):
    """The memory of a file that is mapped for reading; a write would end the process."""
    np.array([1.0, np.nan, -0.0, 2.0]).tofile(tmp_path / "buffer")
    with warnings.catch_warnings(action="ignore"):
        buffer = torch.from_numpy(np.memmap(tmp_path / "buffer", np.float64, mode="r"))
    models = pair(lambda: Times(buffer))
    written = []
    monkeypatch.setattr(modules, "_fill", lambda tensor, *_: written.append(tensor))
    for model in models:
        x = normal(1, 6, WIDTH)
        (model(x) + model(2 * x)).nan_to_num().sum().backward()
    assert not written
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.grad.nan_to_num(), second.grad.nan_to_num())

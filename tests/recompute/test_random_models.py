"""Random blocks of random submodules under recompute_modules compute what they do without, bit by bit."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from reference_torch.recompute import recompute_modules
from reference_torch.recompute import region as slots_module

WIDTH = 8
PROGRAMS = 60


class Submodule(nn.Module):
    """A submodule of one of nine kinds: with buffers, random numbers, views, several outputs, in-place operations."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor):
        doubled = x * 2
        doubled += 1
        return (
            lambda: torch.nn.functional.gelu(self.linear(x)),
            lambda: self.dropout(x).tanh(),
            lambda: self.norm(x),
            lambda: x,
            lambda: (x.sin(), x.view(-1, WIDTH)[:, :].cos()),
            lambda: doubled,
            lambda: x[:, ::2].repeat(1, 2).exp() * 0.1,
            lambda: {"first": torch.relu(x), "second": x.softmax(-1)},
            lambda: self.linear(x).sigmoid(),
        )[self.kind]()


class Block(nn.Module):
    """A block that uses each output in one of six ways: twice, kept in an attribute, through a view, in place."""

    def __init__(self, program: list[tuple[int, int]]) -> None:
        super().__init__()
        self.submodules = nn.ModuleList(Submodule(kind) for kind, _ in program)
        self.program = program
        self.stored: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.stored = []
        for submodule, (_, use) in zip(self.submodules, self.program, strict=True):
            y = joined(submodule(x))
            if use == 0:
                x = x + y
            elif use == 1:
                x = y * x
            elif use == 2:
                self.stored.append(y)
                x = x * y.detach() + y
            elif use == 3 and y is not x:
                x = x + y.view(-1, WIDTH).mul_(1.5)
            elif use == 4:
                x = joined(submodule(y))
            else:
                x = y.t().contiguous().t()
        return x


def joined(output) -> Tensor:
    """One tensor of an output."""
    if isinstance(output, tuple):
        return output[0] * output[1]
    return output["first"] + output["second"] if isinstance(output, dict) else output


class Model(nn.Module):
    """Blocks, and perhaps a later read of what they stored."""

    def __init__(self, programs: list[list[tuple[int, int]]], reads_stored: bool) -> None:
        super().__init__()
        self.blocks, self.reads_stored = nn.ModuleList(map(Block, programs)), reads_stored

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            for stored in block.stored if self.reads_stored else []:
                x = x + stored.mean()
        return x


def steps(model: Model, x: Tensor) -> list[Tensor]:
    """Outputs, gradients and buffers of two steps."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
        found += [y.detach().clone(), leaf.grad]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in model.buffers()]
    return [torch.nan_to_num(t) for t in found]


def test_random_models():
    """PyTorch itself refuses some programs, which change in place what backward reads."""
    compared = 0
    for seed in range(PROGRAMS):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        lengths = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        programs = [[(draw.randrange(9), draw.randrange(6)) for _ in range(length)] for length in lengths]
        model = Model(programs, draw.random() < 0.3)
        other, x = copy.deepcopy(model), torch.randn(6, WIDTH)
        chosen = {
            f"blocks.{n}": [f"submodules.{i}" for i in range(length) if draw.random() < 0.6] or ["submodules.0"]
            for n, length in enumerate(lengths)
        }
        try:
            expected = steps(model, x)
        except RuntimeError:
            continue
        recompute_modules(other, chosen)
        found = steps(other, x)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (seed, programs, chosen)
        compared += 1
    assert compared > PROGRAMS // 2


def test_an_exception_in_a_block_leaves_nothing_and_the_next_step_is_right():
    torch.manual_seed(0)
    model = Model([[(0, 0), (1, 1)], [(8, 0)]], False)
    other, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    recompute_modules(other, {"blocks.*": ["submodules.0"]})
    before, plain = len(slots_module._slots), other.blocks[1].submodules[0].linear.forward

    def fail(x: Tensor) -> Tensor:
        raise KeyError("broken")

    other.blocks[1].submodules[0].linear.forward = fail
    with pytest.raises(KeyError, match="broken"):
        other(x)
    other.blocks[1].submodules[0].linear.forward = plain
    assert len(slots_module._slots) == before
    assert all(torch.equal(a, b) for a, b in zip(steps(other, x), steps(model, x), strict=True))

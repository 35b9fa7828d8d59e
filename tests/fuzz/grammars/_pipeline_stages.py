"""Pipeline stages as users write them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from diptych.plans.config import TransformerConfig

WIDTH = 4
LENGTH = 3


@dataclass(frozen=True)
class StageSpec:
    """The operations and the output of a stage."""

    operations: tuple[str, ...]
    output: str = "tensor"


@dataclass(frozen=True)
class Program:
    """One or two training steps of a pipeline of user-written stages."""

    pp_size: int
    schedule: str
    stages: tuple[StageSpec, ...]
    num_microbatches: int
    virtual: int = 1
    replicas: int = 1
    tensors: int = 1
    """Tensors between stages."""
    dtype: str = "float64"
    bf16: bool = False
    size: int = 1
    """Sequences per microbatch."""
    lengths: tuple[int, ...] | None = None
    """Tokens of the sequences of each microbatch, if lengths vary."""
    data: str = "fresh"
    """``reused``: the iterator yields one buffer, which it overwrites."""
    reducer: str = "mean"
    per_token: bool = False
    forward_only: bool = False
    steps: int = 1
    deallocate: bool = True
    overlap: bool = True
    raises: tuple[str, int, int] | None = None
    """(F or B, stage, microbatch) of the exception that a stage raises."""

    @property
    def config(self) -> TransformerConfig:
        """The configuration whose pipeline runs the stages."""
        return TransformerConfig(
            hidden_size=WIDTH,
            num_layers=self.pp_size * self.virtual,
            num_attention_heads=1,
            seq_length=LENGTH,
            params_dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            bf16=self.bf16,
            pipeline_model_parallel_size=self.pp_size,
            pipeline_schedule=self.schedule,  # pyright: ignore[reportArgumentType]
            virtual_pipeline_model_parallel_size=self.virtual if self.virtual > 1 else None,
            untie_embeddings_and_output_weights=True,
            variable_seq_lengths=self.lengths is not None,
            calculate_per_token_loss=self.per_token,
            deallocate_pipeline_outputs=self.deallocate,
            overlap_p2p_comm=self.overlap,
            pipeline_timeout=60.0,
        )


class Planned(Exception):
    """The exception that a program raises on purpose."""


# Operations.


class Cube(torch.autograd.Function):
    """A function with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x**2 * 0.3


class Operation(nn.Module):
    """One operation of a stage, by name."""

    linear: Any
    mean: Tensor
    scratch: Tensor

    def __init__(self, name: str, stage: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.stage = stage
        self.calls = 0
        factory: dict[str, Any] = {"dtype": dtype}
        other = torch.float64 if dtype == torch.float32 else torch.float32
        self.linear = nn.Linear(WIDTH, WIDTH, bias=name != "linear without bias", **factory)
        if name == "mlp":
            self.up = nn.Linear(WIDTH, 2 * WIDTH, **factory)
            self.down = nn.Linear(2 * WIDTH, WIDTH, **factory)
        elif name == "weight in another type":
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=other)
        elif name == "complex":
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.complex128)
        elif name == "weight norm":
            self.linear = nn.utils.parametrizations.weight_norm(self.linear)
        elif name == "vector weight":
            self.vector = nn.Parameter(torch.randn(WIDTH, **factory))
        elif name == "bias of one":
            self.one = nn.Parameter(torch.randn(1, **factory))
        elif name == "layer norm":
            self.norm = nn.LayerNorm(WIDTH, **factory)
        elif name == "running mean":
            self.register_buffer("mean", torch.zeros(WIDTH, **factory))
        elif name == "reused scratch":
            self.register_buffer("scratch", torch.zeros(1, WIDTH, **factory), persistent=False)
        elif name in ("frozen", "frozen weight", "frozen bias"):
            self.linear.weight.requires_grad_(name == "frozen bias")
            self.linear.bias.requires_grad_(name == "frozen weight")
        elif name == "weight hook":
            self.linear.weight.register_hook(lambda gradient: None if gradient is None else gradient.clamp(-0.01, 0.01))
        elif name == "accumulation hook":
            self.linear.weight.register_post_accumulate_grad_hook(_halve_gradient)
        elif name == "forward hook":
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
        elif name == "backward hook":
            self.linear.register_full_backward_hook(lambda _, into, out: tuple(g if g is None else 2 * g for g in into))
            self.linear.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return RUN.get(self.name, lambda operation, x: operation.linear(x))(self, x)


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _dropout(operation: Operation, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * operation.stage + operation.calls)
    return x * (torch.rand(x.shape, generator=generator) < 0.8).to(x.dtype)


def _no_grad(operation: Operation, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = operation.linear(x)
    return x + y


def _running_mean(operation: Operation, x: Tensor) -> Tensor:
    operation.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return x - operation.mean.clone()


def _reused_scratch(operation: Operation, x: Tensor) -> Tensor:
    operation.scratch.copy_(x.detach().mean((0, 1)))
    return x + operation.linear(operation.scratch)


def _complex(operation: Operation, x: Tensor) -> Tensor:
    y = functional.linear(x.to(torch.complex128) * (1.0 + 2.0j), operation.linear.weight)
    return (y.real + y.imag).to(x.dtype)


def _gain(operation: Operation, x: Tensor) -> Tensor:
    return x * operation.linear.weight[0] + operation.linear.bias


RUN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mlp": lambda op, x: op.down(functional.gelu(op.up(x))),
    "tied": lambda op, x: op.linear(torch.tanh(op.linear(x))),
    "transposed weight": lambda op, x: functional.linear(x, op.linear.weight.t()),
    "weight in another type": lambda op, x: functional.linear(x, op.linear.weight.to(x.dtype)),
    "complex": _complex,
    "vector weight": lambda op, x: x + functional.linear(x, op.vector).unsqueeze(-1),
    "bias of one": lambda op, x: functional.linear(x, op.linear.weight, op.one),
    "named arguments": lambda op, x: functional.linear(input=x, weight=op.linear.weight, bias=op.linear.bias),
    "layer norm": lambda op, x: op.norm(x),
    "gain": _gain,
    "running mean": _running_mean,
    "reused scratch": _reused_scratch,
    "dropout": _dropout,
    "relu in place": lambda op, x: functional.relu(op.linear(x), inplace=True),
    "input in place": lambda op, x: x.mul_(1.5),
    "input view in place": lambda op, x: (x[..., :1].add_(1.0), x)[1],
    "no grad": _no_grad,
    "detached branch": lambda op, x: op.linear(x) + x.detach(),
    "checkpoint": lambda op, x: checkpoint(lambda y: torch.tanh(op.linear(y)), x, use_reentrant=False),
    "unused": lambda op, x: torch.sin(x),
    "sometimes": lambda op, x: op.linear(x) if op.calls % 2 else x * 1.0,
    "cube": lambda op, x: Cube.apply(x),
    "exp": lambda op, x: torch.exp(0.1 * x),
    "rows apart": lambda op, x: torch.stack([op.linear(row) for row in x.flatten(0, 1)]).view_as(x),
    "identity": lambda op, x: x,
    "one linear of data": lambda op, x: x,
}
"""Operations that are more than one linear layer."""

OPERATIONS = (
    *RUN,
    "linear",
    "linear without bias",
    "shared",
    "frozen",
    "frozen weight",
    "frozen bias",
    "weight norm",
    "weight hook",
    "accumulation hook",
    "forward hook",
    "backward hook",
)

# Outputs.

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "view": lambda x: (x * 1.0).flatten(0, 1).unflatten(0, x.shape[:2]),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x.mean(-1, keepdim=True).expand(x.shape),
    "slice": lambda x: torch.cat([x, x], -1)[..., :WIDTH],
    "stored": lambda x: x,
}
"""Allowed outputs of a stage."""

BAD: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "detached": lambda x: x.detach(),
    "made without gradient": lambda x: torch.ones_like(x),
    "dict": lambda x: {"x": x},
    "empty": lambda x: [],
    "one too many": lambda x: [x] * 5,
    "nested": lambda x: [[x]],
    "list with none": lambda x: [None],
    "longer": lambda x: torch.cat([x, x], 1),
    "wider": lambda x: torch.cat([x, x], -1),
    "flat": lambda x: x.flatten(1),
    "one element": lambda x: x.mean(),
    "broadcastable": lambda x: x[:, :, :1] * 1.0,
    "another type": lambda x: x.to(torch.float16),
    "integers": lambda x: x.to(torch.int64),
    "number": lambda x: 1.0,
    "array": lambda x: x.detach().float().numpy(),
    "sparse": lambda x: x.to_sparse(),
}
"""Outputs that only the last stage may return."""

BAD_LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "loss none": lambda loss: None,
    "loss detached": lambda loss: loss.detach(),
    "loss number": lambda loss: 1.0,
    "loss of several": lambda loss: torch.stack([loss, loss]),
}
"""Results that no reducer may return."""


class Stage(nn.Module):
    """A stage of the program."""

    def __init__(self, program: Program, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.number = number
        self.program = program
        self.calls = 0
        self.spec = program.stages[number]
        dtype = getattr(torch, program.config.compute_dtype)
        self.operations = nn.ModuleList(Operation(name, number, dtype) for name in self.spec.operations)
        self.stored: list[Any] = []

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the output of the previous stage as input."""
        self.entered = input_tensor

    def forward(self, data: Tensor) -> Any:
        """Run the operations, one after the other, and return the output of the program."""
        microbatch = self.calls % self.program.num_microbatches
        self.calls += 1
        if self.program.raises == ("F", self.number, microbatch):
            raise Planned(f"forward of stage {self.number}")
        entered = data if self.number == 0 else self.entered
        first, *others = entered if isinstance(entered, list) else [entered]
        x = sum(others, first)
        if self.number == 0 and self.spec.operations[0].endswith("in place"):
            x = x.clone()  # the user's data
        for operation in self.operations:
            x = x + operation.linear(data) if operation.name == "one linear of data" else operation(x)
        if self.program.raises == ("B", self.number, microbatch):
            x = Failing.apply(x, self.number)
        return self._output(x)

    def _output(self, x: Tensor) -> Any:
        kind = self.spec.output
        if self.number == len(self.program.stages) - 1:
            return x
        if kind in BAD:
            return BAD[kind](x)
        if self.program.tensors == 1:
            if kind == "stored":
                self.stored = [x.detach()]
            return OUTPUTS[kind](x)
        several = [OUTPUTS["tensor" if kind in ("list", "tuple") else kind](x), torch.sin(x), x][: self.program.tensors]
        return tuple(several) if kind == "tuple" else several


class Failing(torch.autograd.Function):
    """The identity that raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Planned(f"backward of stage {ctx.number}")

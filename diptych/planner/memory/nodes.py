"""The parts of a graph of operations: values, operations and layers."""

from dataclasses import dataclass, field

from diptych.planner.memory.kernel_work import KernelWork


@dataclass(eq=False)
class Value:
    """One tensor's memory."""

    name: str
    """One of diptych.plans.model.values.VALUES, or a description."""
    size: int
    """Bytes of the value, and of its gradient."""
    is_view: bool = False
    """True if the value uses another value's memory."""


@dataclass(eq=False)
class Node:
    """One differentiable operation."""

    reads: list[Value]
    writes: list[Value]
    saves: list[Value] = field(default_factory=list)
    """Values saved for backward."""
    region: tuple[str, ...] = ()
    """Names of the recomputed values whose replay includes this operation, outermost first."""
    parameters: int = 0
    """Bytes of the parameter gradients that it computes."""
    forward_scratch: int = 0
    """Bytes that forward allocates beside its reads and writes."""
    backward_scratch: int = 0
    """Bytes that backward allocates beside the saved values and gradients."""
    heir: Value | None = None
    """The input of a sum that takes over the memory of the output's gradient; inputs of its size share this memory
    until then."""
    alive: list[Value] = field(default_factory=list)
    """Values that a variable of the caller keeps alive during this operation's forward."""
    flops: int = 0
    """Floating-point operations of its products, in forward."""
    recomputed_flops: int = 0
    """Part of flops that its backward recomputes, beside two products for each product of forward."""
    narrow_gradient: int = 0
    """Bytes of the gradient of its weight, as a part of backward_scratch, if it is widened once backward has released
    what the operation has saved."""
    inner_moved: tuple[int, int] = (0, 0)
    """Bytes that an operation of many steps moves between them, in forward and in backward."""
    unpacked: int = 0
    """Bytes that backward writes when it reads a value that was saved in 8 bits."""
    exact: Value | None = None
    """The input, if it is saved in 8 bits; the operation saves the input itself if recompute drops this."""
    packing_scratch: int = 0
    """Bytes of backward_scratch if backward packs the input itself before it reads it."""
    is_packing: bool = False
    """True for the operation that packs a value in 8 bits."""
    is_linear: bool = False
    """True for a linear layer, whose weight gradient a split backward leaves to W; others compute it in I."""
    is_message: bool = False
    """True for the receipt of a message. Backward reads it only in a replay; then it stays until the backward of its
    receipt."""
    kernels: KernelWork | None = None
    """Launches in place of the operation with ``impl="triton"``; None: there are no kernels for it."""


@dataclass
class Layer:
    """The operations of one layer; a sublayer ends where its output has been added to the residual."""

    nodes: list[Node]
    sublayer_ends: list[int]
    """Indices into nodes, one past each sublayer's last."""


def keep(nodes: list[Node], *values: Value) -> None:
    """Let variables of a function whose last operation is the last of ``nodes`` keep values alive until it returns."""
    if values:
        nodes[-1].alive += values

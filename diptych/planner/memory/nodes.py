"""The parts of a graph of operations: values, operations and layers."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Value:
    """One tensor's memory."""

    name: str
    """One of diptych.plans.recompute.VALUES, or what it is."""
    size: int
    """Bytes, of its gradient too."""
    is_view: bool = False
    """Uses another value's memory."""


@dataclass(eq=False)
class Node:
    """One differentiable operation."""

    reads: list[Value]
    writes: list[Value]
    keeps: list[Value] = field(default_factory=list)
    """What its backward reads."""
    region: tuple[str, ...] = ()
    """Names of the values whose recomputation would make this operation again, outermost first."""
    parameters: int = 0
    """Bytes of the gradients it gives to parameters."""
    forward_scratch: int = 0
    """Bytes forward needs besides reads and writes."""
    backward_scratch: int = 0
    """Bytes backward needs besides keeps and gradients."""
    alive: list[Value] = field(default_factory=list)
    """What a variable of the caller's still holds while it runs forward."""
    flops: int = 0
    """Multiplications and additions in its products, forward."""
    flops_again: int = 0
    """Those of them that its own backward computes again, beside two products for each of forward."""
    is_linear: bool = False
    """Whether it is a linear map, whose weight's gradient a split backward leaves to W; any other comes with I."""


@dataclass
class Layer:
    """The operations of one layer; a sublayer ends where its output has been added to the residual."""

    nodes: list[Node]
    sublayer_ends: list[int]
    """Indices into nodes, one past each sublayer's last."""

"""Hyper-connections around the blocks of any pre-norm transformer, without changes to its code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diptych.plans.added_connections import connection_config, initial_bias_of_h_pre
from diptych.plans.module_patterns import select
from reference_torch.hyper_connections import HyperConnectionModule
from reference_torch.wrapped_forward import WrappedForward

ATTRIBUTE = "hyper_connection"
"""Name of the added submodule in each block."""


class AddedConnections:
    """The hyper-connections that add_hyper_connections has added to a model."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        ends = (next(iter(blocks)), next(reversed(blocks)))
        self._forwards = {
            name: _Connected(block, name, name == ends[0], name == ends[1]) for name, block in blocks.items()
        }
        for forward in self._forwards.values():
            forward.install()
        self.connections = {name: forward.connection for name, forward in self._forwards.items()}
        """The added modules by the name of their block."""

    def remove(self) -> None:
        """Restore the forwards of the blocks, and remove the added modules. A second call does nothing.

        Raises:
            ValueError: a forward was replaced again later; undo that first.
        """
        for name, forward in self._forwards.items():
            if not forward.is_installed:
                raise ValueError(
                    f"remove: expected the forward of add_hyper_connections in {name!r}, got a later one; undo the "
                    "later change first"
                )
        for forward in self._forwards.values():
            forward.undo()
            delattr(forward.module, ATTRIBUTE)
        self._forwards = {}


def add_hyper_connections(
    model: Any,
    blocks: Any,
    num_residual_streams: int = 4,
    *,
    hidden_size: int | None = None,
    keep_function: bool = True,
    **settings: Any,
) -> AddedConnections:
    """Put a hyper-connection (mHC) around each block of a pre-norm transformer.

    The residual stream becomes S streams between the first and the last block. A block with y = x + f(x) reads the
    aggregated streams; its f is added to each stream with weight h_post, and h_res mixes the streams. The output of the
    last block is the mean of the streams. Each block gets a submodule ``hyper_connection`` with phi, alpha and bias.

    Args:
        model: any nn.Module. Between the blocks, its code must pass hidden states on unchanged.
        blocks: patterns of the blocks, in the order in which the model calls them; ``*`` stands for any text without a
            dot. A block takes hidden states [B, T, D] first, or as ``hidden_states``, and returns hidden states of
            that shape, or a tuple that begins with them.
        num_residual_streams: S, at least 2.
        hidden_size: D; None: the width of a norm of the first block.
        keep_function: True: initial values that do not change the model's outputs, up to rounding; False: the initial
            values of the paper.
        settings: sinkhorn_iterations, sinkhorn_last, mhc_epsilon, mhc_transpose_h_res, seed and impl, as in
            TransformerConfig.

    Returns:
        A handle: remove() undoes all changes, and ``connections`` has the added modules by the name of their block.

    Raises:
        TypeError: model is no module, blocks is no list of texts, or a setting is unknown.
        ValueError: a pattern matches nothing, a block has a hyper-connection, or a setting is invalid.

    Reference:
        Manifold-constrained hyper-connections, https://arxiv.org/abs/2512.24880, equations 3 to 9.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = _chosen(model, blocks)
    name, first = next(iter(chosen.items()))
    parameters = [*first.parameters()]
    width = hidden_size or _width(name, first)
    dtype = "float64" if parameters and parameters[0].dtype == torch.float64 else "float32"
    config = connection_config(width, len(chosen), num_residual_streams, dtype, settings)
    for number, (name, block) in enumerate(chosen.items()):
        connection = HyperConnectionModule(config, number, f"{name}.{ATTRIBUTE}")
        if keep_function:
            with torch.no_grad():
                connection.alpha.zero_()
                connection.bias.zero_()
                connection.bias[:num_residual_streams] = initial_bias_of_h_pre(num_residual_streams)
        setattr(block, ATTRIBUTE, connection.to(parameters[0].device if parameters else "cpu"))
    return AddedConnections(chosen)


def _chosen(model: nn.Module, blocks: Any) -> dict[str, nn.Module]:
    """Return the chosen blocks by name; they must have no hyper-connection yet, and no second name."""
    found = dict(model.named_modules())
    names = select("blocks", blocks, [*found])
    used = next((name for name in names if hasattr(found[name], ATTRIBUTE)), None)
    if used is not None:
        raise ValueError(
            f"blocks: expected blocks without an attribute {ATTRIBUTE!r}, got {used}, which has one; remove() the "
            "hyper-connections that it has"
        )
    chosen = {name: found[name] for name in names}
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in chosen and module in chosen.values():
            raise ValueError(
                f"blocks: expected blocks that the model calls once, got {name!r}, which is also registered under "
                "another name; leave it out, or register a copy"
            )
    return chosen


def _width(name: str, block: nn.Module) -> int:
    """Return the number of channels of the first norm with weights in a block."""
    norms = [child for child in block.children() if "norm" in type(child).__name__.lower()]
    width = next((p.numel() for norm in norms for p in norm.parameters() if p.dim() == 1), None)
    if width is None:
        raise ValueError(
            f"hidden_size: expected a number, since no child of {name} is a norm with weights, got None; pass the "
            "channels of the hidden states"
        )
    return width


class _Connected(WrappedForward):
    """The forward of a block with a hyper-connection."""

    def __init__(self, module: nn.Module, name: str, is_first: bool, is_last: bool) -> None:
        super().__init__(module, name)
        self.is_first = is_first
        self.is_last = is_last

    @property
    def connection(self) -> HyperConnectionModule:
        """The hyper-connection of the block."""
        return getattr(self.module, ATTRIBUTE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self._run(args[0], lambda x: self.call_plain(x, *args[1:], **kwargs))
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return self._run(kwargs.get("hidden_states"), lambda x: self.call_plain(hidden_states=x, **rest))

    def _run(self, x: Any, block: Callable[[Tensor], Any]) -> Any:
        """Run the block on the aggregated streams, and write its output to the streams."""
        config = self.connection.config
        expected = (
            ("B", "T", config.hidden_size)
            if self.is_first
            else ("B", "T", config.num_residual_streams, config.hidden_size)
        )
        if not isinstance(x, Tensor) or x.dim() != len(expected) or x.shape[2:] != expected[2:]:
            actual = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.name}: expected hidden states [{', '.join(map(str, expected))}] as first positional argument, "
                f"got {actual}; the first block receives the model's hidden states, and its code must pass them on "
                "from block to block"
            )
        streams = HyperConnectionModule.input_expand(x, config.num_residual_streams) if self.is_first else x
        full_precision = torch.autocast(streams.device.type, enabled=False)
        with full_precision:  # the residual stream keeps its type, as in the plain block
            aggregated, mixed, h_post = self.connection(streams, streams)
        version = 0 if aggregated.is_inference() else aggregated._version
        result = block(aggregated)
        output = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(output, Tensor) or output.shape != aggregated.shape:
            actual = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"{self.name}: expected hidden states {list(aggregated.shape)}, or a tuple that begins with them, got "
                f"{actual}"
            )
        if not aggregated.is_inference() and aggregated._version != version:
            raise ValueError(
                f"{self.name}: expected a block that leaves its hidden states unchanged, got one that changes them in "
                "place; write x = x + y instead of x += y"
            )
        with full_precision:
            expanded, _ = self.connection.apply_h_post((output.to(streams.dtype) - aggregated, None), h_post)
            streams = expanded + mixed
        if self.is_last:
            streams = HyperConnectionModule.output_contract(streams, config.num_residual_streams)
        return (streams, *result[1:]) if isinstance(result, tuple) else streams

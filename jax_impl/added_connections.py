"""Hyper-connections around the blocks of any pre-norm transformer, without changes to its code."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from diptych.plans.added_connections import connection_config, initial_bias_of_h_pre
from diptych.plans.module_patterns import select
from jax_impl.hyper_connections import HyperConnectionModule
from jax_impl.named_modules import change_class, named_modules, subclass_with

ATTRIBUTE = "hyper_connection"
"""Name of the added submodule in each block."""
_PLACE = "hyper_connection_place"
"""Attribute of a block that says whether it is the first or the last one."""


class AddedConnections:
    """The hyper-connections that add_hyper_connections has added to a model."""

    def __init__(self, blocks: dict[str, nnx.Module]) -> None:
        self._blocks = blocks
        for number, block in enumerate(blocks.values()):
            ends = [end for end, place in (("first", 0), ("last", len(blocks) - 1)) if number == place]
            setattr(block, _PLACE, " and ".join(ends) or "inner")
            change_class(block, _connected_class(type(block)))
        self.connections = {name: getattr(block, ATTRIBUTE) for name, block in blocks.items()}
        """The added modules by the name of their block."""

    def remove(self) -> None:
        """Restore the classes of the blocks, and remove the added modules. A second call does nothing.

        Raises:
            ValueError: a block got another class later; undo that first.
        """
        for name, block in self._blocks.items():
            if type(block) is not _connected_class(type(block).__mro__[1]):
                raise ValueError(
                    f"remove: expected the class of add_hyper_connections in {name!r}, got {type(block).__name__} with "
                    "changes made later; undo them first"
                )
        for block in self._blocks.values():
            change_class(block, type(block).__mro__[1])
            delattr(block, ATTRIBUTE)
            delattr(block, _PLACE)
        self._blocks = {}


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
        model: any nnx.Module. Between the blocks, its code must pass hidden states on unchanged.
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
        A handle: remove() undoes all changes, and ``connections`` has the added modules.

    Raises:
        TypeError: model is no nnx.Module, blocks is no list of texts, or a setting is unknown.
        ValueError: a pattern matches nothing, a block has a hyper-connection or stacks several layers for a scan, or a
            setting is invalid.

    Reference:
        Manifold-constrained hyper-connections, https://arxiv.org/abs/2512.24880, equations 3 to 9.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module, got {type(model).__name__}; linen modules are not supported")
    chosen = _chosen(dict(named_modules(model)), blocks)
    name, first = next(iter(chosen.items()))
    width = hidden_size or _width(name, first)
    params = [nnx.state(module, nnx.Param) for module in (*chosen.values(), model)]
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    dtype = "float64" if dtypes and dtypes[0] == jnp.float64 else "float32"
    config = connection_config(width, len(chosen), num_residual_streams, dtype, settings)
    for number, (name, block) in enumerate(chosen.items()):
        connection = HyperConnectionModule(config, number, f"{name}.{ATTRIBUTE}")
        if keep_function:
            bias = jnp.zeros_like(connection.bias[...])
            connection.bias[...] = bias.at[:num_residual_streams].set(initial_bias_of_h_pre(num_residual_streams))
            connection.alpha[...] = jnp.zeros_like(connection.alpha[...])
        setattr(block, ATTRIBUTE, connection)
    return AddedConnections(chosen)


def _chosen(found: dict[str, nnx.Module], blocks: Any) -> dict[str, nnx.Module]:
    """Return the chosen blocks by name; they must have no hyper-connection yet."""
    names = select("blocks", blocks, [*found])
    used = next((name for name in names if hasattr(found[name], ATTRIBUTE)), None)
    if used is not None:
        raise ValueError(
            f"blocks: expected blocks without an attribute {ATTRIBUTE!r}, got {used}, which has one; remove() the "
            "hyper-connections that it has"
        )
    return {name: found[name] for name in names}


def _width(name: str, block: nnx.Module) -> int:
    """Return the number of channels of the first norm with weights in a block."""
    children = [child for path, child in named_modules(block) if path and "." not in path]
    norms = [child for child in children if "norm" in type(child).__name__.lower()]
    values = [value for norm in norms for _, value in nnx.to_flat_state(nnx.state(norm, nnx.Param))]
    width = next((value.size for value in values if value.ndim == 1), None)
    stacked = next((value.shape for value in values if value.ndim == 2), None)
    if width is None and stacked is not None:
        raise ValueError(
            f"blocks: expected modules of one layer, got {name}, which stacks {stacked[0]} layers for a scan (its norm "
            f"has weights {list(stacked)}); call the layers one by one"
        )
    if width is None:
        raise ValueError(
            f"hidden_size: expected a number, since no child of {name} is a norm with weights, got None; pass the "
            "channels of the hidden states"
        )
    return width


@cache
def _connected_class(kind: type) -> type:
    """Return the class of blocks of a class that have a hyper-connection."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if args:
            return _run(self, args[0], lambda x: kind.__call__(self, x, *args[1:], **kwargs))
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return _run(self, kwargs.get("hidden_states"), lambda x: kind.__call__(self, hidden_states=x, **rest))

    return subclass_with(kind, call)


def _run(module: nnx.Module, x: Any, block: Callable[[Array], Any]) -> Any:
    """Run a block on the aggregated streams, and write its output to the streams."""
    connection = getattr(module, ATTRIBUTE)
    place = getattr(module, _PLACE)
    streams_and_width = connection.config.num_residual_streams, connection.config.hidden_size
    expected = ("B", "T", *streams_and_width[1 if "first" in place else 0 :])
    if not isinstance(x, Array) or x.ndim != len(expected) or x.shape[2:] != expected[2:]:
        actual = list(x.shape) if isinstance(x, Array) else type(x).__name__
        raise ValueError(
            f"{type(module).__name__}: expected hidden states [{', '.join(map(str, expected))}] as first positional "
            f"argument, got {actual}; the first block receives the model's hidden states, and its code must pass them "
            "on from block to block"
        )
    count = connection.config.num_residual_streams
    streams = HyperConnectionModule.input_expand(x, count) if "first" in place else x
    aggregated, mixed, h_post = connection(streams, streams)
    result = block(aggregated)
    output = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(output, Array) or output.shape != aggregated.shape:
        actual = list(output.shape) if isinstance(output, Array) else type(output).__name__
        raise ValueError(
            f"{type(module).__name__}: expected hidden states {list(aggregated.shape)}, or a tuple that begins with "
            f"them, got {actual}"
        )
    expanded, _ = connection.apply_h_post((output - aggregated, None), h_post)
    streams = expanded + mixed
    if "last" in place:
        streams = HyperConnectionModule.output_contract(streams, count)
    return (streams, *result[1:]) if isinstance(result, tuple) else streams

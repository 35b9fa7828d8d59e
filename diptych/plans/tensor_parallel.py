"""Tensor parallelism: the part of the model that each of several ranks holds.

Rank r of n holds consecutive heads, inner channels and token ids: its part of the weights that a Split divides. A
layer's mixer and its MLP are regions. All ranks give a region the same tokens and add up its outputs, each of which is
a partial sum over heads or inner channels. With sequence parallelism, the values between regions (norms, dropout,
residual streams, hyper-connections) are divided too: each rank has consecutive tokens of every sequence. It gathers the
tokens of all ranks before a region, and has the sum of its own tokens scattered to it afterwards.

The gradient of a parameter that several ranks hold is the sum of the gradients on these ranks if each rank computes a
part of its effect: a part of the outputs inside of a region, a part of the tokens elsewhere.

Reference: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import LayerConfig
from diptych.plans.model.parameters import ParameterSpec, Split

REGIONS = ("self_attention", "mlp")
"""Modules of a layer whose output is a partial sum on each rank."""


def check_parts(config: TransformerConfig) -> None:
    """Reject the configuration of all tensor-parallel ranks, where that of one rank's part is needed.

    Raises:
        ValueError: tensor_model_parallel_size is not 1.
    """
    if (size := config.tensor_model_parallel_size) != 1:
        raise ValueError(
            f"config: expected the part of one of {size} tensor-parallel ranks, got the configuration of all; build "
            "the model from diptych.plans.tensor_parallel.rank_config(config)"
        )


def units_per_rank(units: int, size: int) -> int:
    """Return the units of a section that each rank holds: an equal share, or one that it has in common with others.

    Args:
        units: number of units, a multiple or a divisor of the number of ranks.
        size: number of ranks.
    """
    return max(1, units // size)


def held_indices(split: Split, size: int, rank: int) -> np.ndarray:
    """Return the indices along split.axis that a rank holds, [n] int64, in the order in which it has them."""
    found = []
    begin = 0
    for units, width in split.sections:
        first = rank * units // size * width
        found.append(begin + first + np.arange(units_per_rank(units, size) * width))
        begin += units * width
    return np.concatenate(found)


def rank_part(array: np.ndarray, split: Split | None, size: int, rank: int) -> np.ndarray:
    """Return the part of a parameter, gradient or moment that a rank holds.

    Args:
        array: the unsharded array.
        split: its division; None: every rank holds all of it.
        size: number of ranks.
        rank: number of the rank.
    """
    if split is None or size == 1:
        return array
    return np.take(array, held_indices(split, size, rank), axis=split.axis)


def join_parts(parts: Sequence[np.ndarray], split: Split | None) -> np.ndarray:
    """Return the unsharded array of which the ranks, in order, hold parts; reverses rank_part."""
    if split is None or len(parts) == 1:
        return parts[0]
    units = sum(units * width for units, width in split.sections)
    shape = parts[0].shape
    unsharded = np.empty((*shape[: split.axis], units, *shape[split.axis + 1 :]), parts[0].dtype)
    for rank, part in enumerate(parts):
        np.moveaxis(unsharded, split.axis, 0)[held_indices(split, len(parts), rank)] = np.moveaxis(part, split.axis, 0)
    return unsharded


def join_all(parts: Sequence[Mapping[str, np.ndarray]], splits: Mapping[str, Split | None]) -> dict[str, np.ndarray]:
    """Return join_parts of every array, by name; splits has the division of each."""
    return {name: join_parts([part[name] for part in parts], splits[name]) for name in parts[0]}


def share_counted(split: Split | None, size: int, rank: int) -> np.ndarray:
    """Return 1 for the indices along split.axis that a sum over all ranks counts on this rank, else 0. [n] float64.

    Every entry of a parameter is counted once, on the first rank that holds it.

    Args:
        split: division of the parameter; None: one number for all of it. [1]
        size: number of ranks.
        rank: number of the rank.
    """
    if split is None:
        return np.full(1, float(rank == 0))
    counts = []
    for units, width in split.sections:
        first_holder = rank == 0 or rank * units // size != (rank - 1) * units // size
        counts.append(np.full(units_per_rank(units, size) * width, float(first_holder)))
    return np.concatenate(counts)


def is_repeated(split: Split | None, size: int) -> bool:
    """Return True if several ranks hold the same entries of a parameter."""
    return size > 1 and (split is None or any(units < size for units, _ in split.sections))


class Repeated(NamedTuple):
    """The entries of a divided parameter that several ranks hold."""

    held: np.ndarray
    """Indices of these entries along the axis, in the part of a rank. [n] int64"""
    places: np.ndarray
    """Places of these entries among all entries of the parameter that several ranks hold. [n] int64"""
    total: int
    """Number of entries along the axis that several ranks hold, on all ranks together."""


def repeated_entries(split: Split, size: int, rank: int) -> Repeated:
    """Return the entries of a rank's part that other ranks hold, too: those of sections with fewer units than ranks.

    Args:
        split: division of the parameter.
        size: number of ranks.
        rank: number of the rank.
    """
    held = [np.zeros(0, np.int64)]
    places = [np.zeros(0, np.int64)]
    begin = total = 0
    for units, width in split.sections:
        count = units_per_rank(units, size) * width
        if units < size:
            held.append(begin + np.arange(count))
            places.append(total + rank * units // size * width + np.arange(count))
            total += units * width
        begin += count
    return Repeated(np.concatenate(held), np.concatenate(places), total)


def gradient_is_partial(name: str, sequence_parallel: bool) -> bool:
    """Return True if the gradient of a repeated parameter is the sum of the gradients of the ranks that hold it.

    Without sequence parallelism, all ranks compute the same between regions, so each has the complete gradient there.

    Args:
        name: canonical name of the parameter.
        sequence_parallel: ranks have different tokens between regions.
    """
    if sequence_parallel:
        return True
    path = name.split(".")  # decoder.layers.<number>.<module of the layer>. ...
    if len(path) < 5 or path[3] not in REGIONS:
        return False
    return path[4:] not in (["linear_proj", "bias"], ["linear_fc2", "bias"])  # added to the sum of all ranks


def rank_config(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of one rank's part of the layers: its heads, inner widths and token ids."""
    size = config.tensor_model_parallel_size
    if size == 1:
        return config
    key_heads, value_heads, key, value = config.linear_heads
    has_groups = "attention" in config.mixers
    has_state = bool(config.mixers & {"gdn", "kda"})
    pattern = config.layer_pattern.split(",")
    shared = config.moe_shared_expert_intermediate_size
    return replace(
        config,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        num_attention_heads=config.num_attention_heads // size if config.has_softmax else config.num_attention_heads,
        num_query_groups=units_per_rank(config.query_groups, size) if has_groups else None,
        kv_channels=config.head_dim,
        linear_num_key_heads=units_per_rank(key_heads, size) if has_state else None,
        linear_num_value_heads=value_heads // size if has_state else None,
        linear_key_head_dim=key if has_state else None,
        linear_value_head_dim=value if has_state else None,
        layer_pattern=",".join(_rank_layer(config.layer(number), size) for number in range(len(pattern))),
        moe_shared_expert_intermediate_size=None if shared is None else shared // size,
        vocab_size=config.vocab_size // size,
    )


def splits_of(specs: Mapping[str, ParameterSpec]) -> dict[str, Split | None]:
    """Return the division of each parameter, by name."""
    return {name: spec.split for name, spec in specs.items()}


def _rank_layer(layer: LayerConfig, size: int) -> str:
    """Return the entry of layer_pattern for a rank's part of a layer."""
    return replace(layer, ffn_hidden_size=layer.ffn_hidden_size // size).description

"""The distributed optimizer: which elements of a parameter a rank updates, and which parameters have master weights.

All ranks with the same parameters, replicas as well as context ranks, divide the state of the optimizer among them. A
step sums the gradients and gives every rank the sum of its own shard (a reduce-scatter). The rank updates that shard of
the parameter, and receives the others (an all-gather). Gradients and parameters stay unsharded.

With bfloat16 activations, the weights of linear layers and short convolutions are stored in bfloat16, the type in which
layers read them, also with FP8. The optimizer has a float32 copy of its shard, the master weights. Other parameters
stay in float32: those that a layer reads in float32 (norms, A_log and dt_bias of decay gates, routers,
hyper-connections), biases, the embedding, whose gradient is a sum in float32, and the output layer.

Reference: Rajbhandari et al., arXiv 1910.02054, section 5.1 (stage 1 of ZeRO).
"""

from collections.abc import Sequence

from diptych.plans.config import TransformerConfig

SHARD_MULTIPLE = 16
"""A shard begins at a multiple of this number of elements. Vector instructions then divide its elements among them as
they divide those of an unsharded parameter; otherwise the results differ by rounding."""


def shard_size(elements: int, ranks: int) -> int:
    """Return the number of elements of a shard; the last ranks may have fewer.

    Args:
        elements: number of elements of a parameter.
        ranks: ranks that divide it.
    """
    if ranks == 1:
        return elements
    return SHARD_MULTIPLE * -(-elements // (SHARD_MULTIPLE * ranks))


def own_shard(elements: int, ranks: int, rank: int) -> slice:
    """Return the elements of a rank's shard, in the order of the flattened parameter; it may be empty.

    Args:
        elements: number of elements of a parameter.
        ranks: ranks that divide it.
        rank: number of the rank.
    """
    size = shard_size(elements, ranks)
    return slice(min(elements, rank * size), min(elements, (rank + 1) * size))


def has_master_weights(config: TransformerConfig) -> bool:
    """Return True if the distributed optimizer stores master weights."""
    return config.use_distributed_optimizer and config.compute_dtype != config.params_dtype


def stored_dtype(config: TransformerConfig, name: str, shape: Sequence[int]) -> str:
    """Return the type in which every rank stores a parameter: the type of activations if it has master weights.

    Args:
        config: the model.
        name: canonical name of the parameter.
        shape: its shape.
    """
    is_matrix = len(shape) > 1 and name.startswith("decoder.layers.") and name.endswith(".weight")
    is_read_rounded = is_matrix and not name.endswith(".router.weight")
    return config.compute_dtype if is_read_rounded and has_master_weights(config) else config.params_dtype

"""The distributed optimizer: which entries of a parameter a rank updates, and the order in which norms are summed.

All ranks with the same parameters, replicas as well as context ranks, divide the state of the optimizer among them. A
step sums the gradients and gives every rank the sum of its own share (a reduce-scatter). The rank updates that share of
the parameter, and receives the others (an all-gather). Gradients and parameters stay whole.

With bfloat16 activations, the weights of linear maps are stored in bfloat16, the type in which products read them, also
those of FP8. The optimizer has a float32 copy of its share, the master weights. Parameters that a layer reads in
float32 (norms, gates, routers, hyper-connections), vectors, and the embedding, whose gradient is a sum in float32, stay
in float32.

Reference: Rajbhandari et al., arXiv 1910.02054, section 5.1 (stage 1 of ZeRO).
"""

from collections.abc import Sequence

from diptych.plans.config import TransformerConfig

SHARE_MULTIPLE = 16
"""A share begins at a multiple of this number of entries, so that vector instructions divide its entries among them as
they divide those of a whole parameter; otherwise the results differ by rounding."""


def share_size(entries: int, ranks: int) -> int:
    """Return the number of entries of a share; the last ranks may have fewer.

    Args:
        entries: number of entries of a parameter.
        ranks: ranks that divide it.
    """
    if ranks == 1:
        return entries
    return SHARE_MULTIPLE * -(-entries // (SHARE_MULTIPLE * ranks))


def own_share(entries: int, ranks: int, rank: int) -> slice:
    """Return the entries of a rank's share, in the order of the flattened parameter; it may be empty.

    Args:
        entries: number of entries of a parameter.
        ranks: ranks that divide it.
        rank: number of the rank.
    """
    size = share_size(entries, ranks)
    return slice(min(entries, rank * size), min(entries, (rank + 1) * size))


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

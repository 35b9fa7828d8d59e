"""Predicted saving of activation recompute on one tensor-parallel rank, from widths alone."""

from diptych.plans.config import ITEM_SIZES, TransformerConfig


def activation_recompute_saving(config: TransformerConfig, batch: int, tp_size: int = 1) -> int:
    """Return the bytes that a rank saves less if activation functions are recomputed in every layer.

    Per token and layer these are the outputs of the activation function, as many elements as the inner width of the MLP
    divided by tp_size. With swiglu, the SiLU of the gate is added, which the product with the other half saves.

    Args:
        config: the single-device model.
        batch: sequences of a microbatch.
        tp_size: tensor-parallel ranks, which share each matrix.

    Raises:
        ValueError: tp_size is below 1, or does not divide a layer's inner width.
    """
    layers = [config.layer(number) for number in range(config.num_layers)]
    if tp_size < 1 or any(layer.ffn_hidden_size % tp_size for layer in layers):
        widths = sorted({layer.ffn_hidden_size for layer in layers})
        raise ValueError(f"tp_size: expected a divisor of ffn_hidden_size, here {widths}, got {tp_size}")
    elements = sum(layer.ffn_hidden_size // tp_size * (2 if layer.activation == "swiglu" else 1) for layer in layers)
    return batch * config.seq_length * elements * ITEM_SIZES[config.compute_dtype]

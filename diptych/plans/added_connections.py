"""Hyper-connections that are added to a third-party model: their configuration and initial values."""

import math
from typing import Any, Literal

from diptych.plans.config import TransformerConfig

SETTINGS = ("sinkhorn_iterations", "sinkhorn_last", "mhc_epsilon", "mhc_transpose_h_res", "seed", "impl")
"""Settings of TransformerConfig that an added hyper-connection has."""


def connection_config(
    hidden_size: int,
    num_blocks: int,
    num_residual_streams: int,
    params_dtype: Literal["float32", "float64"],
    settings: dict[str, Any],
) -> TransformerConfig:
    """Return the configuration of the hyper-connections of some blocks.

    Args:
        hidden_size: width of the hidden states.
        num_blocks: number of blocks.
        num_residual_streams: number of streams, at least 2.
        params_dtype: float32 or float64.
        settings: values of SETTINGS; others keep their defaults.

    Raises:
        TypeError: a setting is unknown.
        ValueError: there are fewer than two streams, or a setting breaks a rule of TransformerConfig.
    """
    unknown = next((name for name in settings if name not in SETTINGS), None)
    if unknown is not None:
        raise TypeError(f"add_hyper_connections: expected settings out of {', '.join(SETTINGS)}, got {unknown!r}")
    if not isinstance(num_residual_streams, int) or isinstance(num_residual_streams, bool) or num_residual_streams < 2:
        raise ValueError(f"num_residual_streams: expected an integer >= 2, got {num_residual_streams!r}")
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_blocks,
        num_attention_heads=1,
        rotary_percent=0.0,
        enable_hyper_connections=True,
        num_residual_streams=num_residual_streams,
        params_dtype=params_dtype,
        **settings,
    )


def initial_bias_of_h_pre(num_residual_streams: int) -> float:
    """Return the bias with which h_pre = sigmoid(bias) is 1 / S, so that equal streams are aggregated to themselves.

    With h_post = 1 and a doubly stochastic h_res, S equal streams then stay equal, and the model computes what it did
    without hyper-connections.
    """
    return -math.log(num_residual_streams - 1)

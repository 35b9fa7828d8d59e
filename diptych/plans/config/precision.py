"""Precision of a model: what mixed precision keeps in float32, and the rules of FP8."""

from dataclasses import replace
from typing import Any

from diptych.plans.config.rules import Rule, choice, count, names_layers
from diptych.plans.context.exchange import PIPELINED

KEPT_IN_FLOAT32 = {
    "parameters": "weights, their gradients and both moments of the optimizer; a weight is rounded where it is used. "
    "With a distributed optimizer the weights of linear layers are rounded after each update instead",
    "norm_statistics": "mean square and gain of an RMSNorm; its result is rounded once",
    "rotary_angles": "angles, sine and cosine of the rotary embedding; sine and cosine are rounded before the product",
    "softmax": "softmax of the attention scores; its weights are rounded before they multiply the values",
    "hyper_connection_coefficients": "h_pre, h_post, h_res, all Sinkhorn iterates, and the mean square they divide by",
    "router": "logits and scores of a router of experts; the weights are rounded before they multiply the outputs",
    "logits": "returned logits, and the loss",
}
"""Values that stay in float32 with ``TransformerConfig.bf16``, in both backends. Everything else between two layers is
bfloat16: embeddings, residual streams, operands and results of matrix products (which accumulate in float32)."""

ITEM_SIZES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by the name of its type."""

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("current", "delayed", "blockwise")
DEFAULT_HISTORY = 16
"""Default of fp8_amax_history_len."""
NO_FP8 = {"fp8": None, "fp8_recipe": "current", "fp8_amax_history_len": DEFAULT_HISTORY}
"""Settings of a model without FP8."""


def in_dtype(config: Any, dtype: str) -> Any:
    """Return the configuration of the same model with another type of activations, and without FP8.

    Args:
        config: a TransformerConfig.
        dtype: "float64", "float32" or "bfloat16".
    """
    params_dtype = "float64" if dtype == "float64" else "float32"
    return replace(config, params_dtype=params_dtype, bf16=dtype == "bfloat16", **NO_FP8)


STORAGE_RULES: tuple[Rule, ...] = (
    choice("activation_storage", (None, "fp8")),
    names_layers("activation_storage_layers", "activation_storage"),
)
"""Rules that come before those that read the settings of layers."""

FP8_RULES: tuple[Rule, ...] = (
    Rule(
        "fp8",
        lambda c: c.fp8 is None or c.fp8 in FP8_FORMATS,
        lambda c: f"fp8: expected None, {' or '.join(map(repr, FP8_FORMATS))}, got {c.fp8!r}",
    ),
    choice("fp8_recipe", FP8_RECIPES),
    Rule(
        "fp8_recipe needs fp8",
        lambda c: c.fp8 is not None or c.fp8_recipe == "current",
        lambda c: f"fp8_recipe: expected 'current', the default, without fp8, got {c.fp8_recipe!r}; give fp8",
    ),
    count("fp8_amax_history_len"),
    Rule(
        "fp8_amax_history_len <= 2**24",
        lambda c: c.fp8_amax_history_len <= 2**24,
        lambda c: (
            "fp8_amax_history_len: expected at most 2**24 steps, which float32 counts exactly, got "
            f"{c.fp8_amax_history_len}"
        ),
    ),
    Rule(
        "fp8_amax_history_len needs delayed",
        lambda c: (c.fp8 is not None and c.fp8_recipe == "delayed") or c.fp8_amax_history_len == DEFAULT_HISTORY,
        lambda c: (
            f"fp8_amax_history_len: expected {DEFAULT_HISTORY}, the default, without fp8_recipe='delayed', got "
            f"{c.fp8_amax_history_len}"
        ),
    ),
    Rule(
        "fp8 adds up in float32",
        lambda c: c.fp8 is None or c.params_dtype != "float64",
        lambda c: (
            f"fp8: expected None with params_dtype='float64', since 8-bit matrix products are added up in float32, "
            f"got {c.fp8!r}"
        ),
    ),
    Rule(
        "fp8_recipe current needs ranks in step",
        lambda c: (
            c.fp8 is None or c.fp8_recipe != "current" or c.context_parallel_size == 1 or c.cp_exchange != PIPELINED
        ),
        lambda c: (
            f"fp8_recipe: expected 'delayed' or 'blockwise' with cp_exchange={PIPELINED!r}, got 'current', for which "
            "context ranks would wait for each other in every matrix product"
        ),
    ),
)

"""Values that mixed precision keeps in float32."""

KEPT_IN_FLOAT32 = {
    "parameters": "weights, their gradients and both moments of the optimizer; a weight is rounded where it is used",
    "norm_statistics": "mean square and gain of an RMSNorm; its result is rounded once",
    "rotary_angles": "angles, sine and cosine of the rotary embedding; sine and cosine are rounded before the product",
    "softmax": "softmax of the attention scores; its weights are rounded before they multiply the values",
    "hyper_connection_coefficients": "h_pre, h_post, h_res, all Sinkhorn iterates, and the mean square they divide by",
    "router": "logits and scores of a router of experts; the weights are rounded before they multiply the outputs",
    "logits": "returned logits, and the loss",
}
"""Values that stay in float32 with ``TransformerConfig.bf16``, in both backends. Everything else between two layers is
bfloat16: embeddings, residual streams, operands and results of matrix products (which accumulate in float32)."""

"""What mixed precision keeps in float32."""

KEPT_IN_FLOAT32 = {
    "parameters": "weights, their gradients and both moments of the optimizer; a weight is rounded where it is used",
    "norm_statistics": "mean square and gain of an RMSNorm; its result is rounded once",
    "rotary_angles": "angles, sine and cosine of the rotary embedding; sine and cosine are rounded to multiply",
    "softmax": "softmax of the attention scores; its weights are rounded to mix the values",
    "hyper_connection_coefficients": "h_pre, h_post, h_res, every iterate of Sinkhorn, and the mean square below them",
    "logits": "logits handed out, and the loss",
}
"""What ``TransformerConfig.bf16`` leaves in float32, in both backends. All else between two layers is bfloat16:
embeddings, residual streams, every matrix product's operands and result (products are summed in float32)."""

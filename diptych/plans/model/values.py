"""Names of the values that a layer may save for backward."""

VALUES = (
    "residual_streams",
    "h_pre",
    "h_post",
    "h_res",
    "aggregated",
    "mixed",
    "expanded",
    "input_layernorm",
    "kv_latent",
    "q",
    "k",
    "v",
    "short_conv",
    "attention_weights",
    "core_attn",
    "attention_output",
    "post_attention_layernorm",
    "pre_mlp_layernorm",
    "fc1",
    "activation",
    "mlp_output",
    "post_mlp_layernorm",
    "region_input",
    "region_output",
    "mixer_input_fp8",
    "mixer_output_fp8",
    "mlp_input_fp8",
    "fc1_fp8",
    "activation_fp8",
)
"""Names of a layer's values, equal in both backends, in kernels and in reports.

residual_streams is the input of a sublayer, [B, T, S, D] or [B, T, D]; h_pre to expanded belong to hyper-connections;
kv_latent is the output of the down projection of an mla layer; short_conv is the concatenation of q, k and v of a gdn
or kda layer; fc1 and activation are the input and output of the activation function; region_input and region_output are
what tensor-parallel ranks exchange before and after mixer and MLP, which only full recompute exchanges again. A value
to which two names apply (without an exchange before a mixer, region_input is the norm's output) has the first. Names
that end in fp8 are inputs of linear layers and activation functions that are saved in 8 bits; see
diptych.plans.activation_storage.
"""

LAYER_INPUT = "residual_streams"
"""Name of the input of a layer."""

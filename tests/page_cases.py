"""Plans whose pages are tested, small enough to be drawn at once."""

from dataclasses import replace

from parity.page import PageRequest
from plans.config import TransformerConfig
from plans.step_time import Machine

MODEL = TransformerConfig(512, 8, 8, seq_length=512, bf16=True, use_flash_attn=True)
PIPELINE = replace(
    MODEL,
    pipeline_model_parallel_size=4,
    pipeline_schedule="zb-h1",
    recompute_granularity="selective",
    recompute_modules=("activation", "layernorm"),
)
UNEVEN = replace(
    MODEL,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_schedule="zb-v",
    pipeline_model_parallel_layout="Et|tt|tttt|tL",
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=2,
)
OFFLOADED = replace(
    MODEL,
    pipeline_model_parallel_size=2,
    enable_tensor_offload=True,
    enable_activation_offload=True,
    enable_hyper_connections=True,
    recompute_granularity="selective",
    recompute_modules=("mhc",),
)
ALONE = replace(MODEL, enable_tensor_offload=True, recompute_granularity="full", recompute_method="block")
FAST_LINK = Machine(link_bandwidth=1e13)

REQUESTS = {
    "pipeline": PageRequest(PIPELINE, 2, 6),
    "uneven": PageRequest(UNEVEN, 1, 5),
    "offloaded": PageRequest(OFFLOADED, 1, 4),
    "alone": PageRequest(ALONE, 4, 3),
    "mesh": PageRequest(replace(MODEL, pipeline_model_parallel_size=2, context_parallel_size=2), 2, 4, 3),
}

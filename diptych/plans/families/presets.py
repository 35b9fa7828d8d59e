"""Published models by name: the content of their config.json, for plans without their folder.

Sources: the configurations that the models were published with, as of 2026-11. Settings that the text model does not
use are left out, and so are parts for images and for the prediction of further tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.families import find_family
from diptych.plans.families.family import FamilyError, parse_model
from diptych.plans.families.folder import CONFIG, model_of, source_of
from diptych.plans.text_files import one_line


def _qwen3_5(hidden_size: int, intermediate_size: int, layers: int, heads: int, groups: int, value_heads: int):
    """Return the configuration of a dense model of Qwen3.5; the small ones share embedding and head."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "linear_num_value_heads": value_heads,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": hidden_size < 4096,
    }


def _llama(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the configuration of a model of the first release of Llama 3."""
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }


ENDINGS = ("-instruct", "-base", "-thinking")
"""Variants of a model, of equal sizes."""
KIMI_FULL_ATTENTION = (4, 8, 12, 16, 20, 24, 27)
"""Layers of Kimi-Linear-48B-A3B with full attention; the first layer has number 1."""
PRESETS: Mapping[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _qwen3_5(1024, 3584, 24, 8, 2, 16),
    "Qwen3.5-2B": _qwen3_5(2048, 6144, 24, 8, 2, 16),
    "Qwen3.5-4B": _qwen3_5(2560, 9216, 32, 16, 4, 32),
    "Qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, 4, 32),
    "Qwen3.5-27B": _qwen3_5(5120, 17408, 64, 24, 4, 48),
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": [*KIMI_FULL_ATTENTION],
            "kda_layers": [number for number in range(1, 28) if number not in KIMI_FULL_ATTENTION],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "model_max_length": 1_048_576,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "OLMo-hybrid-7B": {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "full_attention_interval": 4,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "tie_word_embeddings": False,
    },
    "Llama-3-8B": _llama(4096, 14336, 32, 32),
    "Llama-3-70B": _llama(8192, 28672, 80, 64),
}
"""Contents of config.json by the name of the model, without that of its publisher."""


def find_model(model_source: str) -> TransformerConfig:
    """Return the configuration of a published model, in float32.

    Args:
        model_source: a name of PRESETS, in any case, with or without its publisher and its variant
            ("meta-llama/Meta-Llama-3-8B-Instruct"); or a Hugging Face folder or an imported model, which come first.

    Raises:
        FamilyError: there is no such model, or the one of the folder is not supported.
    """
    folder = Path(model_source)
    if model_source and folder.is_dir():
        return model_of(source_of(folder) or folder)[1]
    last = model_source.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for ending in ENDINGS:
        last = last.removesuffix(ending)
    config = next((config for name, config in PRESETS.items() if name.lower() == last), None)
    if config is None:
        raise FamilyError(
            f"model_source: expected a Hugging Face folder with {CONFIG}, or one of {', '.join(PRESETS)}, got "
            f"{one_line(model_source)}"
        )
    return parse_model(find_family(config), config)

"""A Qwen3.5 model of transformers on two context-parallel ranks, each with half of the tokens."""

import torch
from transformers import AttentionInterface, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from reference_torch.context_parallel import build_cp_context, cp_attention, cp_short_convolution
from reference_torch.delta_rule import chunk_gated_delta_rule
from reference_torch.rank_pool import RankPool


def use_context(context) -> None:
    """Replace the functions that Qwen3.5 calls in this process by those of a context."""
    rule = lambda *qkv, use_cache, **names: chunk_gated_delta_rule(*qkv, **names, cp_context=context)  # noqa: E731
    modeling.torch_chunk_gated_delta_rule = rule
    modeling.causal_conv1d_fn = lambda x, weight, *_, **activation: cp_short_convolution(x.mT, weight, context).mT
    attention = lambda *qkv: cp_attention(*(x.transpose(1, 2) for x in qkv), context)  # noqa: E731
    AttentionInterface.register("context_parallel", lambda _, q, k, v, *mask, **scaling: (attention(q, k, v), None))


def main() -> list[int]:
    """Return the shape of this rank's logits, for half of 128 tokens that know all earlier ones."""
    use_context(build_cp_context(torch.tensor([0, 128]).int(), torch.distributed.group.WORLD, conv1d_kernel_size=4))
    config = Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=4, attn_implementation="context_parallel")
    own = torch.arange(128).chunk(2)[torch.distributed.get_rank()][None]
    return [*Qwen3_5ForCausalLM(config)(own, position_ids=own, use_cache=False).logits.shape]


if __name__ == "__main__":
    print(*RankPool(2).run("context_parallel_qwen3_5:main"))

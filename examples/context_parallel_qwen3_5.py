"""A Qwen3.5 model of transformers with context parallelism: two ranks compute the loss and gradients of one process.

python examples/context_parallel_qwen3_5.py          (needs transformers)
"""

import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from reference_torch.context_parallel import build_cp_context, cp_attention, cp_short_convolution
from reference_torch.delta_rule import chunk_gated_delta_rule
from reference_torch.rank_pool import RankPool


def use_context(context):
    """Replace delta rule, convolution and attention of Qwen3.5 in this process by their context-parallel versions."""

    def convolution(x, weight, bias, activation, **_):  # with SiLU
        return cp_short_convolution(x.mT, weight, context).mT

    def attention(module, q, k, v, mask, scaling, **_):
        return cp_attention(*(x.transpose(1, 2) for x in (q, k, v)), context), None

    def delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, **_):
        settings = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cp_context": context}
        return chunk_gated_delta_rule(q, k, v, g, beta, **settings)

    modeling.torch_chunk_gated_delta_rule = delta_rule
    modeling.causal_conv1d_fn = convolution
    AttentionInterface.register("context_parallel", attention)


def loss_and_gradients(size: int) -> tuple:
    """Run one step on this rank's part of the tokens, and return the sums over all ranks."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = Qwen3_5TextConfig(**sizes, **heads, linear_key_head_dim=8, linear_value_head_dim=8)
    rank = torch.distributed.get_rank() if size > 1 else 0
    if size > 1:
        offsets, group = torch.tensor([0, 128], dtype=torch.int32), torch.distributed.group.WORLD
        use_context(build_cp_context(offsets, group, config.linear_conv_kernel_dim))
    model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="context_parallel" if size > 1 else "eager")
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.zeros_(parameter)  # the initial decays are so fast that their gradients are rounding errors
    tokens = torch.randint(0, 50, (1, 129))
    part = torch.arange(128).chunk(size)[rank]
    logits = model(tokens[:, part], position_ids=part[None], use_cache=False).logits
    loss = F.cross_entropy(logits[0], tokens[0, part + 1], reduction="sum") / 128
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for each in found if size > 1 else []:
        torch.distributed.all_reduce(each)
    return tuple(each.numpy() for each in found)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    alone = loss_and_gradients(1)
    with RankPool(2) as pool:
        several = pool.run("context_parallel_qwen3_5:loss_and_gradients", 2)[0]
    worst = max(abs(a - b).max() / abs(a).max() for a, b in zip(alone, several, strict=True))
    print(f"loss {alone[0]:.6f} and {several[0]:.6f}, gradients within {worst:.0e} of their largest element")
    assert worst < 1e-4, worst

"""What ranks run in test_examples.py: one step of a Qwen3.5 model with the functions of the example."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from reference_torch.context_parallel import build_cp_context

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Import an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_and_gradients(size: int) -> tuple:
    """Run one step on this rank's part of the tokens, and return the sums over all ranks."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = Qwen3_5TextConfig(**sizes, **heads, linear_key_head_dim=8, linear_value_head_dim=8)
    rank = torch.distributed.get_rank() if size > 1 else 0
    if size > 1:
        offsets, group = torch.tensor([0, 128], dtype=torch.int32), torch.distributed.group.WORLD
        context = build_cp_context(offsets, group, config.linear_conv_kernel_dim)
        example("context_parallel_qwen3_5").use_context(context)
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
